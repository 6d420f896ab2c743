"""The simplest agent: the model reads the task and replies once."""

from __future__ import annotations

from dataclasses import dataclass

from strop.environments.environment import Session
from strop.errors import ConfigError
from strop.rollouts import Task
from strop.sampling.conversation import Conversation


@dataclass(frozen=True, slots=True)
class SingleReply:
    """Replies once.

    Attributes:
        max_tokens: longest reply, in tokens, if that is less than the sampling parameters allow.
    """

    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError("agent.max_tokens", f"it is {self.max_tokens}", "It must be at least 1.")

    async def run(self, task: Task, session: Session, conversation: Conversation) -> None:
        """See `Agent.run`."""
        await conversation.reply(task.messages, max_tokens=self.max_tokens)
