"""Doing a stored step again: `strop replay` loads the checkpoint before it, trains on the stored batches up to it, and
compares loss and weights with what was logged and saved. And the half of the loop that trains without sampling.

Nothing is written into the run that is replayed.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from strop.agents.metrics import Metrics
from strop.config import AttemptsSettings, DistillSettings, ExamplesSettings, StageSettings
from strop.errors import ConfigError, RunError
from strop.rollouts import Group, Rollout, Scored, Task
from strop.runs import files
from strop.runs.reading import RunRecord
from strop.runs.run import Run, check_checkpoint, read_recipe
from strop.runs.store import read_groups, trained
from strop.runs.turns import token_texts
from strop.training.chain import model_before
from strop.training.stored import copy_path, groups_of_step

if TYPE_CHECKING:
    from rich.console import RenderableType

    from strop.training.given import Update
    from strop.training.workshop import Workshop

#: Metrics that are of the clock, not of the computation.
_TIMES = ("learner_seconds", "step_seconds")
#: Metrics that the sampler gave at the time; nothing is sampled in a replay.
_SAMPLED = ("canary_logprob", "canary_version")


@dataclass(frozen=True, slots=True)
class TokenCheck:
    """One sampled token of an attempt.

    Attributes:
        token: its id.
        text: what it says.
        version: weight version that sampled it.
        sampled, recomputed: its log-probability then, and by the learner with the weights that the step began with.
    """

    token: int
    text: str
    version: int
    sampled: float
    recomputed: float


@dataclass(frozen=True, slots=True)
class Replay:
    """A step that was done again.

    Attributes:
        stage, step: which; counted from 1.
        begun_from: name of the checkpoint, or "" for the model as it was loaded.
        steps: how many steps were done again.
        version: of the weights that the step began with.
        logged, replayed: metrics of the step, then and now.
        checkpoint: name of the checkpoint that holds the weights after the step; "" if there is none.
        weights_equal: whether weights and optimizer state equal it bit for bit; None without one.
        tokens: of the attempt that was asked for.
        attempt: its id; "" if none was.
    """

    stage: str
    step: int
    begun_from: str
    steps: int
    version: int
    logged: Mapping[str, float]
    replayed: Mapping[str, float]
    checkpoint: str
    weights_equal: bool | None
    tokens: tuple[TokenCheck, ...] = ()
    attempt: str = ""

    @property
    def different(self) -> dict[str, tuple[float | None, float | None]]:
        """Metrics that are not exactly what was logged: then, and now."""
        names = sorted((self.logged.keys() | self.replayed.keys()) - set(_TIMES) - set(_SAMPLED))
        pairs = {name: (self.logged.get(name), self.replayed.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if not _same(*pair)}

    @property
    def good(self) -> bool:
        """Whether the step gave what it gave before."""
        return not self.different and self.weights_equal is not False


async def replay_step(path: Path, step: int, *, stage: str | None = None, attempt: int | None = None) -> Replay:
    """Do a stored step again in the learner.

    Args:
        path: the run's directory; it is only read.
        step: number of the step, counted from 1.
        stage: of the step; None for the last stage that has it.
        attempt: place of an attempt among those of the step's batch, from 0: its tokens' log-probabilities are
            computed again with the weights that the step began with.

    Raises:
        RunError: there is no such step, or a batch that is needed is missing or damaged.
        StropError: the model can't be loaded.
    """
    from strop.models.load import load_model
    from strop.training.train import build

    record = RunRecord(path)
    with tempfile.TemporaryDirectory(prefix="strop-replay-") as scratch:
        recipe = read_recipe(path)
        asked = _stage_of(record, recipe.stages, step, stage)
        run = Run.create(Path(scratch) / "run", recipe)
        shop = build(run, load_model(recipe.model.name))
        shop.checkpoints = path / "checkpoints"  # earlier stages of the run may be teachers
        try:
            return await _Replayer(record, shop, asked, step - 1, Path(scratch)).replay(attempt)
        finally:
            await shop.close()
            run.close()


class _Replayer:
    """Goes from a checkpoint to the step, and through it."""

    def __init__(self, record: RunRecord, shop: Workshop, stage: StageSettings, step: int, scratch: Path) -> None:
        self.record, self.shop, self.stage, self.step, self.scratch = record, shop, stage, step, scratch
        self._given: dict[str, Update] = {}
        #: Steps that stages ended with; held-out examples may have ended one early.
        self._ends = {e["stage"]: e["step"] for e in record.of_kind("stage") if e["what"] == "ended"}

    async def replay(self, attempt: int | None) -> Replay:
        begun_from, start = self._load()
        done = 0
        for stage, step in self._steps_from(start):
            if step == 0:
                self._begin(stage)
            last = (stage.name, step) == (self.stage.name, self.step)
            tokens, name = self._tokens(stage, attempt) if last and attempt is not None else ((), "")
            version = self.shop.learner.version
            metrics = await self._update(stage, step)
            done += 1
        checkpoint, equal = self._compare_weights()
        return Replay(
            stage=self.stage.name,
            step=self.step + 1,
            begun_from=begun_from,
            steps=done,
            version=version,
            logged=self._logged(),
            replayed=metrics,
            checkpoint=checkpoint,
            weights_equal=equal,
            tokens=tokens,
            attempt=name,
        )

    def _load(self) -> tuple[str, tuple[int, int]]:
        """Load the newest whole checkpoint before the step; its name, and the (stage, step) to go on from."""
        stages = self.shop.recipe.stages
        target = stages.index(self.stage), self.step  # type: ignore[arg-type]
        found = []
        for number, stage in enumerate(stages):
            for folder in (self.record.path / "checkpoints").glob(f"{stage.name}-[0-9]*"):
                steps = int(folder.name.rpartition("-")[2])
                if (number, steps) <= target and folder.name == f"{stage.name}-{steps:06d}":
                    found.append((number, steps, folder))
        for number, steps, folder in sorted(found, reverse=True):
            if not list(check_checkpoint(folder)):
                self.shop.load(folder)
                over = steps >= self._ends.get(stages[number].name, stages[number].steps)
                return folder.name, (number + 1, 0) if over else (number, steps)
        return "", (0, 0)

    def _steps_from(self, start: tuple[int, int]) -> Iterator[tuple[StageSettings, int]]:
        """Every step from `start` to the one that was asked for."""
        number, first = start
        for stage in self.shop.recipe.stages[number:]:
            for step in range(first, self._ends.get(stage.name, stage.steps)):
                yield stage, step
                if (stage.name, step) == (self.stage.name, self.step):
                    return
            first = 0

    async def _update(self, stage: StageSettings, step: int) -> Metrics:
        from strop.training.given import train_step, update_of
        from strop.training.rl import RLUpdate

        if isinstance(stage, ExamplesSettings):
            if stage.name not in self._given:
                stored = self.record.path / "reference" / f"{stage.name}.npz"
                if stored.exists():
                    (self.shop.run.path / "reference").mkdir(exist_ok=True)
                    shutil.copyfile(stored, self.shop.run.path / "reference" / stored.name)
                self._given[stage.name] = await update_of(stage, self.shop, step)
            return await train_step(self._given[stage.name], stage, self.shop, step)
        assert isinstance(stage, AttemptsSettings)
        return await RLUpdate(stage, self.shop)(self._groups(stage, step), step)

    def _groups(self, stage: StageSettings, step: int) -> list[Group]:
        """The groups that a step trained on, if they are as they were stored."""
        folder = self.record.path / "rollouts"
        given = isinstance(stage, DistillSettings) and stage.stored is not None
        path = copy_path(folder, stage.name) if given else folder / f"{stage.name}-{step:06d}.parquet"
        recorded = [event["sha256"] for event in self.record.of_kind("batch") if event["file"] == path.name]
        if path.exists() and recorded and files.sha256(path) != recorded[-1]:
            raise RunError(f"{path} has changed since it was stored, so its step can't be done again.")
        if isinstance(stage, DistillSettings) and given:
            groups = [group for group, _ in read_groups(path)]
            return groups_of_step(groups, stage, step, self.shop.seed(stage.name, "order"))
        return trained(read_groups(path))

    def _begin(self, stage: StageSettings) -> None:
        """What happened between the stage before and this one: a model may not have been promoted."""
        stages = self.shop.recipe.stages
        number = stages.index(stage)  # type: ignore[arg-type]
        if number and not self._was_promoted(stages[number - 1].name):
            self.shop.keep(model_before(stages, stage, self.shop.checkpoints, self._was_promoted))
        self.shop.begin(stage)

    def _was_promoted(self, stage: str) -> bool:
        decided = [bool(event["passed"]) for event in self.record.of_kind("gate") if event["stage"] == stage]
        return not decided or decided[-1]

    def _tokens(self, stage: StageSettings, attempt: int) -> tuple[tuple[TokenCheck, ...], str]:
        """Log-probabilities of an attempt's tokens, with the weights as they are."""
        from strop.learning import pack

        if not isinstance(stage, AttemptsSettings):
            raise RunError(f"stage {stage.name} is trained on given examples: it has no attempts.")
        rollouts = [rollout for group in self._groups(stage, self.step) for rollout in group.rollouts]
        if not 0 <= attempt < len(rollouts):
            raise RunError(f"step {self.step + 1} has the attempts 0 to {len(rollouts) - 1}, and no {attempt}.")
        rollout = rollouts[attempt]
        batch = pack([_alone(rollout)], lambda groups: [np.ones(len(group)) for group in groups])
        recomputed = self.shop.learner.logprobs(batch, stage.collect.temperature)
        text = token_texts(self.record.path / "checkpoints") or (lambda token: "")
        checks = [
            TokenCheck(int(token), text(int(token)), int(version), float(sampled), float(again))
            for token, version, sampled, again, masked in zip(
                batch.tokens, batch.versions, batch.sampler_logprobs, recomputed, batch.mask, strict=True
            )
            if masked
        ]
        return tuple(checks), rollout.id

    def _logged(self) -> Mapping[str, float]:
        for event in self.record.of_kind("step"):
            if (event["stage"], event["step"]) == (self.stage.name, self.step):
                metrics: Mapping[str, float] = event["metrics"]
                return metrics
        return {}

    def _compare_weights(self) -> tuple[str, bool | None]:
        """The checkpoint after the step, and whether saving now would give the same weights and optimizer state."""
        folder = self.record.path / "checkpoints" / f"{self.stage.name}-{self.step + 1:06d}"
        if not folder.is_dir() or list(check_checkpoint(folder)):
            return "", None
        mine = self.scratch / "checkpoint"
        mine.mkdir()
        self.shop.learner.save(mine)
        names = sorted(file.name for file in folder.glob("*.safetensors"))
        there = sorted(file.name for file in mine.glob("*.safetensors"))
        return folder.name, names == there and all(files.sha256(mine / n) == files.sha256(folder / n) for n in names)


