"""A conversation with the model that records every token: the only way in which an agent reaches a sampler.

Each reply becomes a `ModelCall` that holds what is new since the call before it, so a turn costs what it adds and not
what came before. What to say is the agent's business; how text becomes tokens is the renderer's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from strop.rollouts import FinishReason, Message, ModelCall, Rollout, ToolSpec, derive_seed

if TYPE_CHECKING:  # the renderers package takes a second to import, and nothing here needs it to run
    from renderers.base import Renderer

    from strop.sampling.sampler import Sampler, SamplingParams


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model wrote, or tried to write.

    Attributes:
        id: unique within the conversation.
        name: of the tool; empty if the call was too malformed to have one.
        arguments: a JSON object.
        problem: why it can't be run ("invalid_json", "unclosed_block", "missing_name", "malformed_structure" …);
            None if it is well-formed.
        raw: what was written.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str | None
    raw: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said.

    Attributes:
        message: the assistant's message, as the transcript keeps it.
        calls: its tool calls, malformed ones included, in order.
        finish_reason: LENGTH if the reply was cut off, or if the context was too full for one to begin.
    """

    message: Message
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason


class Conversation:
    """One line of messages between an agent and the model, recorded in a rollout.

    Args:
        sampler: where replies come from.
        renderer: between messages and tokens (protocol of `renderers.base.Renderer`).
        rollout: what is recorded into: calls, transcript, forks and the time spent sampling.
        params: how to sample. Its seed is replaced by one for each call, derived from the rollout's seed and the
            number of the call; the renderer's stop tokens are added.
        tools: what the model is told it may call.
        deadline: on `time.monotonic()`'s clock, for every call.
        clock: the run's monotonic clock, in seconds.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        rollout: Rollout,
        params: SamplingParams,
        *,
        tools: Sequence[ToolSpec] = (),
        deadline: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sampler, self.renderer, self.rollout = sampler, renderer, rollout
        self.deadline, self.clock = deadline, clock
        stops = dict.fromkeys((*params.stop_token_ids, *renderer.get_stop_token_ids()))
        self._params = replace(params, stop_token_ids=tuple(stops))
        self._tools = list(tools) or None
        self._ids: list[int] = []  # every token of the current branch
        self._last: int | None = None  # index of the call that the next one extends
        self._history: list[Message] = []  # the branch as messages: rendered whole only when a new root opens
        self._pending: list[Message] = []  # said, but not yet answered
        self._calls_made = 0

    @property
    def params(self) -> SamplingParams:
        """How every call is sampled, but for its seed."""
        return self._params

    @property
    def room(self) -> int:
        """Tokens left of the context, before what was appended since the last reply."""
        return self.sampler.max_context - len(self._ids)

    def append(self, messages: Sequence[Message]) -> None:
        """Say something that the next reply will answer."""
        self._pending += messages
        self.rollout.transcript += messages

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Go on from another history. The next reply opens a new root; a fork is counted if one was there before.

        The calls made so far stay in the rollout and keep their tokens. The transcript, which readers read from top
        to bottom, gets a note and then the new history.
        """
        if self._last is not None:
            self.rollout.forks += 1
            self.rollout.transcript.append({"role": "note", "content": "The agent rewrote its history:"})
        self._last, self._ids, self._history, self._pending = None, [], [], []
        self.append(messages)

    async def reply(self, new_messages: Sequence[Message] = (), *, max_tokens: int | None = None) -> Reply:
        """Ask the model to reply.

        Args:
            new_messages: what was said since its last reply, after anything appended before.
            max_tokens: at most this many tokens, if that is less than the sampling parameters allow.

        Raises:
            AttemptError: the sampler broke or the deadline passed.
            ValueError: nothing was said since the last reply.
        """
        self.append(new_messages)
        if not self._pending:
            raise ValueError("there is nothing to reply to: no message was added since the last reply")
        prompt = self._extend()
        if self.room < 1:
            return Reply({"role": "assistant", "content": ""}, (), FinishReason.LENGTH)
        call = await self._sample(prompt, max_tokens)
        parsed = self.renderer.parse_response(call.tokens, tools=self._tools, prompt_ids=prompt)
        calls = tuple(self._tool_call(attempt) for attempt in parsed.tool_calls)
        message: Message = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if calls:
            message["tool_calls"] = [_as_message_part(call) for call in calls]
        self._history.append(message)
        self.rollout.transcript.append(message)
        return Reply(message, calls, call.finish_reason)

    def _extend(self) -> list[int]:
        """Move what is pending into the branch; the tokens that the next call's prompt adds to it."""
        new, self._pending = self._pending, []
        self._history += new
        if self._last is not None:
            added = self._bridge(self.rollout.calls[self._last], new)
            if added is not None:
                self._ids += added
                return added
            self.rollout.forks += 1
            self._last = None
        self._ids = list(self.renderer.render_ids(self._history, tools=self._tools, add_generation_prompt=True))
        return list(self._ids)

    def _bridge(self, last: ModelCall, new: list[Message]) -> list[int] | None:
        """The tokens that `new` adds after the last call; None if the renderer would change a token before them."""
        return tokens_added(
            self.renderer, last, lambda: self._ids[: len(self._ids) - len(last.tokens)], new, self._tools
        )

    async def _sample(self, prompt: list[int], max_tokens: int | None) -> ModelCall:
        """Sample a reply to the branch as it is, and record it."""
        limit = self._params.max_tokens if max_tokens is None else min(max_tokens, self._params.max_tokens)
        seed = derive_seed(self.rollout.seed, "call", len(self.rollout.calls))
        params = replace(self._params, max_tokens=limit, seed=seed)
        started = self.clock()
        # A copy: the sampler may keep what it is given, and the branch grows.
        sample = await self.sampler.sample(list(self._ids), params, deadline=self.deadline)
        ended = self.clock()
        call = ModelCall(
            parent=self._last,
            prompt=prompt,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            cached=sample.cached,
            started=started,
            ended=ended,
            experts=sample.experts and sample.experts.last(len(prompt) + len(sample.tokens)),
        )
        self._last = len(self.rollout.calls)
        self.rollout.calls.append(call)
        self._ids += sample.tokens
        seconds = self.rollout.seconds
        seconds["sampler"] = seconds.get("sampler", 0.0) + ended - started
        return call

    def _tool_call(self, attempt: Any) -> ToolCall:
        """A parsed call with an id of ours."""
        self._calls_made += 1
        problem = None if attempt.status == "ok" else str(attempt.status)
        arguments = attempt.arguments
        if problem is None and not isinstance(arguments, dict):
            problem, arguments = "malformed_structure", {}
        identity = attempt.id or f"call_{self._calls_made}"
        return ToolCall(identity, attempt.name or "", arguments or {}, problem, attempt.raw)


