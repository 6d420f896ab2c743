"""What is attempted next: which of a stage's environments a group is of, and which of its tasks.

Both are functions of the group's number and of what had been measured when the step at which it was begun began; so the
order of work survives a kill. What was measured lies in the batch files, beside the attempts it was measured from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from strop.agents.attempts import AttemptRunner, Runner
from strop.config import CurriculumSettings
from strop.environments.environment import Environment
from strop.errors import ConfigError
from strop.rollouts import Group, Rollout, Scored, Task, derive_seed
from strop.statistics import natural_key

#: By environment, by label value: attempts that passed and attempts made, earlier ones counting less.
State = Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Part:
    """One environment of a stage.

    Attributes:
        label: what it is called.
        tasks: its training tasks, or those of an evaluation.
        runner: makes attempts at them.
        weight: its share of the groups, beside the others' weights.
        seed: of the order of its tasks.
        curriculum: how tasks are chosen; None passes over them in an order of its own in every epoch.
    """

    label: str
    tasks: Sequence[Task]
    runner: Runner
    weight: float = 1.0
    seed: int = 0
    curriculum: CurriculumSettings | None = None


class StageTasks:
    """Which task each group of a stage attempts, and how. What a `Collector` asks.

    Args:
        parts: the environments.
        stored: gives what `observe` gave for the batch of a step, of this process or an earlier one.

    Raises:
        ConfigError: there are no tasks, or none with the label of a curriculum.
    """

    def __init__(self, parts: Sequence[Part], stored: Callable[[int], Mapping[str, Any]]) -> None:
        self.parts, self._stored = parts, stored
        self._order = [shuffled(len(part.tasks), part.seed) for part in parts]
        self._curricula = {
            part.label: Curriculum(part.curriculum, part.tasks, part.seed) for part in parts if part.curriculum
        }
        self._turns: list[tuple[int, int]] = []  # of each group: its environment, and the how manieth of it it is
        self._counts = [0] * len(parts)
        self._states: dict[int, State] = {0: {}}  # by step

    def __call__(self, number: int, step: int) -> tuple[Task, Runner]:
        """Task and runner of group `number`, which is begun at `step`."""
        which, turn = self._turn(number)
        part = self.parts[which]
        if part.label in self._curricula:
            measured = self.state(step).get(part.label, {})
            return self._curricula[part.label].task(number, measured), part.runner
        return part.tasks[self._order[which](turn)], part.runner

    def _turn(self, number: int) -> tuple[int, int]:
        """Environments take turns: the one that is furthest behind its share is next."""
        total = sum(part.weight for part in self.parts)
        while len(self._turns) <= number:
            due = [
                part.weight / total * (len(self._turns) + 1) - count
                for part, count in zip(self.parts, self._counts, strict=True)
            ]
            which = due.index(max(due))
            self._turns.append((which, self._counts[which]))
            self._counts[which] += 1
        return self._turns[number]

    def state(self, step: int) -> State:
        """What had been measured when a step began."""
        if step not in self._states:
            self._states[step] = self._stored(step - 1)
        return self._states[step]

    def observe(self, step: int, groups: Sequence[Group]) -> State:
        """Take in the groups that ended for a step; gives what is known from the next step on, as JSON values."""
        if not self._curricula:
            return {}
        before = self.state(step)
        self._states[step + 1] = {
            label: curriculum.observe(before.get(label, {}), [group for group in groups if self._is_of(group, label)])
            for label, curriculum in self._curricula.items()
        }
        return self._states[step + 1]

    def _is_of(self, group: Group, label: str) -> bool:
        return len(self.parts) == 1 or group.task.environment == label


class Curriculum:
    """Chooses tasks by how often tasks like them were solved: most of those that are solved half the time.

    With p the measured pass rate of a label's value, its tasks come up in proportion to p (1 - p), the variance of the
    outcome, to which a group's expected gradient is proportional (Foster et al. 2025, arXiv:2502.12272). A part of the
    draws is spread evenly, so that nothing is forgotten and every rate goes on being measured.

    Args:
        settings: the recipe's.
        tasks: to choose from.
        seed: of the draws.

    Raises:
        ConfigError: no task has the label.
    """

    def __init__(self, settings: CurriculumSettings, tasks: Sequence[Task], seed: int) -> None:
        self.settings, self.tasks, self.seed = settings, tasks, seed
        found: dict[str, list[int]] = {}
        for number in range(min(settings.pool, len(tasks))):
            if (value := tasks[number].labels.get(settings.label)) is not None:
                found.setdefault(value, []).append(number)
        if not found:
            there = sorted({label for number in range(min(8, len(tasks))) for label in tasks[number].labels})
            raise ConfigError(
                "curriculum.label",
                f"no task has a label {settings.label!r}",
                f"The first ones have: {', '.join(there) or 'none'}",
            )
        self.values = sorted(found, key=natural_key)
        self._members = found
        self._order = {value: shuffled(len(found[value]), derive_seed(seed, value)) for value in self.values}

    def shares(self, measured: Mapping[str, tuple[float, float]]) -> list[float]:
        """How often each of `values` comes up; they sum to 1. What was never attempted counts as passed half the time."""
        rates = []
        for value in self.values:
            passed, made = measured.get(value, (0.0, 0.0))
            rates.append((passed + 1) / (made + 2))  # Laplace's rule of succession
        learnable = [rate * (1 - rate) for rate in rates]
        even = self.settings.least_share / len(rates)
        return [even + (1 - self.settings.least_share) * part / sum(learnable) for part in learnable]

    def task(self, number: int, measured: Mapping[str, tuple[float, float]]) -> Task:
        """The task of group `number`."""
        (value,) = random.Random(derive_seed(self.seed, number)).choices(self.values, self.shares(measured))
        return self.tasks[self._members[value][self._order[value](number)]]

    def observe(
        self, before: Mapping[str, tuple[float, float]], groups: Sequence[Group]
    ) -> dict[str, tuple[float, float]]:
        """Counts with those of a step's groups; what was counted before fades by `memory`."""
        counts = {
            value: [self.settings.memory * count for count in before.get(value, (0.0, 0.0))] for value in self.values
        }
        for group in sorted(groups, key=lambda group: group.id):
            value = group.task.labels.get(self.settings.label)
            if value not in counts:
                continue
            for rollout in group.rollouts:
                if isinstance(rollout.ending, Scored):
                    counts[value][0] += passed(rollout.ending)
                    counts[value][1] += 1.0
        return {value: (some, all_) for value, (some, all_) in counts.items()}


