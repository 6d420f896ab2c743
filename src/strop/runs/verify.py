"""`strop verify`: every file, checksum and rule of a run directory, and in plain sentences what is broken.

Reads and changes nothing. Rules about the attempts themselves are in `strop.runs.verify_attempts`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import AttemptsSettings, DistillSettings, Recipe, StageSettings
from strop.errors import RunError, StropError
from strop.rollouts import Group
from strop.runs import files
from strop.runs.events import BadLine, read_lines
from strop.runs.reading import RolloutFile, RunRecord
from strop.runs.run import check_checkpoint, read_recipe
from strop.runs.store import read_groups, read_state, rollout_from_dict
from strop.runs.verify_attempts import (
    Problem,
    StageBook,
    check_all_came_out,
    check_batch,
    check_evaluation,
    check_groups,
    check_limits,
    check_places,
    check_rollout,
    check_seeds,
    seed_of,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

#: How far the ledger's total may be from the clock: a share, and seconds for a run that has hardly begun.
LEDGER_SHARE, LEDGER_SECONDS = 0.02, 0.5


def verify_run(path: Path) -> list[Problem]:
    """Check a run: finished, stopped, or killed.

    Args:
        path: its directory.

    Returns:
        What is broken, by file; empty if nothing is.

    Raises:
        RunError: there is no run in that directory.
    """
    if not (path / "config.toml").exists() and not (path / "events.jsonl").exists():
        raise RunError(f"{path} holds no run: it has neither config.toml nor events.jsonl.")
    check = _Verification(path)
    return sorted(set(check.problems()))


def show_verification(path: Path) -> tuple[RenderableType, int]:
    """What `strop verify` prints, and its exit status: 0 if all is well, 1 if something is broken."""
    from rich.console import Group as Lines
    from rich.text import Text

    problems = verify_run(path)
    broken = [problem for problem in problems if not problem.mended]
    lines = [
        Text.assemble((problem.file, "bold"), ": ", (problem.sentence, "yellow" if problem.mended else "red"))
        for problem in problems
    ]
    if left := len(problems) - len(broken):
        lines.append(Text(f"{left} of these a kill left behind; strop train --resume {path} mends them.", style="dim"))
    if broken:
        verdict = Text(f"{len(broken)} problem{'s' * (len(broken) != 1)} in {path}.", style="bold red")
    else:
        verdict = Text(f"{path} is whole: every file, checksum and rule was checked.", style="green")
    return Lines(*lines, verdict), 1 if broken else 0


class _Verification:
    """The checks, in order. What one can't read, those after it leave out."""

    def __init__(self, path: Path) -> None:
        self.path, self.record = path, RunRecord(path)
        self.recipe: Recipe | None = None
        self.seen: dict[str, str] = {}  # file of every attempt
        self.last: dict[str, Group] = {}  # groups of the newest batch of the stage at hand
        self.unreadable = False

    def problems(self) -> Iterator[Problem]:
        """Everything that is wrong."""
        yield from self._config()
        yield from self._events()
        yield from self._recorded_files()
        yield from self._evaluations()
        if self.recipe is not None:
            yield from self._stages(self.recipe)
            if self.recipe.debug.only != "rollouts":
                yield from self._steps(self.recipe)
            yield from self._checkpoints(self.recipe)
        yield from self._ledger()
        yield from self._summary()
        for part in self.path.rglob(".*.part"):
            yield Problem(str(part.relative_to(self.path)), "is half-written: a process was killed in it", mended=True)

    @property
    def finished(self) -> bool:
        return self.record.state == "finished"

    def _config(self) -> Iterator[Problem]:
        if not (self.path / "config.toml").exists():
            yield Problem("config.toml", "is missing: what was asked of the run is not known")
            return
        try:
            self.recipe = read_recipe(self.path)
        except StropError as error:
            yield Problem("config.toml", f"is damaged: {error}")

    # -- the log ----------------------------------------------------------------------------------------------------

    def _events(self) -> Iterator[Problem]:
        if not (self.path / "events.jsonl").exists():
            yield Problem("events.jsonl", "is missing")
            return
        yield from _bad_lines("events.jsonl", self.record._lines)
        clock, reached = 0.0, 0
        for number, event in enumerate(self.record.events, 1):
            if not isinstance(event.get("clock"), int | float) or "kind" not in event:
                yield Problem("events.jsonl", f"event {number} has no clock or no kind")
                continue
            if event["clock"] < clock:
                yield Problem("events.jsonl", f"event {number} goes back from {clock:g} s to {event['clock']:g} s")
            clock = max(clock, event["clock"])
            if event["kind"] == "step" and self.recipe:
                order = [stage.name for stage in self.recipe.stages]
                if event["stage"] not in order:
                    yield Problem("events.jsonl", f"event {number} is a step of {event['stage']!r}, which is no stage")
                elif order.index(event["stage"]) < reached:
                    yield Problem("events.jsonl", f"event {number} is a step of a stage that was over")
                else:
                    reached = order.index(event["stage"])
        if self.record.events and self.record.events[0].get("kind") != "run":
            yield Problem("events.jsonl", "does not begin with the run's start: its beginning is lost")

    def _steps(self, recipe: Recipe) -> Iterator[Problem]:
        """Steps of a stage are logged once each, from 0 on; those of an ended stage are all there."""
        for stage in recipe.stages:
            logged = [event["step"] for event in self.record.of_kind("step") if event["stage"] == stage.name]
            ended = self._ended(stage.name)
            for place, step in enumerate(logged):
                if step != place:
                    sentence = f"step {place + 1} of {stage.name} is not where it should be: step {step + 1} is there"
                    yield Problem("events.jsonl", sentence)
                    break
            else:
                wanted = self._steps_made(stage)
                if len(logged) > wanted or (ended and len(logged) < wanted):
                    sentence = f"has {len(logged)} steps of {stage.name}, but the recipe asks for {wanted}"
                    yield Problem("events.jsonl", sentence)

    def _ended(self, stage: str) -> bool:
        return any(e["stage"] == stage and e["what"] == "ended" for e in self.record.of_kind("stage"))

    def _steps_made(self, stage: StageSettings) -> int:
        """The recipe's, or fewer where held-out examples may end the stage early and did."""
        watched = getattr(stage, "validation", None)
        ends = [e["step"] for e in self.record.of_kind("stage") if e["stage"] == stage.name and e["what"] == "ended"]
        return int(ends[-1]) if ends and watched and watched.patience else stage.steps

    @cached_property
    def _versions(self) -> dict[tuple[str, int], int]:
        """Weight version before each logged step; after the last one under ("", 0)."""
        found: dict[tuple[str, int], int] = {}
        version = 0
        for event in self.record.of_kind("step", "stage"):
            if event["kind"] == "stage":  # it may begin with another model than the one before it left
                if event["what"] == "began" and (event["stage"], 0) not in found:
                    version = int(event.get("version", version))
                continue
            found[event["stage"], event["step"]] = version
            version = int(event["metrics"].get("version", version))
        return {**found, ("", 0): version}

    # -- files of attempts ------------------------------------------------------------------------------------------

    def _recorded_files(self) -> Iterator[Problem]:
        """Every recorded file is there, and has the recorded content."""
        recorded = {event["file"]: event["sha256"] for event in self.record.of_kind("batch")}
        there = {path.name: path for path in sorted((self.path / "rollouts").glob("*.parquet"))}
        for name in sorted(recorded.keys() - there.keys()):
            yield Problem(f"rollouts/{name}", "is missing, but events.jsonl records it")
        for name, path in there.items():
            if name not in recorded:
                sentence = "is not recorded in events.jsonl: a kill fell between the two, or the record was lost"
                yield Problem(f"rollouts/{name}", sentence, mended=not self.finished)
            elif files.sha256(path) != recorded[name]:
                yield Problem(
                    f"rollouts/{name}", "has changed since it was written: its SHA-256 isn't the recorded one"
                )

    def _groups(self, file: RolloutFile) -> list[tuple[Group, str]] | str:
        """What is in a file, or why it can't be read."""
        return self._read(file.path)

    def _read(self, path: Path) -> list[tuple[Group, str]] | str:
        try:
            return read_groups(path)
        except (StropError, ValueError, KeyError, TypeError, AttributeError) as error:
            self.unreadable = True
            return f"can't be read: {error}"

    def _evaluations(self) -> Iterator[Problem]:
        logged = {str(event["name"]).replace(" ", "-"): event for event in self.record.of_kind("evaluation")}
        there = {file.evaluation: file for file in self.record.rollout_files if file.evaluation is not None}
        for name in sorted(logged.keys() - there.keys()):
            yield Problem(f"rollouts/evaluation-{name}.parquet", "is missing, but the evaluation is logged")
        for name, file in there.items():
            where, groups = f"rollouts/{file.path.name}", self._groups(file)
            if isinstance(groups, str):
                yield Problem(where, groups)
                continue
            sentences = list(check_groups(file.path.name, groups, self.seen))
            if self.recipe is not None:
                sentences += check_seeds(groups, seed_of(self.recipe, "evaluation"))
            if name in logged:
                sentences += check_evaluation(groups, logged[name])
            elif self.finished:
                sentences.append("holds an evaluation that events.jsonl doesn't have")
            yield from (Problem(where, sentence) for sentence in sentences)

    def _stages(self, recipe: Recipe) -> Iterator[Problem]:
        for stage in recipe.stages:
            if isinstance(stage, DistillSettings) and stage.stored:
                yield from self._given(stage)
            elif isinstance(stage, AttemptsSettings):
                yield from self._stage(recipe, stage)

    def _given(self, stage: DistillSettings) -> Iterator[Problem]:
        """The attempts that a stage was given are all there, and each was scored. Where they come from, they came out."""
        path = self.path / "rollouts" / f"{stage.name}-stored.parquet"
        steps = [event for event in self.record.of_kind("step") if event["stage"] == stage.name]
        if not path.exists():
            if steps:
                yield Problem(f"rollouts/{path.name}", f"is missing, but {len(steps)} steps were trained on it")
            return
        groups = self._read(path)
        if isinstance(groups, str):
            yield Problem(f"rollouts/{path.name}", groups)
            return
        for group, _ in groups:
            for rollout in group.rollouts:
                sentences = [*check_rollout(group, rollout)] + ["was not scored"] * (rollout.reward is None)
                yield from (Problem(f"rollouts/{path.name}", f"attempt {rollout.id} {s}") for s in sentences)

    def _stage(self, recipe: Recipe, stage: AttemptsSettings) -> Iterator[Problem]:
        """A stage's batches in order, then what they add up to, then its journal."""
        before = {step: version for (name, step), version in self._versions.items() if name == stage.name}
        book, self.last = StageBook(stage, before, self._versions["", 0]), {}
        metrics = {e["step"]: e["metrics"] for e in self.record.of_kind("step") if e["stage"] == stage.name}
        mine = [file for file in self.record.rollout_files if file.stage == stage.name]
        for step in sorted(metrics.keys() - {file.step - 1 for file in mine if file.step is not None}):
            sentence = f"is missing, but step {step + 1} was trained on it"
            yield Problem(f"rollouts/{stage.name}-{step:06d}.parquet", sentence)
        longest, readable = max(asked.agent.max_tokens for asked in recipe.environments_of(stage)), True
        for file in sorted(mine, key=lambda file: math.inf if file.step is None else file.step):
            where, groups = f"rollouts/{file.path.name}", self._groups(file)
            if isinstance(groups, str):
                readable = False
                yield Problem(where, groups)
                continue
            sentences = list(check_groups(file.path.name, groups, self.seen))
            sentences += check_seeds(groups, seed_of(recipe, stage.name))
            sentences += check_limits(groups, longest, recipe.sampler.max_context)
            if file.step is None:
                sentences += check_places(book, file.path.name, groups)
            else:
                step = file.step - 1  # readers count from 1, files and events from 0
                sentences += check_batch(book, file.path.name, step, groups, metrics.get(step))
                state = read_state(file.path)
                if int(state["next"]) < book.next:
                    sentences.append("counts fewer groups than the batch before it")
                book.next, book.open = int(state["next"]), state["open"]
                self.last = {group.id: group for group, _ in groups}
            yield from (Problem(where, sentence) for sentence in sentences)
        if readable:  # else what is missing is named already
            yield from (Problem("rollouts", f"{s} (stage {stage.name})") for s in self._came_out(stage, book))
        yield from self._journal(stage, book)

    def _came_out(self, stage: AttemptsSettings, book: StageBook) -> Iterator[str]:
        ended = self._ended(stage.name)
        there = (self.path / "rollouts" / f"{stage.name}-rest.parquet").exists()
        yield from check_all_came_out(book, ended or there)

    def _journal(self, stage: AttemptsSettings, book: StageBook) -> Iterator[Problem]:
        """What finished since the newest batch: whole, once each, and of groups that are open."""
        path = self.path / "rollouts" / f"{stage.name}.journal"
        where = f"rollouts/{path.name}"
        if not path.exists():
            return
        if self._ended(stage.name):
            yield Problem(where, "is still there, though its stage is over: what is in it may be in no file")
        lines = list(read_lines(path))
        yield from _bad_lines(where, lines)
        seen: set[str] = set()
        members = stage.collect.group_size + stage.collect.oversample
        for number, line in enumerate(lines, 1):
            if isinstance(line, BadLine):
                continue
            try:
                rollout = rollout_from_dict(line["rollout"])
                identity = f"{stage.name}-{int(line['group']):06d}/{rollout.member}"
            except (KeyError, TypeError, ValueError) as error:
                yield Problem(where, f"line {number} is no attempt ({type(error).__name__}: {error})")
                continue
            if rollout.id != identity or not 0 <= rollout.member < members:
                yield Problem(where, f"line {number} holds attempt {rollout.id} as {identity}")
            if rollout.id in seen:
                yield Problem(where, f"line {number} holds attempt {rollout.id} a second time")
            if rollout.ending is None:
                yield Problem(where, f"line {number}: attempt {rollout.id} has no ending")
            seen.add(rollout.id)
            group = self.last.get(rollout.id.partition("/")[0])
            stored = {member.id: member for member in group.rollouts} if group else {}
            if rollout.id in self.seen and (
                rollout.id not in stored
                or [call.tokens for call in stored[rollout.id].calls] != [call.tokens for call in rollout.calls]
            ):
                yield Problem(where, f"line {number}: attempt {rollout.id} is in {self.seen[rollout.id]} already")

    # -- checkpoints, ledger, summary -------------------------------------------------------------------------------

    def _checkpoints(self, recipe: Recipe) -> Iterator[Problem]:
        logged: dict[str, list[int]] = {stage.name: [] for stage in recipe.stages}
        for event in self.record.of_kind("checkpoint"):
            if event["stage"] in logged and event["step"] not in logged[event["stage"]]:
                logged[event["stage"]].append(event["step"])
        for stage in recipe.stages:
            kept = sorted(logged[stage.name])[-stage.checkpoints.keep :]
            for step in kept:
                if not (self.path / "checkpoints" / f"{stage.name}-{step:06d}").is_dir():
                    yield Problem(f"checkpoints/{stage.name}-{step:06d}", "is missing, but events.jsonl records it")
            trains = recipe.debug.only != "rollouts"
            if trains and self._ended(stage.name) and self._steps_made(stage) not in logged[stage.name]:
                yield Problem("events.jsonl", f"stage {stage.name} ended without a checkpoint of its last step")
        for folder in sorted((self.path / "checkpoints").glob("[!.]*")):
            yield from self._checkpoint(folder, logged)

    def _checkpoint(self, folder: Path, logged: Mapping[str, list[int]]) -> Iterator[Problem]:
        where = f"checkpoints/{folder.name}"
        stage, _, step = folder.name.rpartition("-")
        if stage not in logged or not step.isdigit():
            yield Problem(where, "is no checkpoint of a stage of this run")
            return
        if sentences := list(check_checkpoint(folder)):
            yield from (Problem("checkpoints", sentence) for sentence in sentences)
            return
        listed = {"manifest.json", *json.loads((folder / "manifest.json").read_text(encoding="utf-8"))}
        there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        for name in sorted(there - listed):
            yield Problem(where, f"{name} is not in its manifest")
        state = json.loads((folder / "state.json").read_text(encoding="utf-8")) if "state.json" in there else {}
        if (state.get("stage"), state.get("step")) != (stage, int(step)):
            yield Problem(where, f"says that it is step {state.get('step')} of {state.get('stage')}")
        after = self._versions.get((stage, int(step)), self._version_after(stage, int(step)))
        if "version" in state and state["version"] != after:
            sentence = f"has weight version {state['version']}, but the steps that were logged before it give {after}"
            yield Problem(where, sentence)

    def _version_after(self, stage: str, steps: int) -> int:
        """Weight version after so many steps of a stage."""
        for event in self.record.of_kind("stage"):  # its best weights, under a version of their own
            if (event["stage"], event["what"], event["step"]) == (stage, "went back", steps):
                return int(event["version"])
        version = self._versions.get((stage, 0), 0)
        for event in self.record.of_kind("step"):
            if event["stage"] == stage and event["step"] < steps:
                version = int(event["metrics"].get("version", version))
        return version

    def _ledger(self) -> Iterator[Problem]:
        earlier = 0.0
        for event in self.record.of_kind("cost"):
            accounts: Mapping[str, Mapping[str, float]] = event["ledger"]["accounts"]
            parts = [seconds for phase in accounts.values() for seconds in phase.values()]
            total, clock = math.fsum(parts), float(event["clock"])
            if min(parts, default=0.0) < -1e-6:
                yield Problem("events.jsonl", f"the ledger at {clock:.1f} s has an account below 0")
            if total < earlier - 1e-3:
                yield Problem("events.jsonl", f"the ledger at {clock:.1f} s has less in it than before")
            if abs(total - clock) > LEDGER_SHARE * clock + LEDGER_SECONDS:
                sentence = f"the ledger at {clock:.1f} s adds up to {total:.1f} s: its parts aren't the whole"
                yield Problem("events.jsonl", sentence)
            earlier = max(earlier, total)

    def _summary(self) -> Iterator[Problem]:
        """summary.json is there if the run is finished, and is what its files give."""
        path = self.path / "summary.json"
        if self.finished != path.exists():
            sentence = "is missing, though the run is finished" if self.finished else "is there before the run's end"
            yield Problem("summary.json", sentence, mended=not self.finished)
            return
        if not path.exists():
            return
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            yield Problem("summary.json", f"is damaged: {error}")
            return
        if self.unreadable or self.recipe is None:
            return
        from strop.costs.report import summarise

        computed = json.loads(json.dumps(summarise(RunRecord(self.path))))
        for key in sorted(written.keys() | computed.keys()):
            if not _same(written.get(key), computed.get(key)):
                sentence = f"says {key} = {written.get(key)}, but the run's files give {computed.get(key)}"
                yield Problem("summary.json", sentence)


def _bad_lines(where: str, lines: list[Any]) -> Iterator[Problem]:
    """Damaged lines; a last one that is cut short is what a kill leaves."""
    for place, line in enumerate(lines, 1):
        if isinstance(line, BadLine):
            last = place == len(lines) and line.why == "it is cut short"
            yield Problem(where, f"line {line.number} is damaged: {line.why}", mended=last)


def _same(one: Any, other: Any) -> bool:
    """Equal, numbers to within rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return bool(one == other)
