"""An attempt that another framework's loop makes: its tools, its score, and what broke on the way.

Used by `strop.environments.exports` and by the resources server of `strop.environments.nemo_gym`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from strop.environments.environment import Environment, Session
from strop.errors import AttemptError
from strop.rollouts import FailureKind, Message, Rollout, Scored, Task, derive_seed


class ForeignAttempt:
    """One attempt at a task, opened by `open`; whoever opens it closes it.

    Attributes:
        task: what is attempted.
        failure: the first failure of the system; a score would mean nothing after it.
    """

    def __init__(self, task: Task, session: Session) -> None:
        self.task, self._session = task, session
        self.failure: AttemptError | None = None
        self._errors: dict[str, str] = {}  # name of the error that a result is, by the result's text

    @staticmethod
    async def open(environment: Environment, task: Task, number: int | str = 0) -> ForeignAttempt:
        """Begin one.

        Args:
            environment, task: what is attempted.
            number: of the attempt at this task: its seed derives from both.

        Raises:
            AttemptError: the environment could not open it.
        """
        return ForeignAttempt(task, await environment.start(task, derive_seed("foreign", task.id, number)))

    async def call(self, name: str, arguments: object) -> str:
        """Run a tool.

        Args:
            name: as the model wrote it.
            arguments: an object, or its JSON.

        Returns:
            What the model reads.

        Raises:
            AttemptError: the system failed.
        """
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError:
                arguments = None
        if not isinstance(arguments, dict):
            content = "malformed call: the arguments are no JSON object"
            self._errors[content] = "malformed call"
            return content
        try:
            outcome = await self._session.call(name, arguments)
        except AttemptError as error:
            self.failure = self.failure or error
            raise
        except Exception as error:
            self.failure = self.failure or AttemptError(
                FailureKind.TOOL, f"{name} raised {type(error).__name__}: {error}"
            )
            raise self.failure from error
        if outcome.error is not None:
            self._errors[outcome.content] = outcome.error
        return outcome.content

    async def score(self, said: Sequence[Mapping[str, Any]], member: int = 0) -> Scored:
        """Score what was said.

        Args:
            said: all messages after the task's own, as the chat API writes them.
            member: number of the attempt among those at its task.

        Raises:
            AttemptError: the system failed, scoring included.
        """
        if self.failure is not None:
            raise self.failure
        task = self.task
        rollout = Rollout(f"{task.id}/{member}", task.id, task.environment, member, self._session.seed)
        rollout.transcript = [*task.messages, *(self._marked(dict(message)) for message in said)]
        try:
            scored = await self._session.score(rollout)
        except AttemptError:
            raise
        except Exception as error:
            raise AttemptError(FailureKind.SCORER, f"{type(error).__name__}: {error}") from error
        for name, value in {"reward": scored.reward, **scored.metrics}.items():
            if not math.isfinite(value):
                raise AttemptError(
                    FailureKind.SCORER, f"the scorer gave {value!r} as {name}, which is no finite number"
                )
        return scored

    def _marked(self, message: Message) -> Message:
        error = self._errors.get(str(message.get("content"))) if message.get("role") == "tool" else None
        return message if error is None else {**message, "error": error}

    async def close(self) -> None:
        """Free what it holds."""
        await self._session.close()