def passed(ending: Scored) -> float:
    """How far an attempt counts as passed, 0 to 1: solved or not, or its reward where nothing counts as solved."""
    return float(ending.solved) if ending.solved is not None else min(1.0, max(0.0, ending.reward))


# -- several environments at once ---------------------------------------------------------------------------------------


class LabelledTasks(Sequence[Task]):
    """An environment's tasks under the name it has in a mixture: ids of several environments stay apart.

    Args:
        tasks: the environment's own.
        label: goes before every id, stands as the environment, and is a label to break results down by.
    """

    def __init__(self, tasks: Sequence[Task], label: str) -> None:
        self.tasks, self.label = tasks, label

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return LabelledTasks(self.tasks[index], self.label)
        task = self.tasks[index]
        return replace(
            task,
            id=f"{self.label}/{task.id}",
            environment=self.label,
            labels={"environment": self.label, **task.labels},
        )


class MixedRunner:
    """Makes attempts at labelled tasks, each with its environment's own runner.

    Args:
        runners: by label.
    """

    def __init__(self, runners: Mapping[str, AttemptRunner]) -> None:
        self.runners = runners

    async def run(
        self,
        group_id: str,
        member: int,
        task: Task,
        seed: int,
        tries: int = 1,
        begun: Callable[[Rollout], None] = lambda rollout: None,
    ) -> Rollout:
        """See `AttemptRunner.run`. The environment is given its own task; what is recorded has the label."""
        runner = self.runners[task.environment]

        def labelled(rollout: Rollout) -> None:
            rollout.task_id, rollout.environment = task.id, task.environment
            begun(rollout)

        own = replace(task, id=task.id.removeprefix(f"{task.environment}/"), environment=runner.environment.name)
        return await runner.run(group_id, member, own, seed, tries, labelled)


def shuffled(count: int, seed: int) -> Callable[[int], int]:
    """Order of an endless pass over `count` things: every epoch is a permutation of its own.

    Raises:
        ConfigError: there is nothing to pass over.
    """
    if not count:
        raise ConfigError("environment", "its training split has no tasks", "Choose options that leave some")
    epochs: dict[int, list[int]] = {}

    def at(number: int) -> int:
        epoch, within = divmod(number, count)
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = random.Random(derive_seed(seed, epoch)).sample(range(count), count)
        return epochs[epoch][within]

    return at


def labelled_tasks(environments: Mapping[str, Environment], split: str) -> dict[str, Sequence[Task]]:
    """Tasks of a split by environment: as they are where there is one environment, labelled where there are several."""
    if len(environments) == 1:
        return {label: environment.tasks(split) for label, environment in environments.items()}
    return {label: LabelledTasks(environment.tasks(split), label) for label, environment in environments.items()}
