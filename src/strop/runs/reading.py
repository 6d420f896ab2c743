"""Reading a run directory: events, metrics, evaluations, costs and attempts, from the files alone.

Works on a run that is going on, was killed, or lies on another machine. Writing one is `strop.runs.run`'s business;
the format is described in docs/run-directory.md.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from strop.costs.ledger import bought_usd
from strop.errors import EvaluationError, RunError
from strop.rollouts import Failed, Group, Rollout, Scored
from strop.runs.events import BadLine, Event, read_lines
from strop.statistics import Evaluation, natural_key

_STEP_FILE = re.compile(r"(?P<stage>.+)-(?:(?P<step>\d{6})|rest)\.parquet")
_EVALUATION_FILE = re.compile(r"evaluation-(?P<name>.+)\.parquet")


@dataclass(frozen=True, slots=True)
class Step:
    """One training step.

    Attributes:
        stage: stage of the recipe, for example "rl".
        step: its number within the stage, counted from 1 as people count (events and file names count from 0).
        clock: seconds since the run's start.
        metrics: what was measured.
    """

    stage: str
    step: int
    clock: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    """An evaluation and where in the run it was made.

    Attributes:
        evaluation: what was found.
        stage, step: the stage it belongs to and the steps that were done in it; "start" belongs to no stage.
        clock: seconds since the run's start.
        index: position among the run's events.
    """

    evaluation: Evaluation
    stage: str
    step: int
    clock: float
    index: int


@dataclass(frozen=True, slots=True)
class CostPoint:
    """The ledger at one moment of the run.

    Attributes:
        clock: seconds since the run's start.
        index: position among the run's events.
        ledger: as `Ledger.snapshot` gives it, cumulative over the whole run.
    """

    clock: float
    index: int
    ledger: Mapping[str, Any]

    def seconds(self, phase: str | None = None) -> float:
        """Machine seconds so far, of one phase or of all."""
        accounts: Mapping[str, Mapping[str, float]] = self.ledger["accounts"]
        return sum(sum(parts.values()) for name, parts in accounts.items() if phase in (None, name))

    def bought(self, phase: str | None = None) -> float:
        """Dollars paid beside the machine so far, in one phase or in all."""
        return bought_usd(self.ledger.get("bought", {}), phase)


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A Parquet file of attempts.

    Attributes:
        path: the file.
        stage: stage of the recipe, or "" for an evaluation.
        step: step that trained on it, counted from 1; None for an evaluation, and for what was left over when the stage ended.
        evaluation: name of the evaluation as it stands in the file's name; None otherwise.
    """

    path: Path
    stage: str
    step: int | None
    evaluation: str | None

    @property
    def label(self) -> str:
        """How people call it: "rl step 12", "rl rest" or "evaluation start"."""
        if self.evaluation is not None:
            return f"evaluation {self.evaluation}"
        return f"{self.stage} rest" if self.step is None else f"{self.stage} step {self.step}"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt as a reader sees it.

    Attributes:
        rollout: the attempt itself, token by token.
        group: the group it belongs to, with its task.
        used: what became of the group: "trained", "evaluation", or why it was left out.
    """

    rollout: Rollout
    group: Group
    used: str

    @property
    def solved(self) -> bool | None:
        """None where it was not scored, or where solving has no meaning."""
        return self.rollout.ending.solved if isinstance(self.rollout.ending, Scored) else None

    @property
    def failure(self) -> str | None:
        """Why the system failed it: "kind: reason"; None if it was scored."""
        ending = self.rollout.ending
        return f"{ending.kind.value}: {ending.reason}" if isinstance(ending, Failed) else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """What its scorer counted."""
        return self.rollout.ending.metrics if isinstance(self.rollout.ending, Scored) else {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions that sampled it, ascending."""
        return tuple(sorted({version for call in self.rollout.calls for version in call.versions}))


