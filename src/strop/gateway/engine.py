"""Answers requests over a sampler, whatever API they came by: waits while paused, keeps budgets, records. Knows neither
HTTP nor any API's JSON.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from strop.errors import AttemptError, BatchError, StropError
from strop.gateway.attempts import NEW, Answer, Attempt, Attempts, RetryMark
from strop.gateway.errors import RequestError, refused
from strop.gateway.messages import tool_call
from strop.gateway.metrics import Metrics
from strop.gateway.recording import Place
from strop.gateway.streaming import Listener, ReplyText
from strop.gateway.tokens import TokenText
from strop.gateway.turnstile import Turnstile
from strop.rollouts import FailureKind, FinishReason, Message, Rollout, ToolSpec, derive_seed
from strop.sampling.grammars import call_rules, grammar
from strop.sampling.sampler import ConstrainedSampler, Sample, Sampler, SamplingParams, StreamingSampler

if TYPE_CHECKING:
    from renderers.base import Renderer


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a client would like its tokens sampled. None: not said."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """A request for replies, in no API's dialect.

    Attributes:
        messages: in the form of `messages.plain_message`; empty if the prompt is given as tokens.
        prompt: token ids, if the client brings them.
        tools: in the form of `messages.plain_tool`.
        tool_choice: "auto", "none", "required", or the name of the tool that has to be called.
        parallel_calls: whether one reply may hold several calls; if not, the first one counts.
        wishes: how to sample.
        n: number of replies.
        prompt_ids: whether the answer should hold the prompt's tokens.
        mark: what its client says about having sent it before.
        answer: JSON schema of a reply that is no tool call; None: any text.
    """

    messages: tuple[Message, ...] = ()
    prompt: tuple[int, ...] = ()
    tools: tuple[ToolSpec, ...] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    wishes: Wishes = Wishes()
    n: int = 1
    prompt_ids: bool = False
    mark: RetryMark = NEW
    answer: Mapping[str, Any] | None = None

    @property
    def forced(self) -> bool:
        """Whether the reply has to be a tool call."""
        return self.tool_choice not in ("auto", "none") and not self.prompt

    def callable_tools(self) -> tuple[ToolSpec, ...]:
        """The tools that may be called. Raises RequestError if one has to be, and there is none."""
        if not self.forced:
            return self.tools
        named = [tool for tool in self.tools if self.tool_choice in ("required", tool["function"]["name"])]
        if not named:
            name = "" if self.tool_choice == "required" else self.tool_choice
            raise RequestError(f"tool_choice: there is no tool {name!r}", parameter="tool_choice")
        return tuple(named)


@dataclass(frozen=True, slots=True)
class _Call:
    """A request on its way: what it asks, where it belongs, and how its reply has to begin or to be."""

    request: Request
    attempt: Attempt
    place: Place
    opening: list[int]
    grammar: str | None
    listener: Listener | None


class Engine:
    """Samples replies for attempts, and for callers that belong to none.

    Args:
        sampler: where tokens come from.
        renderer: between messages and tokens.
        tokenizer: the model's transformers tokenizer.
        call_seconds: deadline of a call that has no attempt, and of a wait while paused.
    """

    def __init__(self, sampler: Sampler, renderer: Renderer, tokenizer: Any, *, call_seconds: float = 600.0) -> None:
        self.sampler, self.renderer, self.text = sampler, renderer, TokenText(tokenizer)
        self._streaming = sampler if isinstance(sampler, StreamingSampler) else None
        self.call_seconds = call_seconds
        self.attempts = Attempts()
        self.metrics = Metrics(self)
        self.turnstile = Turnstile()
        self._open_gate = asyncio.Event()
        self._open_gate.set()
        self.in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def paused(self) -> bool:
        """Whether calls wait."""
        return not self._open_gate.is_set()

    async def pause(self, *, drain: bool = False) -> None:
        """Let calls wait from now on; with `drain`, return once those in flight have ended."""
        self._open_gate.clear()
        if drain:
            await self._idle.wait()

    def resume(self) -> None:
        """Let calls go on."""
        self._open_gate.set()

    async def answer(self, request: Request, attempt: Attempt | None, listener: Listener | None = None) -> list[Answer]:
        """Answer a request.

        Args:
            request: what is asked.
            attempt: what it belongs to; None records nothing.
            listener: hears what can be told before the replies are complete, if the sampler and the renderer can.

        Raises:
            RequestError: it can't be answered as it was asked, or its attempt is over.
            AttemptError: the system failed.
        """
        if attempt is None:
            attempts = Attempts()
            rollout = Rollout("", "", "", 0, derive_seed(time.time_ns()))
            attempt = attempts.open(rollout, self.renderer, deadline=time.monotonic() + self.call_seconds)
        attempt.check_open()
        form = await self._grammar(request, attempt)
        opening = self._opening(request) if form is None else []
        if request.prompt:
            place = attempt.recording.place_tokens(list(request.prompt))
        else:
            place = attempt.recording.place(list(request.messages), list(request.tools), opening)
        call = _Call(request, attempt, place, opening, form, listener)
        asked = (place.digest, request.wishes, request.n, request.tool_choice, form)
        try:
            return await attempt.once(asked, request.mark, lambda: self._replies(call))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if attempt.frozen and task is not None and task.uncancel() == 0:  # nobody but `freeze` cancelled it
                attempt.check_open()  # says that it is over
            raise
        except AttemptError as error:
            attempt.fail(error)
            raise

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """The tokens of a conversation, the header of the reply to come included."""
        attempt = Attempts().open(Rollout("", "", "", 0, 0), self.renderer)
        return attempt.recording.place(list(messages), list(tools)).prompt

    async def _replies(self, call: _Call) -> list[Answer]:
        """All replies to one request. If one fails, the others end."""
        if call.request.n == 1:
            return [await self._reply(call, 0)]
        return await _all([self._reply(call, number) for number in range(call.request.n)])

    async def _reply(self, call: _Call, number: int) -> Answer:
        request, attempt, place = call.request, call.attempt, call.place
        prompt = attempt.recording.tokens(place)
        room = self.sampler.max_context - len(prompt)
        if room < 1:
            raise RequestError(
                f"This model's maximum context length is {self.sampler.max_context} tokens, but the messages are "
                f"{len(prompt)} tokens. Please reduce their length.",
                code="context_length_exceeded",
                parameter="messages",
            )
        params = self._params(call, room)
        told = self._told(call, params.stop, number)

        def hear(tokens: list[int]) -> None:
            if call.listener is not None and told is not None:
                call.listener.started(prompt)
                told.add(tokens)

        granted = attempt.reserve(params.max_tokens)
        started = attempt.clock()
        try:
            params = replace(params, max_tokens=granted)
            sample = await self._sample(prompt, params, attempt.deadline, hear if told else None)
        finally:
            attempt.settle(granted)
        await self.turnstile.enter()  # a sampler may end thousands at once
        attempt.check_open()
        answer = self._read(request, place, call.opening, sample, params.stop, len(attempt.rollout.calls))
        answer.prompt_tokens, answer.prompt = len(prompt), prompt if request.prompt_ids else None
        if told is not None:
            told.finish(answer.message)
        constrained, forks = call.grammar is not None, attempt.rollout.forks
        attempt.recording.add(place, sample, answer.message, started, attempt.clock(), constrained=constrained)
        seconds = attempt.rollout.seconds
        seconds["sampler"] = seconds.get("sampler", 0.0) + attempt.clock() - started
        self.metrics.sampled(place, prompt, sample, forked=attempt.rollout.forks > forks)
        return answer

    def _told(self, call: _Call, stops: tuple[str, ...], number: int) -> ReplyText | None:
        """What tells a listener of a reply; None if there is none, or the reply can't be told before it is complete."""
        listener = call.listener
        if listener is None or self._streaming is None:
            return None

        def say(text: str) -> None:
            listener.said(number, text)

        if call.request.prompt:
            return ReplyText(self.text.decode, (), stops, False, say)
        marks = getattr(self.renderer, "call_marks", None)
        if marks is None or call.opening:
            return None
        decode = partial(self.text.decode, keep_special=True)
        return ReplyText(decode, self.renderer.get_stop_token_ids(), (marks[0], *stops), True, say)

    async def _sample(
        self,
        prompt: list[int],
        params: SamplingParams,
        deadline: float | None,
        hear: Callable[[list[int]], None] | None,
    ) -> Sample:
        if self.paused:
            try:
                async with asyncio.timeout(self.call_seconds):
                    await self._open_gate.wait()
            except TimeoutError:
                reason = f"the gateway has been paused for more than {self.call_seconds:g} s"
                raise AttemptError(FailureKind.TIMEOUT, reason) from None
        self.in_flight += 1
        self._idle.clear()
        try:
            if hear is not None and self._streaming is not None:
                return await self._streaming.sample_streaming(prompt, params, hear, deadline=deadline)
            return await self.sampler.sample(prompt, params, deadline=deadline)
        except BatchError as error:
            raise RequestError(str(error)) from error
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def _params(self, call: _Call, room: int) -> SamplingParams:
        """How a call is sampled: as its attempt says, else as its client wishes."""
        request, attempt, place = call.request, call.attempt, call.place
        wishes, fixed = request.wishes, attempt.params
        number = attempt.sibling(place.digest)
        seed = derive_seed(attempt.rollout.seed, place.digest.hex(), number)
        limits = [limit for limit in (wishes.max_tokens, fixed.max_tokens if fixed else None) if limit is not None]
        stops = dict.fromkeys((*(fixed.stop_token_ids if fixed else ()), *wishes.stop_token_ids))
        if not request.prompt or fixed:
            stops |= dict.fromkeys(self.renderer.get_stop_token_ids())
        stop = tuple(dict.fromkeys((*(fixed.stop if fixed else ()), *wishes.stop)))
        base = fixed or SamplingParams(
            max_tokens=1,
            temperature=1.0 if wishes.temperature is None else wishes.temperature,
            top_p=1.0 if wishes.top_p is None else wishes.top_p,
            top_k=wishes.top_k or 0,
            min_p=wishes.min_p or 0.0,
        )
        if fixed is None and wishes.seed is not None:
            seed = wishes.seed % 2**63 if number == 0 else derive_seed(wishes.seed, number)
        return replace(
            base,
            max_tokens=min([room, *limits]),
            stop_token_ids=tuple(stops),
            stop=stop,
            seed=seed,
            grammar=call.grammar,
        )

    async def _grammar(self, request: Request, attempt: Attempt) -> str | None:
        """What the reply has to be, if that takes a grammar; None also if a forced call has to do with its opening."""
        if request.answer is None and not request.forced:
            return None
        marks = getattr(self.renderer, "call_marks", None)
        problem = None
        if marks is None:
            problem = "this model's replies can't be put into a grammar here"
        elif not isinstance(self.sampler, ConstrainedSampler):
            problem = "it takes constrained decoding, which the sampler behind this gateway does not have"
        elif attempt.params is not None and not attempt.allow_constrained:
            problem = (
                "it changes the distribution that is sampled from, which is refused in training; if it is meant, set "
                "allow_constrained_sampling = true in the recipe's [environment.agent]"
            )
        if problem is None and marks is not None and isinstance(self.sampler, ConstrainedSampler):
            tools = () if request.tool_choice == "none" else request.callable_tools()
            calls = list(call_rules(tools, *marks))
            several = request.parallel_calls and not request.forced
            text = grammar(answer=None if request.forced else request.answer, calls=calls, several=several)
            try:
                await self.sampler.check_grammar(text)
                return text
            except StropError as error:
                problem = str(error)
        if request.answer is not None:
            raise refused("response_format", str(problem))
        return None

    def _opening(self, request: Request) -> list[int]:
        """Tokens that make the reply a tool call, if it has to be one."""
        if not request.forced:
            return []
        request.callable_tools()
        name = None if request.tool_choice == "required" else request.tool_choice
        opening = getattr(self.renderer, "call_opening", None)
        if opening is None:
            raise refused("tool_choice", 'this model\'s renderer can\'t begin a call; use "auto" or "none"')
        return list(opening(name))

    def _read(
        self,
        request: Request,
        place: Place,
        opening: list[int],
        sample: Sample,
        stops: tuple[str, ...],
        number: int,
    ) -> Answer:
        """What the sampled tokens say to the client."""
        length = sample.finish_reason is FinishReason.LENGTH
        if request.prompt:
            text, stopped = _cut(self.text.decode(sample.tokens), stops)
            message: Message = {"role": "assistant", "content": text}
            return Answer(message, sample, "length" if length and stopped is None else "stop", stopped)
        read = place.prompt[: len(place.prompt) - len(opening)]
        parsed = self.renderer.parse_response(
            [*opening, *sample.tokens], tools=list(request.tools) or None, prompt_ids=read
        )
        content, stopped = _cut(parsed.content or "", stops)
        calls = []
        for position, attempt in enumerate(parsed.tool_calls):
            if attempt.status == "ok" and isinstance(attempt.arguments, dict) and request.tool_choice != "none":
                identity = attempt.id or f"call_{number}_{position}_{place.digest.hex()[:8]}"
                calls.append(tool_call(identity, attempt.name or "", _written(attempt.arguments)))
            else:  # a call that can't be run is shown as it was written
                content = "\n".join(part for part in (content, _shown(attempt.raw)) if part)
        message = {"role": "assistant", "content": content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        if calls:
            message["tool_calls"] = calls if request.parallel_calls else calls[:1]
        if length and stopped is None:
            return Answer(message, sample, "length")
        return Answer(message, sample, "tool_calls" if calls else "stop", stopped)


def _cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the first stop string, and that string."""
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return text, None
    at, stop = min(found)
    return text[:at], stop


def _written(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _shown(raw: str) -> str:
    return raw if raw.lstrip().startswith("<") else f"<tool_call>{raw}</tool_call>"


async def _all(coroutines: list[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
