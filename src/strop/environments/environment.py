"""The environment protocol: a set of tasks, what an attempt can do, and how it is scored.

An author subclasses `Environment`. A single-turn environment needs `tasks` and `score`; one with tools overrides
`start` and returns a `Session` of its own. Environments load by import path ("package.module:Class").
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.rollouts import Message, Rollout, Scored, Task

if TYPE_CHECKING:
    from strop.sandboxes.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """What a tool call gave back.

    Attributes:
        content: what the agent reads.
        error: a short name of the error the agent met ("timeout", "unknown tool" …), None if the call went well.
            An error that the environment means the agent to meet is an outcome, not an exception.
    """

    content: str
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How an outside program that acted on the task ended.

    Attributes:
        exit_code: as the shell counts: 128 + signal if one ended it; None if its time was over and it was stopped.
        stdout, stderr: the last part of what it wrote.
        files: the files it was to leave, by their paths in its working directory.
        seconds: how long it ran.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    files: Mapping[str, bytes]
    seconds: float


class Session:
    """One attempt's side of the environment: its tools' state and its score. Made by `Environment.start`.

    The base class has no tools and asks the environment for the score.

    Attributes:
        sandbox: where commands of this attempt run, an outside program that is the agent among them; None without one.
    """

    sandbox: Sandbox | None = None

    def __init__(self, environment: Environment, task: Task, seed: int) -> None:
        self.environment, self.task, self.seed = environment, task, seed

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        """Run a tool.

        Args:
            name: as the agent wrote it; may be unknown.
            arguments: a JSON object, not checked against the tool's schema.

        Raises:
            AttemptError: the system failed (sandbox died). An error the agent can act on is returned instead.
        """
        return ToolOutcome(f"There is no tool named {name!r}.", error="unknown tool")

    async def program_ended(self, result: ProgramResult) -> None:
        """Told once, before scoring, if the agent is an outside program: keep here what the score depends on."""

    async def score(self, rollout: Rollout) -> Scored:
        """Score the finished attempt. `rollout.transcript` holds the conversation.

        Raises:
            AttemptError: with FailureKind.SCORER if scoring itself failed. Any other exception counts as such too.
        """
        return await self.environment.score(self.task, rollout)

    async def close(self) -> None:
        """Free what the attempt held. Called once, after scoring or failure."""


class Environment:
    """A set of tasks and how attempts at them are scored.

    Attributes:
        name: as recipes and records call it.
        notices: sentences about what it does otherwise on this machine than elsewhere; a run says and keeps them.
    """

    name: str = "environment"
    notices: tuple[str, ...] = ()

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, "train" or "test": disjoint, in a fixed order, the same in every process.

        May be a lazy sequence (`__len__` and `__getitem__`).
        """
        raise TypeError(f"{type(self).__name__} must define tasks(split)")

    async def start(self, task: Task, seed: int) -> Session:
        """Open an attempt.

        Args:
            task: one of this environment's tasks.
            seed: seed of this attempt. What every member of a group must share derives from the task instead.
        """
        return Session(self, task, seed)

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        """Score a finished attempt whose session holds no state of its own."""
        raise TypeError(f"{type(self).__name__} must define score(task, rollout), or a Session that does")

    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        """Worked examples for supervised warm-up, drawn from training tasks; empty if it has none."""
        return []


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A conversation that shows how a task is done.

    Attributes:
        task: what is solved.
        messages: the whole conversation, the task's own messages included; assistant messages are trained on.
    """

    task: Task
    messages: tuple[Message, ...]