@dataclass
class RunRecord:
    """A run directory, read. Each part is read when it is first asked for.

    Attributes:
        path: the directory.
    """

    path: Path

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved recipe, with versions of everything; empty if there is none."""
        file = self.path / "config.toml"
        if not file.exists():
            return {}
        try:
            return tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{file} is damaged ({error}): the run can't be read without it.") from error

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Every event, in order. Lines that a kill cut short or that changed since are in `damaged` instead."""
        return [{"stage": "", "step": 0} | event for event in self._lines if not isinstance(event, BadLine)]

    @property
    def damaged(self) -> list[BadLine]:
        """Lines of the event log that aren't what was written."""
        return [line for line in self._lines if isinstance(line, BadLine)]

    @cached_property
    def _lines(self) -> list[Event | BadLine]:
        return list(read_lines(self.path / "events.jsonl"))

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def warnings(self) -> list[dict[str, Any]]:
        """The events with a sentence for people: warnings, and why the run ended early if it did."""
        return [event for event in self.events if event["kind"] in ("warning", "run") and event.get("message")]

    @cached_property
    def steps(self) -> list[Step]:
        """The training steps in order. Of a step that was done again after a resume, the last one counts."""
        latest: dict[tuple[str, int], Step] = {}
        for event in self.of_kind("step"):
            key = (str(event["stage"]), int(event["step"]) + 1)
            latest.pop(key, None)
            latest[key] = Step(*key, float(event["clock"]), event.get("metrics", {}))
        return list(latest.values())

    @cached_property
    def evaluations(self) -> list[EvaluationEvent]:
        """The evaluations in order. Of one that was made again after a resume, the last one counts."""
        latest: dict[tuple[str, str], EvaluationEvent] = {}
        for index, event in enumerate(self.events):
            if event["kind"] != "evaluation":
                continue
            try:
                evaluation = Evaluation.from_record(event)
            except EvaluationError as error:
                raise RunError(f"{self.path / 'events.jsonl'}, event {index + 1}: {error}") from error
            key = (str(event["stage"]), evaluation.name)
            latest.pop(key, None)
            latest[key] = EvaluationEvent(evaluation, key[0], int(event["step"]), float(event["clock"]), index)
        return list(latest.values())

    @cached_property
    def milestones(self) -> list[tuple[str, EvaluationEvent]]:
        """The evaluations that count for scores: the start, then the last one of each stage, named by stage."""
        if not self.evaluations:
            return []
        chosen: dict[str, EvaluationEvent] = {"start": self.evaluations[0]}
        for found in self.evaluations[1:]:
            name = found.stage or found.evaluation.name
            chosen.pop(name, None)
            chosen[name] = found
        return list(chosen.items())

    @cached_property
    def cost_points(self) -> list[CostPoint]:
        """The ledger along the run."""
        return [
            CostPoint(float(event["clock"]), index, event["ledger"])
            for index, event in enumerate(self.events)
            if event["kind"] == "cost"
        ]

    @cached_property
    def summary(self) -> dict[str, Any] | None:
        """summary.json, or None before the run's end."""
        file = self.path / "summary.json"
        try:
            return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None
        except (ValueError, TypeError) as error:
            raise RunError(f"{file} is damaged ({error}).") from error

    @property
    def state(self) -> str:
        """ "finished", "stopped" (at a clean point), "stalled", "running", or "interrupted" (its process is gone)."""
        said = [str(event["what"]) for event in self.of_kind("run") if "what" in event]
        if said and said[-1] in ("finished", "stopped", "stalled"):
            return said[-1]
        return "running" if _is_locked(self.path / "lock") else "interrupted"

    @cached_property
    def rollout_files(self) -> list[RolloutFile]:
        """Files of attempts, evaluations and batches, in the order in which they were stored."""
        order = {event["file"]: index for index, event in enumerate(self.events) if event["kind"] == "batch"}
        found = []
        for path in sorted((self.path / "rollouts").glob("*.parquet"), key=lambda path: natural_key(path.name)):
            if match := _EVALUATION_FILE.fullmatch(path.name):
                found.append(RolloutFile(path, "", None, match["name"]))
            elif match := _STEP_FILE.fullmatch(path.name):
                step = int(match["step"]) + 1 if match["step"] else None
                found.append(RolloutFile(path, match["stage"], step, None))
        return sorted(found, key=lambda file: order.get(file.path.name, len(self.events)))

    def attempts(self, file: RolloutFile) -> list[Attempt]:
        """The attempts in a file, in stored order.

        Raises:
            RunError: the file is damaged.
        """
        from strop.runs.store import read_groups

        return [Attempt(rollout, group, used) for group, used in read_groups(file.path) for rollout in group.rollouts]

    @cached_property
    def attempt_counts(self) -> dict[str, int]:
        """How many attempts there were in the whole run: "made", and of those "scored", "solved" and "failed"."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        counts = dict.fromkeys(("made", "scored", "solved", "failed"), 0)
        for file in self.rollout_files:
            try:
                table = pq.read_table(file.path, columns=["reward", "solved"])
            except (pa.ArrowException, OSError) as error:
                raise RunError(f"{file.path} is damaged: {error}") from error
            counts["made"] += table.num_rows
            counts["failed"] += table["reward"].null_count
            counts["solved"] += sum(map(bool, table["solved"].to_pylist()))
        counts["scored"] = counts["made"] - counts["failed"]
        return counts

    def find(self, *, step: int | None = None, stage: str | None = None, evaluation: str | None = None) -> RolloutFile:
        """The file of a step or of an evaluation; without either, the last step's.

        Args:
            step: number of the step, counted from 1. Where several stages have it, the last stage counts unless `stage` says which.
            stage: of the step.
            evaluation: name of the evaluation.

        Raises:
            RunError: there is no such file; says which there are.
        """
        if evaluation is not None:
            wanted = _file_safe(evaluation)
            matches = [file for file in self.rollout_files if file.evaluation in (evaluation, wanted)]
        else:
            matches = [
                file
                for file in self.rollout_files
                if file.step is not None and step in (None, file.step) and stage in (None, file.stage)
            ]
        if not matches:
            there = ", ".join(file.label for file in self.rollout_files) or "none at all"
            asked = (
                f"evaluation {evaluation!r}"
                if evaluation is not None
                else f"step {step}"
                if step is not None
                else "a step"
            )
            raise RunError(
                f"Run {self.name} has no stored attempts of {asked}{f' of {stage}' if stage else ''}. There are: {there}."
            )
        order = {(done.stage, done.step): number for number, done in enumerate(self.steps)}
        matches.sort(key=lambda file: order.get((file.stage, file.step or 0), -1))
        return matches[-1]


def open_run(path: str | Path, root: str | Path = "runs") -> RunRecord:
    """Open a run by its directory, or by its name under `root`.

    Raises:
        RunError: there is no run directory there.
    """
    candidates = [Path(path), Path(root) / path]
    for candidate in candidates:
        if (candidate / "events.jsonl").exists() or (candidate / "config.toml").exists():
            return RunRecord(candidate.resolve())
    known = ", ".join(run.name for run in list_runs(root)[:10]) or "none"
    raise RunError(
        f"There is no run at {path} or {candidates[1]}: a run directory holds events.jsonl. Runs in {root}: {known}."
    )


def list_runs(root: str | Path = "runs") -> list[RunRecord]:
    """The runs under a directory, the one that changed last first."""
    folders = [path.parent for path in Path(root).glob("*/events.jsonl")]
    return [RunRecord(path) for path in sorted(folders, key=lambda path: -(path / "events.jsonl").stat().st_mtime)]


def _is_locked(file: Path) -> bool:
    """Whether a process of this machine holds the lock, asked without touching it."""
    locks = Path("/proc/locks")
    if not locks.exists() or not file.exists():
        return False
    inode = str(file.stat().st_ino)
    return any(
        line.split()[5].rsplit(":", 1)[-1] == inode for line in locks.read_text().splitlines() if "->" not in line
    )


def _file_safe(name: str) -> str:
    """An evaluation's name as it stands in a file's name: "step 10" is "step-10"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)
