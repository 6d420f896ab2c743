"""Plain arithmetic, one reply: "What is 47 + 38?". Small enough for a tiny model to learn by reward alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

from strop.environments.drawn import DrawnTasks
from strop.environments.environment import Environment
from strop.environments.numbers import last_number
from strop.errors import ConfigError
from strop.rollouts import Rollout, Scored, Task, final_text

_OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class Arithmetic(Environment):
    """Sums, differences and products of two whole numbers.

    Solved is a reply whose last number is the result. A question and its commuted twin are in the same split.

    Args:
        operations: any of "+", "-", "*". Differences are never negative.
        digits: of each number, without leading zeros.
        question: how it is asked; {a}, {operation} and {b} stand for the parts of it.
        train_tasks, test_tasks: size of the splits.
        seed: another seed draws other tasks.

    Raises:
        ConfigError: an operation is unknown, digits is not within 1 and 6, or the question lacks a part.
    """

    name = "arithmetic"

    def __init__(
        self,
        operations: Sequence[str] = ("+",),
        digits: int = 2,
        question: str = "What is {a} {operation} {b}?",
        train_tasks: int = 10_000,
        test_tasks: int = 500,
        seed: int = 0,
    ) -> None:
        unknown = [operation for operation in operations if operation not in _OPERATIONS]
        if unknown or not operations:
            wrong = f"{unknown[0]!r} is not an operation" if unknown else "it is empty"
            raise ConfigError("environment.options.operations", wrong, 'Known are "+", "-" and "*".')
        if not 1 <= digits <= 6:
            raise ConfigError("environment.options.digits", f"it is {digits}", "It must be within 1 and 6.")
        missing = [part for part in ("{a}", "{operation}", "{b}") if part not in question]
        if missing:
            raise ConfigError(
                "environment.options.question",
                f"{missing[0]} is missing in it",
                "It must hold {a}, {operation} and {b}.",
            )
        self.operations, self.digits, self.question = tuple(operations), digits, question
        self.sizes, self.seed = {"train": train_tasks, "test": test_tasks}, seed

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        return DrawnTasks(self._draw, split, self.sizes.get(split, 1), self.seed)

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        operation = rng.choice(self.operations)
        lowest = 10 ** (self.digits - 1) if self.digits > 1 else 0
        a, b = (rng.randint(lowest, 10**self.digits - 1) for _ in range(2))
        if operation == "-":
            a, b = max(a, b), min(a, b)
        question = self.question
        for part, value in (("{a}", a), ("{operation}", operation), ("{b}", b)):
            question = question.replace(part, str(value))
        task = Task(
            id="",
            environment=self.name,
            messages=({"role": "user", "content": question},),
            data={"answer": _OPERATIONS[operation](a, b)},
            labels={"operation": operation},
        )
        return f"{min(a, b)} {operation} {max(a, b)}", task

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        """1 if the reply's last number is the result, else 0."""
        right = last_number(final_text(rollout.transcript)) == task.data["answer"]
        return Scored(reward=float(right), solved=right)
