"""One epoll for all sandboxes of an event loop, nested in the loop's own.

A command has three or four descriptors and lives for a millisecond; registering each with asyncio costs more than
everything else that the host does for it. Here registering is one system call and closing needs none.
"""

from __future__ import annotations

import asyncio
import select
import weakref
from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT

_per_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Multiplexer] = weakref.WeakKeyDictionary()


class Multiplexer:
    """Calls handlers when descriptors are ready. Use `Multiplexer.current()`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._loop = loop
        loop.add_reader(self._epoll.fileno(), self._dispatch)

    @classmethod
    def current(cls) -> Multiplexer:
        """The multiplexer of the running loop."""
        loop = asyncio.get_running_loop()
        found = _per_loop.get(loop)
        if found is None or found._epoll.closed:
            found = _per_loop[loop] = cls(loop)
        return found

    def watch(self, fd: int, handler: Callable[[], None], events: int = READ) -> None:
        """Call `handler` whenever `fd` is ready, until `forget`."""
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def pause(self, fd: int) -> None:
        """Stop calling, but remember the handler."""
        self._epoll.modify(fd, 0)

    def resume(self, fd: int, events: int = READ) -> None:
        """Call again."""
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching a descriptor that will be closed now: closing takes it out of the epoll."""
        self._handlers.pop(fd, None)

    def release(self) -> None:
        """Close the epoll if nothing is watched any more; the next use makes a new one."""
        if not self._handlers and not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _dispatch(self) -> None:
        for fd, _ in self._epoll.poll(0, 256):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
