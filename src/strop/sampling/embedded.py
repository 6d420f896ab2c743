"""The embedded sampler: continuous batching in a thread of this process, on weights that the learner shares.

Requests come from an event loop and wait in a bounded queue. A worker thread decodes: at every step finished sequences
leave, new ones join, and the loop is told once. What a step computes is the engine's business (`embedded_fused` for
known decoders, `embedded_generic` for any other model); how tokens are drawn is in `draw`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from strop.costs.ledger import Ledger
from strop.errors import AttemptError, BatchError, ConfigError, StropError
from strop.models.policy import Policy
from strop.rollouts import FailureKind, FinishReason, derive_seed
from strop.sampling.constraints import Constraint, Constraints
from strop.sampling.draw import draw, uniform
from strop.sampling.embedded_fused import FusedEngine
from strop.sampling.embedded_generic import GenericEngine
from strop.sampling.embedded_sequence import Engine, Sequence
from strop.sampling.sampler import Sample, SamplingParams

#: Tokens that a character of a stop string can take up at most (bytes of UTF-8), and some to either side.
TOKENS_PER_CHARACTER, TOKENS_AROUND = 4, 8


class Decodes(Protocol):
    """What the sampler needs of a tokenizer, for stop strings."""

    def decode(self, token_ids: list[int], /) -> Any:
        """Text of the tokens."""
        ...


@dataclass(frozen=True, slots=True)
class SamplerStatistics:
    """What a sampler did since it was made.

    Attributes:
        steps: decoding steps.
        busy_seconds: time inside steps.
        prefilled, cached: prompt tokens computed, and reused.
        sampled: tokens sampled.
        finished: requests that ended with a sample.
        active, queued: requests in a step's batch, and waiting for a place in it.
    """

    steps: int
    busy_seconds: float
    prefilled: int
    cached: int
    sampled: int
    finished: int
    active: int
    queued: int


class EmbeddedSampler:
    """Samples from a policy's weights in this process. See `strop.sampling.sampler.Sampler`.

    A request's tokens and log-probabilities depend, bit for bit, on its prompt, parameters, seed and the weights
    alone: not on what is sampled beside it, nor on whether its prefix was reused.

    Args:
        policy: the weights. Every step holds them still; a publication falls between two steps.
        tokenizer: for stop strings and grammars; None refuses them.
        slots: most sequences that are decoded at once.
        parked: further sequences whose keys and values are kept after they ended, for a next turn; None: as many as
            `slots`. The longest unused one gives way.
        max_context: most tokens of a sequence; None takes the model's own limit, at most 4096.
        queue_limit: most requests that wait; further callers wait for a place in the queue.
        packed: keep a second copy of the matrices in the layout that the CPU multiplies fastest.
        ledger: gets the seconds of steps and the tokens.

    Raises:
        ConfigError: a number is out of range.
        ModelError: the model is of a kind that can't be sampled from here.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: Decodes | None = None,
        *,
        slots: int = 64,
        parked: int | None = None,
        max_context: int | None = None,
        queue_limit: int = 4096,
        packed: bool = True,
        ledger: Ledger | None = None,
    ) -> None:
        parked = slots if parked is None else parked
        for name, value, least in (("slots", slots, 1), ("parked", parked, 0), ("queue_limit", queue_limit, 1)):
            if value < least:
                raise ConfigError(f"sampler.{name}", f"it is {value}", f"It must be at least {least}")
        self.policy, self.tokenizer, self.ledger = policy, tokenizer, ledger
        self._max_context = _context(policy, max_context)
        self._engine: Engine = (
            FusedEngine(policy.decoder, slots, parked, self._max_context, packed)
            if policy.decoder
            else GenericEngine(policy, slots)
        )
        self.queue_limit = queue_limit
        self._constraints: Constraints | None = None
        self._constraining = threading.Lock()
        self._wake = threading.Condition()
        self._queue: deque[Sequence] = deque()
        self._active: list[Sequence] = []
        self._seen: int | None = None  # version of the weights in the engine
        self._broken = ""
        self._closing = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places = asyncio.Semaphore(queue_limit)
        self._unseeded = 0
        self._steps = self._sampled = self._cached = self._finished = 0
        self._busy = 0.0

    # -- the callers' side ------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        return self.policy.version

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and sampled, that one sequence may have."""
        return self._max_context

    async def sample(self, prompt: Several[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        """See `strop.sampling.sampler.Sampler.sample`."""
        return await self._sample(prompt, params, None, deadline)

    async def sample_streaming(
        self,
        prompt: Several[int],
        params: SamplingParams,
        on_tokens: Callable[[list[int]], None],
        *,
        deadline: float | None = None,
    ) -> Sample:
        """See `strop.sampling.sampler.StreamingSampler.sample_streaming`."""
        return await self._sample(prompt, params, on_tokens, deadline)

    async def _sample(
        self,
        prompt: Several[int],
        params: SamplingParams,
        on_tokens: Callable[[list[int]], None] | None,
        deadline: float | None,
    ) -> Sample:
        self._check(prompt, params)
        asked = time.monotonic()
        constraint = await asyncio.to_thread(self._constrain, params.grammar) if params.grammar else None
        loop = self._enter_loop()
        sequence: Sequence | None = None
        left = None if deadline is None else max(0.0, deadline - asked)
        try:
            async with asyncio.timeout(left) as scope:
                await self._places.acquire()
                sequence = Sequence(
                    prompt=np.array(prompt, dtype=np.int64),
                    params=self._seeded(params),
                    future=loop.create_future(),
                    asked=asked,
                    limit=min(len(prompt) + params.max_tokens, self._max_context),
                    constraint=constraint,
                    on_tokens=on_tokens,
                    adapter=self.policy.adapter if params.adapter is None else params.adapter,
                )
                self._submit(sequence)
                return await sequence.future
        except TimeoutError:
            if not scope.expired():
                raise
            where = "in the queue" if sequence is None or sequence.queued else f"after {len(sequence.tokens)} tokens"
            reason = f"its deadline passed {where}, {time.monotonic() - asked:.1f} s after it was asked for"
            raise AttemptError(FailureKind.TIMEOUT, reason) from None
        finally:
            if sequence and (sequence.future.cancelled() or not sequence.future.done()):
                sequence.cancelled = True
                with self._wake:
                    self._wake.notify()

    async def check_grammar(self, grammar: str) -> None:
        """See `strop.sampling.sampler.ConstrainedSampler.check_grammar`."""
        await asyncio.to_thread(self._constrain, grammar)

    def _constrain(self, grammar: str) -> Constraint:
        """A constraint at its beginning; the first one takes a second, in which the tokenizer is read."""
        with self._constraining:
            if self._constraints is None:
                self._constraints = Constraints(self.tokenizer)
        return self._constraints.begin(grammar)

    async def close(self) -> None:
        """End sampling; requests in flight raise `AttemptError(FailureKind.SAMPLER)`. May be called twice."""
        with self._wake:
            self._closing = True
            self._broken = self._broken or "the sampler was closed"
            self._wake.notify()
        if self._thread:
            await asyncio.to_thread(self._thread.join)
            await asyncio.sleep(0)  # lets the futures that the thread failed reach their callers

    def statistics(self) -> SamplerStatistics:
        """What was done until now."""
        return SamplerStatistics(
            steps=self._steps,
            busy_seconds=self._busy,
            prefilled=self._engine.prefilled,
            cached=self._cached,
            sampled=self._sampled,
            finished=self._finished,
            active=len(self._active),
            queued=len(self._queue),
        )

    def waiting(self) -> list[tuple[str, float]]:
        """What is waited for, and since when on `time.monotonic()`'s clock: every request, oldest first."""
        with self._wake:
            requests = [*self._active, *self._queue]
        found = []
        for request in sorted(requests, key=lambda request: request.asked):
            state = (
                "waits for a slot" if request.queued else f"has {len(request.tokens)} of {request.params.max_tokens}"
            )
            found.append((f"a sample of {len(request.prompt)} prompt tokens {state}", request.asked))
        return found

    def _check(self, prompt: Several[int], params: SamplingParams) -> None:
        if not len(prompt) or len(prompt) >= self._max_context:
            raise BatchError(
                f"a prompt of {len(prompt)} tokens can't be sampled from: it must have at least 1, and fewer than "
                f"max_context = {self._max_context}"
            )
        for name, wrong in (
            ("max_tokens", params.max_tokens < 1),
            ("temperature", params.temperature < 0),
            ("top_p", not 0 < params.top_p <= 1),
            ("top_k", params.top_k < 0),
            ("min_p", not 0 <= params.min_p <= 1),
        ):
            if wrong:
                raise ConfigError(f"sampling.{name}", f"{getattr(params, name)} is out of range", "See SamplingParams")
        if params.adapter and params.adapter not in self.policy.adapters:
            there = ", ".join(self.policy.adapters) or "none"
            raise ConfigError("sampling.adapter", f"there is no adapter {params.adapter!r}", f"There are: {there}")
        if params.stop and self.tokenizer is None:
            raise ConfigError("sampling.stop", "this sampler has no tokenizer", "Give it one, or use stop_token_ids")
        if params.grammar and self.tokenizer is None:
            raise ConfigError("sampling.grammar", "this sampler has no tokenizer", "Give it one")
        if self._broken:
            raise AttemptError(FailureKind.SAMPLER, self._broken)

    def _enter_loop(self) -> asyncio.AbstractEventLoop:
        """The running event loop; a sampler serves one at a time."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            if self._active or self._queue:
                raise RuntimeError("the sampler has requests of another event loop in flight: use one loop at a time")
            self._loop, self._places = loop, asyncio.Semaphore(self.queue_limit)
        return loop

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        if params.seed is not None:
            return params
        self._unseeded += 1
        return replace(params, seed=derive_seed("unseeded", time.time_ns(), self._unseeded))

    def _submit(self, sequence: Sequence) -> None:
        with self._wake:
            if self._broken:
                self._places.release()  # whoever waits for a place hears it too
                raise AttemptError(FailureKind.SAMPLER, self._broken)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="strop-sampler", daemon=True)
                self._thread.start()
            self._queue.append(sequence)
            self._wake.notify()

    # -- the worker's side ------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Step while there is something to sample. Whatever ends this thread reaches every caller."""
        reason, cause = "the sampler was closed", None
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._closing or self._queue or self._active)
                    if self._closing:
                        return
                self._step()
        except BaseException as error:
            reason, cause = f"the sampler broke: {type(error).__name__}: {error}", error
        finally:
            with self._wake:
                self._broken = reason
                left = [*self._active, *self._queue]
                self._active.clear()
                self._queue.clear()
            self._tell([(sequence, _lost(reason, cause)) for sequence in left], len(left))

    def _step(self) -> None:
        """Drop what was cancelled, admit what fits, compute a step, draw, and tell the loop what is finished."""
        began = time.monotonic()
        activity: AbstractContextManager[None] = contextlib.nullcontext()
        if self.ledger:
            activity = self.ledger.activity("sampler")
        prefilled = self._engine.prefilled
        with activity:
            with self.policy.step("a sampling step") as version:
                if version != self._seen:
                    self._engine.weights_changed()
                    self._seen = version
                left = self._drop_cancelled()
                joined = self._admit(began)
                sequences, logits = self._engine.step()
            ended: list[tuple[Sequence, Sample | AttemptError]] = []
            if logits is not None:
                sequences, logits = self._within_grammars(sequences, logits, ended)
                params = [sequence.params for sequence in sequences]
                uniforms = [uniform(s.params.seed or 0, len(s.tokens)) for s in sequences]
                for sequence, token, logprob in zip(sequences, *draw(logits, params, uniforms), strict=True):
                    if sample := self._append(sequence, token, logprob, version):
                        ended.append((sequence, sample))
        cached = sum(sequence.cached for sequence in sequences if len(sequence.tokens) == 1)
        self._steps += 1
        self._sampled += len(sequences)
        self._cached += cached
        self._finished += len(ended)
        self._busy += time.monotonic() - began
        if self.ledger:
            prompt = self._engine.prefilled - prefilled
            self.ledger.count(prompt=prompt, cached=cached, sampled=len(sequences))
        streamed = [(s, s.tokens[-1]) for s in sequences if s.on_tokens]
        if ended or joined or left or streamed:
            self._tell(ended, joined + left, streamed)

    def _within_grammars(
        self, sequences: list[Sequence], logits: Tensor, ended: list[tuple[Sequence, Sample | AttemptError]]
    ) -> tuple[list[Sequence], Tensor]:
        """Leave to each sequence the tokens that its grammar allows. One that can't be followed any more ends."""
        if not any(sequence.constraint for sequence in sequences):
            return sequences, logits
        logits, going_on = logits.clone(), []
        for row, sequence in enumerate(sequences):
            try:
                if sequence.constraint:
                    allowed = sequence.constraint.allowed(logits.shape[1]).to(logits.device)
                    logits[row].masked_fill_(~allowed, float("-inf"))
                going_on.append(row)
            except StropError as error:
                self._leave(sequence)
                ended.append((sequence, AttemptError(FailureKind.SAMPLER, str(error))))
        return [sequences[row] for row in going_on], logits[going_on]

    def _drop_cancelled(self) -> int:
        """Free what cancelled requests held; gives how many places in the queue that frees."""
        for sequence in [sequence for sequence in self._active if sequence.cancelled]:
            self._leave(sequence)
        with self._wake:
            waiting = [sequence for sequence in self._queue if not sequence.cancelled]
            dropped = len(self._queue) - len(waiting)
            if dropped:
                self._queue = deque(waiting)
        return dropped

    def _admit(self, now: float) -> int:
        """Let waiting requests join, in their order; gives how many did."""
        joined = 0
        self._order_queue()
        while self._queue and self._engine.admit(self._queue[0]):
            with self._wake:
                sequence = self._queue.popleft()
                self._active.append(sequence)
            sequence.queued, sequence.started = False, now
            joined += 1
        return joined

    def _order_queue(self) -> None:
        """Requests that go on from what a row still holds come first, else others would take that row from them and
        it would be computed again; among them, and among the others, in the order in which they came."""
        with self._wake:
            new = [sequence for sequence in self._queue if sequence.resumes is None]
        for sequence in new:
            sequence.resumes = self._engine.resumes(sequence)
        if any(sequence.resumes for sequence in new):
            with self._wake:  # one that came meanwhile is looked at before the next step
                self._queue = deque(sorted(self._queue, key=lambda sequence: not sequence.resumes))

    def _append(self, sequence: Sequence, token: int, logprob: float, version: int) -> Sample | None:
        """Add a token; the sample, if that ends it."""
        sequence.tokens.append(token)
        sequence.logprobs.append(logprob)
        sequence.versions.append(version)
        complete = sequence.constraint is not None and sequence.constraint.take(token)
        if complete or token in sequence.params.stop_token_ids or self._hits_stop_string(sequence):
            reason = FinishReason.STOP
        elif sequence.length >= sequence.limit:
            reason = FinishReason.LENGTH
        else:
            self._engine.append(sequence, token)
            return None
        self._leave(sequence)
        return sequence.sample(reason, time.monotonic())

    def _hits_stop_string(self, sequence: Sequence) -> bool:
        if not sequence.params.stop or self.tokenizer is None:
            return False
        longest = max(len(stop) for stop in sequence.params.stop)
        text = self.tokenizer.decode(sequence.tokens[-longest * TOKENS_PER_CHARACTER - TOKENS_AROUND :])
        return any(stop in text for stop in sequence.params.stop)

    def _leave(self, sequence: Sequence) -> None:
        self._engine.release(sequence)
        with self._wake:
            self._active.remove(sequence)

    def _tell(
        self,
        ended: list[tuple[Sequence, Sample | AttemptError]],
        places: int,
        streamed: Several[tuple[Sequence, int]] = (),
    ) -> None:
        """Hand the results of a step, and the freed places of the queue, to the event loop in one callback."""
        loop = self._loop

        def hand_over() -> None:
            for _ in range(places):
                self._places.release()
            for sequence, token in streamed:
                if sequence.on_tokens and not sequence.cancelled and not sequence.future.done():
                    sequence.on_tokens([token])
            for sequence, result in ended:
                if sequence.future.done():
                    continue
                if isinstance(result, Sample):
                    sequence.future.set_result(result)
                else:
                    sequence.future.set_exception(result)

        if loop and not loop.is_closed():
            with contextlib.suppress(RuntimeError):  # closed between the question and the call: nobody waits any more
                loop.call_soon_threadsafe(hand_over)


def _lost(reason: str, cause: BaseException | None) -> AttemptError:
    error = AttemptError(FailureKind.SAMPLER, reason)
    error.__cause__ = cause
    return error


def _context(policy: Policy, asked: int | None) -> int:
    """The context to provide for.

    Raises:
        ConfigError: more than the model has, or too little to sample a token.
    """
    limit = int(getattr(policy.model.config, "max_position_embeddings", 0) or 0)
    if asked is None:
        return min(limit or 4096, 4096)
    if asked < 2 or (limit and asked > limit):
        upto = f" and at most {limit}, the model's own limit" if limit else ""
        raise ConfigError("sampler.max_context", f"it is {asked}", f"It must be at least 2{upto}")
    return asked