def tokens_added(
    renderer: Renderer,
    last: ModelCall,
    before: Callable[[], list[int]],
    new: list[Message],
    tools: list[ToolSpec] | None,
) -> list[int] | None:
    """The tokens that messages add after a call, up to the header of the reply to come.

    Args:
        renderer: of the model.
        last: the call that is extended.
        before: gives every token before the ones that `last` sampled; asked only if the renderer needs them.
        new: what was said since.
        tools: what the branch was rendered with.

    Returns:
        None if the renderer can't extend the turn, or would change a token that was sampled or read before.
    """
    prompt = last.prompt if getattr(renderer, "bridges_from_last_turn", False) else before()
    bridged = renderer.bridge_to_next_turn(prompt, last.tokens, new, tools=tools)
    if bridged is None:
        return None
    kept = len(prompt) + len(last.tokens)
    tokens = list(bridged.token_ids)
    return tokens[kept:] if tokens[:kept] == [*prompt, *last.tokens] else None


def _as_message_part(call: ToolCall) -> dict[str, Any]:
    """A call as the OpenAI API writes it; a malformed one with what was written, and its problem beside it."""
    written = call.raw if call.problem else json.dumps(call.arguments, ensure_ascii=False)
    part = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": written}}
    return {**part, "problem": call.problem} if call.problem else part
