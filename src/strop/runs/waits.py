"""What is being waited for: one list, each wait with a reason, a start and a deadline. Nothing waits outside it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from strop.errors import StallError


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait. `since` and `until` are on `time.monotonic()`'s clock; `detail` says more when it is asked."""

    what: str
    since: float
    until: float
    detail: Callable[[], str] | None = None

    def sentence(self, now: float) -> str:
        """For people: "attempts of step 3, for 12 s, until in 288 s (5 of 64 finished)"."""
        more = f" ({self.detail()})" if self.detail else ""
        return f"{self.what}, for {now - self.since:.0f} s, deadline in {self.until - now:.0f} s{more}"


class Waits:
    """The list of waits of a run."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Wait]:
        return iter(sorted(self._waits.values(), key=lambda wait: wait.since))

    @asynccontextmanager
    async def on(self, what: str, seconds: float, detail: Callable[[], str] | None = None) -> AsyncIterator[None]:
        """Wait for what the block awaits, at most so long.

        Raises:
            StallError: the deadline passed. Names this wait and every other one.
        """
        number, now = next(self._numbers), time.monotonic()
        self._waits[number] = Wait(what, now, now + seconds, detail)
        try:
            async with asyncio.timeout(seconds) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise StallError(f"Nothing came within {seconds:.0f} s. Waiting for:\n{self.describe()}") from None
        finally:
            del self._waits[number]

    def describe(self) -> str:
        """All waits, the oldest first, a line each."""
        now = time.monotonic()
        return "\n".join(f"  - {wait.sentence(now)}" for wait in self) or "  - nothing"
