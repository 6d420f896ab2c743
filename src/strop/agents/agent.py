"""The agent protocol: how the model acts on a task. Agents hold no state between attempts."""

from __future__ import annotations

from typing import Protocol

from strop.environments.environment import Session
from strop.rollouts import Task
from strop.sampling.conversation import Conversation


class Agent(Protocol):
    """Acts on one task through a conversation that records every token."""

    async def run(self, task: Task, session: Session, conversation: Conversation) -> None:
        """Act until done. What was sampled and said is in `conversation.rollout` afterwards.

        Raises:
            AttemptError: the system failed. The agent's own failures (a malformed call, its own budget spent) are
                left for the environment to score.
        """
        ...
