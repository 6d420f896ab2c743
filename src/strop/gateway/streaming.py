"""What of a reply may leave before it is complete: whole characters, and nothing that could still turn out to be a tool
call or a stop string. What the reply says in the end is decided elsewhere; this never says anything that it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from strop.rollouts import Message

_NOT_WHOLE = "\ufffd"  # what decoders give for bytes that are no character, or not yet


class Listener(Protocol):
    """Whoever wants to hear of a request's replies while they are sampled. Called in the event loop, and never late."""

    def started(self, prompt: list[int]) -> None:
        """The first token of a first reply was sampled.

        Args:
            prompt: the tokens that were read.
        """
        ...

    def said(self, reply: int, text: str) -> None:
        """A reply goes on.

        Args:
            reply: its number, from 0.
            text: what follows its content so far.
        """
        ...


class ReplyText:
    """The content of one reply, from its tokens as they come.

    Args:
        decode: text of tokens.
        ends: tokens that end a reply; they say nothing.
        markers: texts that end what can be told before the reply is complete: the start of a tool call, stop strings.
        trimmed: whether white space around the content may still be dropped, so that the last of it waits.
        say: told the content, piece by piece.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        ends: Collection[int],
        markers: Collection[str],
        trimmed: bool,
        say: Callable[[str], None],
    ) -> None:
        self._decode, self._ends, self._markers, self._trimmed, self._say = decode, ends, markers, trimmed, say
        self._tokens: list[int] = []
        self._from, self._read = 0, 0  # tokens before `_from` need no second look, those before `_read` were decoded
        self._held = ""
        self._open = True
        self._told = ""

    def add(self, tokens: Sequence[int]) -> None:
        """Hear tokens that were sampled."""
        if not self._open:
            return
        for token in tokens:
            if token in self._ends:
                self._open = False
                break
            self._tokens.append(token)
        # Decoded behind the piece before, since what a token says can depend on the one before it.
        before = self._decode(self._tokens[self._from : self._read])
        text = self._decode(self._tokens[self._from :])
        if text.endswith(_NOT_WHOLE) or len(text) <= len(before):
            return
        self._from, self._read = self._read, len(self._tokens)
        self._tell(text[len(before) :])

    def finish(self, message: Message) -> None:
        """Bring the complete reply in line with what was told of it: white space that was told stays in front.

        Raises:
            RuntimeError: it does not begin as it was told, which is a bug of the renderer.
        """
        if not message["content"].startswith(self._told):
            message["content"] = self._told[: len(self._told) - len(self._told.lstrip())] + message["content"]
        if not message["content"].startswith(self._told):
            raise RuntimeError(f"a streamed reply began {self._told!r}, but reads {message['content']!r}")

    def _tell(self, text: str) -> None:
        held = self._held + text
        found = [at for marker in self._markers if (at := held.find(marker)) >= 0]
        if found:
            self._open = False
            held = held[: min(found)]
        end = len(held) if found else len(held) - _begun(held, self._markers)
        if self._trimmed:
            end = len(held[:end].rstrip())
        self._held = held[end:]
        if end:
            self._told += held[:end]
            self._say(held[:end])


def _begun(text: str, markers: Collection[str]) -> int:
    """Length of the longest end of `text` that one of the markers begins with."""
    longest = min(len(text), max((len(marker) - 1 for marker in markers), default=0))
    return next((n for n in range(longest, 0, -1) if any(marker.startswith(text[-n:]) for marker in markers)), 0)
