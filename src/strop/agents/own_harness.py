"""The agent for environments that bring their own: a worker's harness acts, and the gateway records what it samples."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Literal

from strop.agents.program import tokenizer_of
from strop.environments.environment import Session
from strop.environments.workers import ModelAccess, WorkerSession
from strop.errors import AttemptError, ConfigError
from strop.gateway import shared
from strop.rollouts import Task
from strop.sampling.conversation import Conversation


@dataclass(frozen=True, slots=True)
class OwnHarness:
    """Lets the environment's worker act.

    Attributes:
        token_budget: most tokens that may be sampled for an attempt; None for no limit.
        dropped_reasoning: "fork" or "keep", see `strop.gateway.Recording`.
        allow_constrained: whether the agent may ask for schemas, which change the distribution that is sampled from.
    """

    token_budget: int | None = None
    dropped_reasoning: Literal["fork", "keep"] = "fork"
    allow_constrained: bool = False

    async def run(self, task: Task, session: Session, conversation: Conversation) -> None:
        """See `Agent.run`."""
        if not isinstance(session, WorkerSession):
            raise ConfigError(
                "agent.kind", f"{type(session).__name__} has no harness of its own", "Choose another kind of agent."
            )
        rollout, params = conversation.rollout, conversation.params
        tokenizer = tokenizer_of(conversation.renderer)
        async with shared(conversation.sampler, conversation.renderer, tokenizer) as (gateway, url):
            attempt = gateway.engine.attempts.open(
                rollout,
                conversation.renderer,
                name=f"{rollout.id}-{secrets.token_hex(4)}",
                params=params,
                token_budget=self.token_budget,
                deadline=conversation.deadline,
                dropped_reasoning=self.dropped_reasoning,
                allow_constrained=self.allow_constrained,
                clock=conversation.clock,
            )
            try:
                await session.act(ModelAccess(url, attempt.key, gateway.model, params.temperature, params.max_tokens))
            except AttemptError as error:
                raise (
                    attempt.failure or error
                ) from error  # a lost sampler is the cause, whatever the harness made of it
            finally:
                gateway.engine.attempts.close(attempt)
            if attempt.failure is not None:
                raise attempt.failure
