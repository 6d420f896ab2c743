"""The event loop that strop's programs run on: asyncio's own, with turns that are short whatever is ready at once."""

from __future__ import annotations

import asyncio
import selectors
from collections import deque
from typing import Any

#: Connections that are served in one pass of the loop.
AT_ONCE = 32


class _FewAtATime(selectors.DefaultSelector):
    """Hands out what is ready a few at a time.

    asyncio runs everything that a selector gives it before it looks at a timer again: with 2,000 agents whose requests
    come at the same moment, everybody else waits for all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: deque[tuple[selectors.SelectorKey, int]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors`."""
        if not self._left:
            self._left.extend(super().select(timeout))
        given: list[tuple[selectors.SelectorKey, int]] = []
        registered = self.get_map()
        while self._left and len(given) < AT_ONCE:
            key, events = self._left.popleft()
            # What was closed, or asked for something else, since it was found ready is looked at anew.
            if registered.get(key.fd) is key:
                given.append((key, events))
        return given


def new_event_loop() -> asyncio.AbstractEventLoop:
    """An event loop for `asyncio.Runner`."""
    return asyncio.SelectorEventLoop(_FewAtATime())


def run(work: Any) -> Any:
    """`asyncio.run` on such a loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)
