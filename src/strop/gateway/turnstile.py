"""Keeps the event loop turning when thousands of calls are ready at the same moment: only so many go on in one pass.
Nobody is turned away, and whoever came first goes first.
"""

from __future__ import annotations

import asyncio
from collections import deque

_WIDTH = 8  # calls in one pass of the event loop; each works for about half a millisecond before it waits again


class Turnstile:
    """Lets a few through in each pass of the event loop.

    Args:
        width: how many.
    """

    def __init__(self, width: int = _WIDTH) -> None:
        self._width = self._free = width
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def enter(self) -> None:
        """Go on, in this pass or a later one."""
        if self._free and not self._waiting:
            self._free -= 1
            self._schedule()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next_pass)

    def _next_pass(self) -> None:
        self._scheduled = False
        self._free = self._width
        while self._waiting and self._free:
            turn = self._waiting.popleft()
            if not turn.done():  # whoever was cancelled needs no place
                turn.set_result(None)
                self._free -= 1
        if self._free < self._width:
            self._schedule()
