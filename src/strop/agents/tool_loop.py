"""The tool-calling loop: the model replies, its calls are run, it reads the results, until it replies without a call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from strop.environments.environment import Session, ToolOutcome
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, FinishReason, Message, Task
from strop.sampling.conversation import Conversation, ToolCall

#: What the model reads about a call that could not be run, and how to write it right.
_MALFORMED = 'malformed call ({problem}): write <tool_call>{{"name": ..., "arguments": {{...}}}}</tool_call>'


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """Calls tools until it has an answer.

    A call that can't be run is answered by a short message that the model can read and recover from. A reply that
    was cut off by a token limit ends the attempt: what the model wanted to say isn't known. Tool results that end in
    an error are marked in the transcript ({"role": "tool", "error": "timeout", …}), for environments and readers.

    Attributes:
        max_turns: most replies of the model. Calls in the last one are still run, since they may have effects.
        max_tokens_per_reply: longest reply, in tokens, if that is less than the sampling parameters allow.
        max_calls_per_reply: further calls in one reply are answered by an error.
        parallel_calls: run the calls of one reply at the same time. Off, they run in the order they were written.
    """

    max_turns: int = 8
    max_tokens_per_reply: int | None = None
    max_calls_per_reply: int = 8
    parallel_calls: bool = False

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens_per_reply", "max_calls_per_reply"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"agent.{name}", f"it is {value}", "It must be at least 1.")

    async def run(self, task: Task, session: Session, conversation: Conversation) -> None:
        """See `Agent.run`."""
        conversation.append(task.messages)
        for _ in range(self.max_turns):
            reply = await conversation.reply(max_tokens=self.max_tokens_per_reply)
            if reply.finish_reason is FinishReason.LENGTH or not reply.calls:
                return
            started = conversation.clock()
            outcomes = await self._run_calls(reply.calls, session)
            seconds = conversation.rollout.seconds
            seconds["tools"] = seconds.get("tools", 0.0) + conversation.clock() - started
            conversation.append([_result(call, outcome) for call, outcome in zip(reply.calls, outcomes, strict=True)])

    async def _run_calls(self, calls: tuple[ToolCall, ...], session: Session) -> list[ToolOutcome]:
        """The outcome of each call, in their order."""
        run = calls[: self.max_calls_per_reply]
        if self.parallel_calls and len(run) > 1:
            outcomes = await _together([_outcome(call, session) for call in run])
        else:
            outcomes = [await _outcome(call, session) for call in run]
        ignored = ToolOutcome(f"not run: at most {self.max_calls_per_reply} calls a reply", error="too many calls")
        return outcomes + [ignored] * (len(calls) - len(run))


async def _together(waiting: list[Coroutine[Any, Any, ToolOutcome]]) -> list[ToolOutcome]:
    """All outcomes; if one call fails, the others are cancelled and have ended before its error is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in waiting]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def _outcome(call: ToolCall, session: Session) -> ToolOutcome:
    """Run one call. The session's own failures pass; a bug in a tool becomes one."""
    if call.problem is not None:
        return ToolOutcome(_MALFORMED.format(problem=call.problem.replace("_", " ")), error="malformed call")
    try:
        return await session.call(call.name, call.arguments)
    except AttemptError:
        raise
    except Exception as error:
        raise AttemptError(FailureKind.TOOL, f"{call.name} raised {type(error).__name__}: {error}") from error


def _result(call: ToolCall, outcome: ToolOutcome) -> Message:
    message: Message = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": outcome.content}
    if outcome.error is not None:
        message["error"] = outcome.error
    return message
