"""What is being waited for: one list, each wait with a reason, a start and a deadline. Nothing waits outside it.

Who waits ends its own wait where it can (`Waits.on`). Where it can't, because a thread is stuck or the event loop is
held up, the watchdog does: it looks at the list from a thread of its own and ends the process, resumable.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from strop.errors import StallError

#: How many waits `describe` lists: the oldest are those that matter.
LISTED = 12
#: Seconds after its deadline in which a wait may still end by itself; then the watchdog ends the process.
GRACE = 60.0
#: Exit status of a process that the watchdog ended: "temporary failure, try again" (sysexits.h).
STALLED = 75


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait.

    Attributes:
        what: for people: "a batch for rl step 3".
        since, until: on `time.monotonic()`'s clock.
        detail: says more when it is asked.
        watched: whether the watchdog ends the process when its deadline has passed. False where others see to that.
    """

    what: str
    since: float
    until: float
    detail: Callable[[], str] | None = None
    watched: bool = True

    def sentence(self, now: float) -> str:
        """For people: "attempts of step 3, for 12 s, deadline in 288 s (5 of 64 finished)"."""
        left = self.until - now
        deadline = f"deadline in {left:.0f} s" if left >= 0 else f"{-left:.0f} s past its deadline"
        more = f" ({self.detail()})" if self.detail else ""
        return f"{self.what}, for {now - self.since:.0f} s, {deadline}{more}"


class Waits:
    """The list of waits of a run. Any thread may use it."""

    def __init__(self) -> None:
        self._waits: dict[int, Wait] = {}
        self._numbers = itertools.count()

    def __iter__(self) -> Iterator[Wait]:
        return iter(sorted(self._waits.values(), key=lambda wait: wait.since))

    @contextmanager
    def during(
        self, what: str, seconds: float, detail: Callable[[], str] | None = None, *, watched: bool = True
    ) -> Iterator[None]:
        """List what the block does, for at most so long: work that can't be cancelled from within this thread."""
        number = self.begin(what, seconds, detail, watched=watched)
        try:
            yield
        finally:
            self._waits.pop(number, None)

    def begin(self, what: str, seconds: float, detail: Callable[[], str] | None = None, *, watched: bool = True) -> int:
        """List a wait that lasts until the process ends (its way out), or until `during` ends it."""
        number, now = next(self._numbers), time.monotonic()
        self._waits[number] = Wait(what, now, now + seconds, detail, watched)
        return number

    @asynccontextmanager
    async def on(self, what: str, seconds: float, detail: Callable[[], str] | None = None) -> AsyncIterator[None]:
        """Wait for what the block awaits, at most so long.

        Raises:
            StallError: the deadline passed. Names this wait and every other one.
        """
        with self.during(what, seconds, detail):
            try:
                async with asyncio.timeout(seconds) as timeout:
                    yield
            except TimeoutError:
                if not timeout.expired():
                    raise
                raise StallError(self.stalled(what, seconds)) from None

    def stalled(self, what: str, seconds: float) -> str:
        """What a stall says: the wait that passed its deadline, and all others."""
        return f"{what} did not come within {seconds:g} s. Waiting for:\n{self.describe()}\nThe run can be resumed."

    def describe(self) -> str:
        """The waits, the oldest first, a line each."""
        now, waits = time.monotonic(), list(self)
        lines = [f"  - {wait.sentence(now)}" for wait in waits[:LISTED]]
        if len(waits) > LISTED:
            lines.append(f"  - and {len(waits) - LISTED} younger ones")
        return "\n".join(lines) or "  - nothing"


class Watchdog:
    """A thread that looks at the waits: says when one has used half its time, ends the process when one is overdue.

    Args:
        waits: the list.
        warn: told about a wait that takes long.
        stop: told why, just before the process ends: the last event of the run's log.
        grace: seconds after a deadline in which whoever waits may still end it.
        every: seconds between looks.
        end: ends the process.
    """

    def __init__(
        self,
        waits: Waits,
        warn: Callable[[str], None],
        stop: Callable[[str], None],
        *,
        grace: float = GRACE,
        every: float = 1.0,
        end: Callable[[], None] = lambda: os._exit(STALLED),
    ) -> None:
        self._waits, self._warn, self._stop, self._grace, self._every, self._end = waits, warn, stop, grace, every, end
        self._said: set[Wait] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            now = time.monotonic()
            waits = [wait for wait in self._waits if wait.watched]
            self._said.intersection_update(waits)
            for wait in waits:
                if now > wait.until + self._grace:
                    self._end_process(wait)
                    return
                if wait not in self._said and now - wait.since > 0.5 * (wait.until - wait.since):
                    self._said.add(wait)
                    self._warn(f"Still waiting for {wait.sentence(now)}")

    def _end_process(self, wait: Wait) -> None:
        """Nobody ended the wait: its thread is stuck, or the event loop is. A kill loses nothing, so kill."""
        text = self._waits.stalled(wait.what, wait.until - wait.since)
        try:
            print(f"strop: {text}\nWhere every thread is:", file=sys.stderr, flush=True)  # noqa: T201  # the last word
            faulthandler.dump_traceback(all_threads=True)
            self._stop(text)
        finally:
            self._end()
