"""Which attempt a call belongs to, what it may still spend, and how it is frozen. An attempt is named by a key minted
for it, a URL prefix, a header of ours, or a session header of a known client, in this order; never by guessing.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from strop.errors import AttemptError
from strop.gateway.errors import RequestError
from strop.gateway.recording import Recording
from strop.rollouts import Message, Rollout
from strop.sampling.sampler import Sample, SamplingParams

if TYPE_CHECKING:
    from renderers.base import Renderer

#: The header that names an attempt.
ATTEMPT_HEADER = "x-strop-attempt"
#: Headers by which known clients name their session: verifiers and Harbor, Codex, Claude Code.
SESSION_HEADERS = ("x-session-id", "session_id", "session-id", "x-claude-code-session-id")
_KEY_PREFIX = "sk-strop-"
_REMEMBERED = 8  # answers kept for retries, which come within seconds


@dataclass(frozen=True, slots=True)
class RetryMark:
    """What a client says about whether it sent a request before.

    Attributes:
        key: its idempotency key: the same key is the same request.
        count: how often it says that it sent the request before.
    """

    key: str | None = None
    count: int = 0

    @property
    def may_repeat(self) -> bool:
        """Whether this may be a request that was answered. Without a mark it is a new one: agents ask twice too."""
        return self.key is not None or self.count > 0


#: A request that was not sent before, as far as its client says.
NEW = RetryMark()


@dataclass(slots=True)
class Answer:
    """One sampled reply.

    Attributes:
        message: the assistant's message, as the agent gets it.
        sample: every token that was sampled.
        finish: "stop", "length" or "tool_calls".
        stop_string: the stop string that ended it.
        prompt_tokens: how many tokens were read.
        prompt: those tokens, if the request asks for them.
    """

    message: Message
    sample: Sample
    finish: Literal["stop", "length", "tool_calls"]
    stop_string: str | None = None
    prompt_tokens: int = 0
    prompt: list[int] | None = None


@dataclass(slots=True)
class Attempt:
    """One attempt that an outside agent makes through the gateway.

    Attributes:
        id: what names it in URLs and headers; that of the rollout, if nothing else was said.
        key: what the agent's client sends as its API key.
        recording: where its calls are kept.
        params: how its tokens are sampled, whatever its agent asks for; None: as it asks.
        token_budget: most tokens that may be sampled; None for no limit.
        deadline: on `time.monotonic()`'s clock, for all of its calls.
        clock: the run's monotonic clock.
        allow_constrained: whether its calls may be sampled within a grammar although `params` say how to sample.
        failure: the first failure of the system that one of its calls met.
        frozen: it is over: nothing is recorded any more.
        retries: requests that were recognised as repeated.
    """

    id: str
    key: str
    recording: Recording
    params: SamplingParams | None
    token_budget: int | None
    deadline: float | None
    clock: Callable[[], float]
    allow_constrained: bool = False
    failure: AttemptError | None = None
    frozen: bool = False
    retries: int = 0
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    _reserved: int = 0
    _running: set[asyncio.Task[Any]] = field(default_factory=set)
    _asked: dict[Hashable, asyncio.Future[list[Answer]]] = field(default_factory=dict)
    _siblings: dict[bytes, int] = field(default_factory=dict)

    @property
    def rollout(self) -> Rollout:
        """What was recorded so far."""
        return self.recording.rollout

    def check_open(self) -> None:
        """Raises RequestError if it is over or the system failed it."""
        if self.frozen:
            raise RequestError(
                "This attempt is over; nothing is sampled for it any more.", status=409, code="attempt_over"
            )
        if self.failure is not None:
            raise RequestError(
                f"The system failed this attempt ({self.failure.reason}).", status=409, code="attempt_failed"
            )

    def reserve(self, wanted: int) -> int:
        """How many tokens a call may sample; they count as spent until `settle`.

        Raises:
            RequestError: the budget is spent.
        """
        if self.token_budget is None:
            return wanted
        left = self.token_budget - self.rollout.sampled_tokens - self._reserved
        if left < 1:
            raise RequestError(
                f"The attempt's budget of {self.token_budget} sampled tokens is spent.", code="token_budget_exceeded"
            )
        granted = min(wanted, left)
        self._reserved += granted
        return granted

    def settle(self, granted: int) -> None:
        """Give a reservation back; what was sampled is counted by the recording."""
        if self.token_budget is not None:
            self._reserved -= granted

    def sibling(self, digest: bytes) -> int:
        """How often the same was asked before: the seed of a call depends on what it reads, and on this number."""
        number = self._siblings.get(digest, 0)
        self._siblings[digest] = number + 1
        return number

    async def once(
        self, asked: Hashable, mark: RetryMark, answer: Callable[[], Coroutine[Any, Any, list[Answer]]]
    ) -> list[Answer]:
        """Answer a request, or give the answer of the request that it repeats.

        Args:
            asked: equal for requests that ask for the same.
            mark: what its client says about it.
            answer: answers it.
        """
        name = asked if mark.key is None else mark.key
        if mark.may_repeat and (known := await self._answered_before(name)) is not None:
            return known
        task = asyncio.current_task()
        assert task is not None  # a coroutine runs in a task
        promise: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._asked.pop(name, None)
        self._asked[name] = promise
        if len(self._asked) > _REMEMBERED:
            del self._asked[next(iter(self._asked))]
        self._running.add(task)
        try:
            answers = await answer()
            promise.set_result(answers)
            return answers
        finally:
            self._running.discard(task)
            promise.cancel()  # unless it was kept

    async def _answered_before(self, name: Hashable) -> list[Answer] | None:
        """The answers of the request of this name, if there is one and whoever sent it first did not give up."""
        known = self._asked.get(name)
        if known is None or known.cancelled():
            return None
        self.retries += 1
        await asyncio.wait([known])
        return None if known.cancelled() else known.result()

    def fail(self, error: AttemptError) -> None:
        """The system failed one of its calls: the attempt can't be scored."""
        if self.failure is None and not self.frozen:
            self.failure = error
            self.failed.set()

    def freeze(self) -> Rollout:
        """End it: from here on nothing is added to its rollout. Calls in flight end, and leave no token behind."""
        self.frozen = True
        for task in self._running:
            task.cancel()
        self._asked.clear()
        return self.rollout


