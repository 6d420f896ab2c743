"""Tasks that are drawn from a seed when they are asked for, in two splits that share no question.

For environments that make their own problems. A question's identity decides its split by a hash, and a draw that falls
into the other split is drawn again: so train and test are disjoint whatever is drawn, at any size.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import overload

from strop.errors import ConfigError, EnvironmentProblem
from strop.rollouts import Task, derive_seed

#: One question in so many belongs to the test split.
_TEST_SHARE = 8
#: Draws before it is clear that an environment has too few questions for two splits.
_PATIENCE = 2000

#: Given random numbers: what makes the question the same as another one, and the task, its id left open.
Draw = Callable[[random.Random], tuple[str, Task]]


class DrawnTasks(Sequence[Task]):
    """A lazy sequence of tasks: the same index is the same task in every process.

    Args:
        draw: makes a task; called again while its question belongs to the other split.
        split: "train" or "test".
        count: number of tasks.
        seed: another seed draws other tasks; the split that a question belongs to does not depend on it.

    Raises:
        EnvironmentProblem: there is no such split.
        ConfigError: count is not at least 1.
    """

    def __init__(self, draw: Draw, split: str, count: int, seed: int) -> None:
        if split not in ("train", "test"):
            raise EnvironmentProblem(f'There is no split {split!r}: known are "train" and "test".')
        if count < 1:
            raise ConfigError(f"environment.options.{split}_tasks", f"it is {count}", "It must be at least 1.")
        self._draw, self._split, self._count, self._seed = draw, split, count, seed

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(self._count))]
        at = range(self._count)[index]
        for attempt in range(_PATIENCE):
            identity, task = self._draw(random.Random(derive_seed("task", self._split, self._seed, at, attempt)))
            if is_held_out(identity) == (self._split == "test"):
                # With other options the same index is another problem, and so has another id.
                problem = derive_seed(repr(task.messages), repr(task.data)) % 16**6
                return replace(task, id=f"{self._split}-{at}-{problem:06x}")
        raise EnvironmentProblem(
            f"{_PATIENCE} draws gave no question for the {self._split} split: the environment has too few different "
            "questions at this difficulty. Make them harder or more varied."
        )


def is_held_out(identity: str) -> bool:
    """Whether the question with this identity belongs to the test split."""
    return derive_seed("split", identity) % _TEST_SHARE == 0
