"""Training on attempts that are on disk already: the best ones of a run's stage, token by token as they were sampled.

What a stage trains on is copied into its own run first, so that the run can be resumed, replayed and read by itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from strop.agents.metrics import Metrics
from strop.config import DistillSettings, StoredSettings
from strop.errors import ConfigError
from strop.rollouts import Group, Message, Rollout
from strop.runs.files import written_whole
from strop.runs.reading import RunRecord, open_run
from strop.runs.run import Run
from strop.runs.store import read_groups, write_groups
from strop.training.tasks import shuffled


def best_attempts(groups: Sequence[Group], best: int, reward_above: float | None = None) -> list[Group]:
    """Rejection sampling: of each group the members with the highest rewards.

    Args:
        groups: what to choose from; attempts that were not scored are never chosen.
        best: most members of a group that are kept. Of equal ones, those with the lower numbers are.
        reward_above: only attempts that were rewarded with more; None asks nothing.

    Returns:
        The groups that have any left, in their order; members in theirs.
    """
    chosen = []
    for group in groups:
        scored: list[tuple[float, Rollout]] = [(r.reward, r) for r in group.rollouts if r.reward is not None]
        good = [pair for pair in scored if reward_above is None or pair[0] > reward_above]
        first = sorted(good, key=lambda pair: (-pair[0], pair[1].member))[:best]
        kept = sorted((rollout for _, rollout in first), key=lambda rollout: rollout.member)
        if kept:
            chosen.append(Group(group.id, group.task, kept, group.step))
    return chosen


def stored_groups(run: RunRecord, stage: str | None) -> list[Group]:
    """Every group of a run's stage, trained on or not, in the order of their numbers; None is the last stage with any.

    Raises:
        ConfigError: the run has no attempts of such a stage.
        RunError: a file is damaged.
    """
    if stage is None:
        stage = next((file.stage for file in reversed(run.rollout_files) if file.stage), "")
    files = [file for file in run.rollout_files if stage and file.stage == stage]
    if not files:
        there = sorted({file.stage for file in run.rollout_files if file.stage})
        raise ConfigError(
            "stored.stage", f"{run.path} has no attempts of a stage {stage!r}", f"It has: {', '.join(there) or 'none'}"
        )
    groups = [group for file in files for group, _ in read_groups(file.path)]
    return sorted(groups, key=lambda group: group.id)


def copy_path(rollouts: Path, stage: str) -> Path:
    """Where the attempts that a stage was given lie, in the folder `rollouts` of its run."""
    return rollouts / f"{stage}-stored.parquet"


def groups_of_step(groups: Sequence[Group], stage: DistillSettings, step: int, seed: int) -> list[Group]:
    """The groups that a step trains on: epochs one after another, each in an order of its own."""
    order, count = shuffled(len(groups), seed), stage.collect.groups
    return [groups[order(place)] for place in range(step * count, (step + 1) * count)]


class StoredAttempts:
    """Stands where a `Collector` would: hands out batches, and samples nothing. An asynchronous context manager.

    Args:
        run: of the stage; a copy of what is trained on is put there.
        stage: a distillation from stored attempts.
        seed: of the order.
    """

    def __init__(self, run: Run, stage: DistillSettings, seed: int) -> None:
        self.run, self.stage, self.seed = run, stage, seed
        self._groups: list[Group] = []

    async def __aenter__(self) -> StoredAttempts:
        path = copy_path(self.run.path / "rollouts", self.stage.name)
        if path.exists():
            self.run.check_batch(path)
        else:
            assert self.stage.stored is not None
            chosen = chosen_attempts(self.stage.stored, RunRecord(self.run.path), f"stages.{self.stage.name}.stored")
            write_groups(path, [(group, "stored") for group in chosen], {})
            self.run.batch_stored(path)
        self._groups = [group for group, _ in read_groups(path)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is under way."""

    async def next_batch(self, step: int) -> list[Group]:
        """See `Collector.next_batch`."""
        return groups_of_step(self._groups, self.stage, step, self.seed)

    def stepped(self, step: int) -> None:
        """See `Collector.stepped`."""

    async def abandon(self) -> None:
        """See `Collector.abandon`."""


def chosen_attempts(asked: StoredSettings, own: RunRecord, key: str) -> list[Group]:
    """What a stage is to be trained on.

    Args:
        asked: which run's, and which of them.
        own: the stage's own run, which is meant where none is named.
        key: the recipe's, for errors.

    Raises:
        ConfigError: there are none.
    """
    source = open_run(asked.run) if asked.run else own
    chosen = best_attempts(stored_groups(source, asked.stage), asked.best, asked.reward_above)
    if not chosen:
        raise ConfigError(
            f"{key}.reward_above",
            f"no attempt of {asked.stage} was rewarded with more",
            "Ask for less, or leave it out",
        )
    return chosen


def write_conversations(groups: Sequence[Group], path: Path) -> int:
    """Write attempts as a data file for supervised learning, a row `{"messages", "tools"}` each.

    Attempts whose history was rewritten are no single conversation and are left out. What is trained on from such a file
    is rendered anew; a distillation stage with `stored` trains on the very tokens that were sampled.

    Args:
        groups: what to write.
        path: a JSONL file; it appears whole or not at all.

    Returns:
        The number of rows.
    """
    rows = [
        {"messages": [_said(message) for message in rollout.transcript], "tools": list(group.task.tools)}
        for group in groups
        for rollout in group.rollouts
        if not rollout.forks
    ]
    with written_whole(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({k: v for k, v in row.items() if v}, ensure_ascii=False) + "\n" for row in rows)
    return len(rows)


def _said(message: Message) -> Message:
    """A message as the OpenAI API writes it, without what records have beside it."""
    said = {key: value for key, value in message.items() if key != "error"}
    if calls := said.get("tool_calls"):
        said["tool_calls"] = [{key: value for key, value in call.items() if key != "problem"} for call in calls]
    return said


def stored_metrics(metrics: Metrics) -> Metrics:
    """Without those that compare the attempts with the policy at hand, which did not make them."""
    apart = ("mismatch_", "staleness_")
    return {name: value for name, value in metrics.items() if name != "entropy" and not name.startswith(apart)}
