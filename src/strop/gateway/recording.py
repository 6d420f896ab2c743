"""Token-exact recording of one attempt whose agent speaks HTTP and sends its whole history with every call.

A call that goes on from a reply sampled here extends the stored token ids; text is never encoded again. A call that
fits no reply opens a new root. Pure data: who a call belongs to is `attempts`' business, sampling it `engine`'s.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from strop.gateway.errors import RequestError
from strop.gateway.messages import message_key, tools_key, without_reasoning
from strop.rollouts import Message, ModelCall, Rollout, ToolSpec
from strop.sampling.conversation import tokens_added
from strop.sampling.sampler import Sample

if TYPE_CHECKING:  # the renderers package takes a second to import
    from renderers.base import Renderer


@dataclass(slots=True)
class _Point:
    """A point in a conversation: what was said up to here is the path from the root of its tree."""

    next: dict[Hashable, _Point] = field(default_factory=dict)
    call: int | None = None  # the call whose reply ends here


@dataclass(frozen=True, slots=True)
class Place:
    """Where a call that is about to be sampled belongs.

    Attributes:
        parent: index of the call that it extends; None at a root.
        prompt: the prompt tokens that are new.
        digest: of everything before the tokens to be sampled: two calls have the same if they ask for the same.
        messages: what is new since the parent; empty for a prompt of token ids.
        point: where the messages lead; None for a prompt of token ids.
    """

    parent: int | None
    prompt: list[int]
    digest: bytes
    messages: tuple[Message, ...] = ()
    point: _Point | None = None


class Recording:
    """Records model calls into a rollout: a graph in which every sampled token stands once.

    The cost of a call is that of its new tokens, and of comparing its messages with those of the call before it.

    Args:
        rollout: what is recorded into.
        renderer: between messages and tokens.
        dropped_reasoning: what it means if a reply comes back without its reasoning. "fork": the agent rewrote its
            history, and a new root is opened. "keep": its client has no place for reasoning, and the tokens that
            were sampled stay.
    """

    def __init__(
        self, rollout: Rollout, renderer: Renderer, *, dropped_reasoning: Literal["fork", "keep"] = "fork"
    ) -> None:
        self.rollout, self.renderer = rollout, renderer
        self._keep_reasoning = dropped_reasoning == "keep"
        self._trees: dict[bytes, _Point] = {}  # by what the tools are
        self._walked: tuple[list[Message], list[_Point]] = ([], [])  # the conversation placed last, and its points
        self._tools_walked = b""
        self._digests: list[bytes] = []  # of each call, its sampled tokens included
        self._children: dict[int | None, list[int]] = {None: []}
        self._roots: set[bytes] = set()
        self._said_last: int | None = None  # the call that the transcript ends with

    def place(self, messages: list[Message], tools: list[ToolSpec], opening: Sequence[int] = ()) -> Place:
        """Find where a conversation goes on.

        Args:
            messages: the whole conversation in the form of `messages.plain_message`, its last one not the model's.
            tools: what the model may call, in the form of `messages.plain_tool`.
            opening: tokens that the reply has to begin with; they are read, not sampled.

        Raises:
            RequestError: there is nothing to reply to, or the model's renderer can't read it.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise RequestError(
                "messages: the last one must be of the user or a tool; a reply that is begun by the caller can't be "
                "recorded as the model's",
                parameter="messages",
            )
        path = self._path(messages, tools_key(tools))
        point = path[-1]
        parent, since = None, 0
        for number, passed in enumerate(path, 1):
            if passed.call is not None:
                parent, since = passed.call, number
        new = messages[since:]
        added = self._added(parent, new, tools) if parent is not None else None
        if added is None:
            parent, new = None, messages
            try:
                added = list(self.renderer.render_ids(messages, tools=tools or None, add_generation_prompt=True))
            except (ValueError, TypeError, KeyError) as error:  # what renderers raise at messages they can't write
                raise RequestError(f"messages: the model can't read them: {error}", parameter="messages") from error
        added += opening
        return Place(parent, added, self._digest(parent, added), tuple(new), point)

    def _path(self, messages: list[Message], tools: bytes) -> list[_Point]:
        """The point after each message. What the call before said in the same words is neither hashed nor searched."""
        begun, known = self._walked if self._tools_walked == tools else ([], [])
        same = next(
            (n for n, (old, new) in enumerate(zip(begun, messages, strict=False)) if old != new),
            min(len(begun), len(messages)),
        )
        path = known[:same]
        point = path[-1] if path else self._trees.setdefault(tools, _Point())
        for message in messages[same:]:
            key = message_key(message)
            if (after := point.next.get(key)) is None:
                after = point.next[key] = _Point()
            point = after
            path.append(point)
        self._walked, self._tools_walked = (messages, path), tools
        return path

    def place_tokens(self, prompt: Sequence[int]) -> Place:
        """Find where a prompt of token ids goes on: after the longest branch that it begins with."""
        parent, at = None, 0
        while (child := self._child_in(parent, prompt, at)) is not None:
            call = self.rollout.calls[child]
            parent, at = child, at + len(call.prompt) + len(call.tokens)
        added = list(prompt[at:])
        return Place(parent, added, self._digest(parent, added))

    def tokens(self, place: Place) -> list[int]:
        """The whole prompt of a call."""
        return place.prompt if place.parent is None else [*self.rollout.branch_tokens(place.parent), *place.prompt]

    def add(
        self, place: Place, sample: Sample, reply: Message, started: float, ended: float, *, constrained: bool = False
    ) -> int:
        """Record what was sampled at a place.

        Args:
            place: from `place` or `place_tokens`.
            sample: its tokens are kept as they are.
            reply: the assistant's message as the agent gets it, and as it will be known again.
            started, ended: seconds on the run's monotonic clock.
            constrained: whether it was sampled within a grammar.

        Returns:
            the index of the call in the rollout.
        """
        calls = self.rollout.calls
        call = ModelCall(
            parent=place.parent,
            prompt=place.prompt,
            tokens=sample.tokens,
            logprobs=sample.logprobs,
            versions=sample.versions,
            finish_reason=sample.finish_reason,
            cached=sample.cached,
            started=started,
            ended=ended,
            constrained=constrained,
            experts=sample.experts and sample.experts.last(len(place.prompt) + len(sample.tokens)),
        )
        index = len(calls)
        if place.parent is None:
            if calls and place.digest not in self._roots:
                self.rollout.forks += 1
            self._roots.add(place.digest)
        calls.append(call)
        self._digests.append(_hash(place.digest, sample.tokens))
        self._children.setdefault(place.parent, []).append(index)
        if place.point is not None:
            self._remember(place.point, reply, index)
        self._say(place, reply, index)
        return index

    def _remember(self, point: _Point, reply: Message, index: int) -> None:
        """Make the reply known, should it come back. Two that say the same are one: either's tokens are true."""
        keys = [message_key(reply)]
        if self._keep_reasoning and "reasoning_content" in reply:
            keys.append(message_key(without_reasoning(reply)))
        for key in keys:
            here = point.next.setdefault(key, _Point())
            if here.call is None:
                here.call = index

    def _added(self, parent: int, new: list[Message], tools: list[ToolSpec]) -> list[int] | None:
        """The tokens that follow a reply; None if its branch can't be extended by `new`."""
        if any(message["role"] == "assistant" for message in new):  # words that the model never said here
            return None
        last = self.rollout.calls[parent]

        def before() -> list[int]:
            whole = self.rollout.branch_tokens(parent)
            return whole[: len(whole) - len(last.tokens)]

        return tokens_added(self.renderer, last, before, new, tools or None)

    def _child_in(self, parent: int | None, prompt: Sequence[int], at: int) -> int | None:
        """The call after `parent` whose tokens stand in `prompt` from `at` on, with something left to read."""
        for index in self._children.get(parent, ()):
            call = self.rollout.calls[index]
            middle = at + len(call.prompt)
            end = middle + len(call.tokens)
            if end < len(prompt) and prompt[at:middle] == call.prompt and prompt[middle:end] == call.tokens:
                return index
        return None

    def _digest(self, parent: int | None, added: Sequence[int]) -> bytes:
        return _hash(b"" if parent is None else self._digests[parent], added)

    def _say(self, place: Place, reply: Message, index: int) -> None:
        """Keep the transcript readable from top to bottom, whatever order the branches grow in."""
        transcript = self.rollout.transcript
        if index and place.parent != self._said_last:
            began = "a new conversation" if place.parent is None else f"from call {place.parent} on"
            transcript.append({"role": "note", "content": f"Call {index} goes another way: {began}."})
        transcript += place.messages
        transcript.append(reply)
        self._said_last = index


def _hash(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.blake2b(array("q", tokens).tobytes(), key=before[:32], digest_size=16).digest()