class Attempts:
    """The attempts that are open, and how a call finds its own."""

    def __init__(self) -> None:
        self._by_id: dict[str, Attempt] = {}
        self._by_key: dict[bytes, Attempt] = {}
        self._by_session: dict[str, Attempt] = {}
        self._sessions: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_id.values()))

    def open(
        self,
        rollout: Rollout,
        renderer: Renderer,
        *,
        name: str | None = None,
        params: SamplingParams | None = None,
        token_budget: int | None = None,
        deadline: float | None = None,
        sessions: tuple[str, ...] = (),
        dropped_reasoning: Literal["fork", "keep"] = "fork",
        allow_constrained: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> Attempt:
        """Open an attempt and mint its key.

        Args:
            rollout: what is recorded into.
            renderer: of the model.
            name: the attempt's id; the rollout's if None.
            params, token_budget, deadline, allow_constrained, clock: see `Attempt`.
            sessions: session ids by which a client that can't be given the key will name it.
            dropped_reasoning: see `Recording`.

        Raises:
            RequestError: there is one of this name, or a session is taken.
        """
        identity = rollout.id if name is None else name
        if identity in self._by_id or any(session in self._by_session for session in sessions):
            raise RequestError(f"The attempt {identity!r} is open already.", status=409, code="attempt_exists")
        recording = Recording(rollout, renderer, dropped_reasoning=dropped_reasoning)
        key = _KEY_PREFIX + secrets.token_urlsafe(24)
        attempt = Attempt(identity, key, recording, params, token_budget, deadline, clock, allow_constrained)
        self._by_id[identity] = attempt
        self._by_key[_digest(key)] = attempt
        self._by_session |= dict.fromkeys(sessions, attempt)
        self._sessions[identity] = list(sessions)
        return attempt

    def get(self, identity: str) -> Attempt:
        """The attempt of this id. Raises RequestError if none is open."""
        try:
            return self._by_id[identity]
        except KeyError:
            raise RequestError(f"No attempt {identity!r} is open.", status=404, code="attempt_unknown") from None

    def close(self, attempt: Attempt) -> None:
        """Forget an attempt; its key opens nothing any more."""
        attempt.freeze()
        if self._by_id.pop(attempt.id, None) is not None:
            del self._by_key[_digest(attempt.key)]
            for session in self._sessions.pop(attempt.id):
                del self._by_session[session]

    def of_key(self, key: str | None) -> Attempt | None:
        """The attempt that a key was minted for."""
        return self._by_key.get(_digest(key)) if key and key.startswith(_KEY_PREFIX) else None

    def of_call(self, key: str | None, prefix: str | None, headers: Mapping[str, str]) -> Attempt | None:
        """The attempt that a call belongs to; None if nothing names one.

        Args:
            key: the client's API key.
            prefix: the id in the URL.
            headers: of the request, with names in lower case.

        Raises:
            RequestError: what names it names one that isn't open, or two different ones.
        """
        minted = self.of_key(key)
        if minted is None and key and key.startswith(_KEY_PREFIX):
            raise RequestError("This key belongs to no attempt that is open.", status=401, code="invalid_api_key")
        named = prefix if prefix is not None else headers.get(ATTEMPT_HEADER)
        if minted is not None:
            if named is not None and named != minted.id:
                raise RequestError(f"This key does not open the attempt {named!r}.", status=403, code="wrong_attempt")
            return minted
        if named is not None:
            return self.get(named)
        for header in SESSION_HEADERS:
            session = headers.get(header)
            if session is not None and session in self._by_session:
                return self._by_session[session]
        return None


def _digest(key: str) -> bytes:
    # Looked up by digest, so that how long a look-up takes says nothing about the keys.
    return hashlib.blake2b(key.encode(), digest_size=16).digest()
