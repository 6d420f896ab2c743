"""A pool that several users share and that ends with the last of them: for environments, which have no end of their own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from strop.sandboxes.images import Image
from strop.sandboxes.pool import LocalPool
from strop.sandboxes.sandbox import SandboxPool


class _Users:
    """The pool of one event loop and how many use it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.pool: SandboxPool | None = None
        self.count = 0


class SharedPool:
    """Opens a pool for its first user and closes it after its last; one for each event loop.

    Args:
        image: makes the root file system, when first needed; None where the pool has its own.
        make: makes the pool of it; a `LocalPool` if None.
        options: of the pool.
    """

    def __init__(
        self,
        image: Callable[[], Image] | None,
        make: Callable[..., SandboxPool] | None = None,
        **options: Any,
    ) -> None:
        chosen: Callable[..., SandboxPool] = make or LocalPool
        self._image, self._make, self._options = image, chosen, options
        self._users: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Users] = weakref.WeakKeyDictionary()

    async def acquire(self) -> SandboxPool:
        """The pool; every call needs one `release`.

        Raises:
            SandboxesUnavailable: this machine can't.
        """
        users = self._users.setdefault(asyncio.get_running_loop(), _Users())
        async with users.lock:
            if users.pool is None:
                image = None if self._image is None else await asyncio.to_thread(self._image)
                pool = self._make(image, **self._options)
                if isinstance(pool, LocalPool):
                    await pool.start()
                users.pool = pool
            users.count += 1
            return users.pool

    async def release(self) -> None:
        """Give it back."""
        users = self._users[asyncio.get_running_loop()]
        async with users.lock:
            users.count -= 1
            if users.count == 0 and users.pool is not None:
                pool, users.pool = users.pool, None
                await pool.close()

    async def __aenter__(self) -> SandboxPool:
        return await self.acquire()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()