def _alone(rollout: Rollout) -> Group:
    """A group of one, whatever became of it: what is computed of it needs no baseline."""
    return Group(rollout.id, Task(rollout.task_id, rollout.environment, ()), [replace(rollout, ending=Scored(0.0))])


def _stage_of(record: RunRecord, stages: Sequence[StageSettings], step: int, name: str | None) -> StageSettings:
    """The stage that is meant.

    Raises:
        RunError: no stage has such a logged step; says what there is.
    """
    logged = {(event["stage"], event["step"]) for event in record.of_kind("step")}
    for stage in reversed(stages):
        if name in (None, stage.name) and (stage.name, step - 1) in logged:
            return stage
    there = [f"{stage.name} 1 to {n}" for stage in stages if (n := sum(s == stage.name for s, _ in logged))]
    asked = f"step {step}" + (f" of {name}" if name else "")
    raise RunError(f"{record.path} has trained no {asked}. There are: {', '.join(there) or 'none'}.")


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def show_replay(replay: Replay) -> tuple[RenderableType, int]:
    """What `strop replay` prints, and its exit status: 0 if the step gave what it gave before."""
    from rich.console import Group as Lines
    from rich.table import Table
    from rich.text import Text

    start = replay.begun_from or "the model as it was loaded"
    lines: list[RenderableType] = [
        Text(f"{replay.stage} step {replay.step}, done again from {start} ({replay.steps} steps)", style="bold")
    ]
    if replay.different:
        table = Table("metric", "logged", "replayed", box=None)
        for name, (logged, now) in replay.different.items():
            table.add_row(name, repr(logged), repr(now))
        lines += [Text("These differ:", style="red"), table]
    else:
        loss = replay.replayed.get("loss")
        lines.append(Text(f"every metric is exactly what was logged (loss {loss!r})", style="green"))
    if replay.weights_equal is None:
        lines.append(Text("no checkpoint holds the weights after it, so those were not compared", style="dim"))
    elif replay.weights_equal:
        lines.append(Text(f"weights and optimizer state are bit for bit those of {replay.checkpoint}", style="green"))
    else:
        lines.append(Text(f"weights or optimizer state are not those of {replay.checkpoint}", style="red"))
    if replay.attempt:
        lines += [Text(), _token_table(replay)]
    return Lines(*lines), 0 if replay.good else 1


def _token_table(replay: Replay) -> RenderableType:
    from rich.table import Table

    title = f"attempt {replay.attempt}, recomputed with weight version {replay.version}"
    table = Table("token", "text", "version", "sampled", "recomputed", "difference", box=None, title=title)
    for check in replay.tokens:
        difference = check.recomputed - check.sampled
        table.add_row(
            str(check.token), repr(check.text), str(check.version), f"{check.sampled:.5f}", f"{check.recomputed:.5f}",
            f"{difference:+.1e}",
        )  # fmt: skip
    return table


def borrow_batches(run: Run) -> None:
    """For a run that trains without sampling: copy the batches of the run that it names, so that none is missing.

    Raises:
        ConfigError: that run has not enough of them.
    """
    source = run.recipe.debug.batches
    if not source:
        return
    for stage in run.recipe.stages:
        sampled = isinstance(stage, AttemptsSettings) and not (isinstance(stage, DistillSettings) and stage.stored)
        for step in range(stage.steps if sampled else 0):
            path = run.batch_path(stage.name, step)
            theirs = Path(source) / "rollouts" / path.name
            if path.exists():
                continue
            if not theirs.exists():
                there = f"{source} has the batches of {step} steps of {stage.name}"
                raise ConfigError(f"stages.{stage.name}.steps", there, f"At most {step} steps can be trained on them")
            with files.written_whole(path) as beside:
                shutil.copyfile(theirs, beside)
            run.batch_stored(path)
