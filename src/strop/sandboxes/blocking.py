"""The same surface without async: a pool whose event loop runs in a thread of its own.

with BlockingPool(Image.host()) as pool, pool.create() as sandbox:
    print(sandbox.exec("echo hi").text)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from strop.sandboxes.errors import SandboxDead
from strop.sandboxes.images import Image
from strop.sandboxes.pool import LocalPool
from strop.sandboxes.sandbox import (
    CellResult,
    Chunk,
    Command,
    ExecResult,
    FileInfo,
    PythonSession,
    Sandbox,
    SandboxPool,
    ShellSession,
    Snapshot,
)

T = TypeVar("T")


class _Loop:
    """An event loop in a thread that lives as long as it: agents die with the thread that started their zygote."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sandboxes", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise SandboxDead("its pool is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class BlockingShell:
    """See `ShellSession`."""

    def __init__(self, loop: _Loop, shell: ShellSession) -> None:
        self._loop, self._shell = loop, shell

    def run(self, line: str, *, timeout: float | None = None) -> ExecResult:
        return self._loop.run(self._shell.run(line, timeout=timeout))

    def close(self) -> None:
        self._loop.run(self._shell.close())


class BlockingPython:
    """See `PythonSession`."""

    def __init__(self, loop: _Loop, cells: PythonSession) -> None:
        self._loop, self._cells = loop, cells

    def run(self, code: str, *, timeout: float | None = None, fork: bool = False) -> CellResult:
        return self._loop.run(self._cells.run(code, timeout=timeout, fork=fork))

    def close(self) -> None:
        self._loop.run(self._cells.close())


class BlockingSnapshot:
    """See `Snapshot`."""

    def __init__(self, loop: _Loop, snapshot: Snapshot) -> None:
        self._loop, self.inner = loop, snapshot

    def delete(self) -> None:
        self._loop.run(self.inner.delete())


class BlockingSandbox:
    """See `Sandbox`: the same methods and arguments. Leaving its `with` block destroys it."""

    def __init__(self, loop: _Loop, sandbox: Sandbox) -> None:
        self._loop, self.inner = loop, sandbox
        self.id, self.labels = sandbox.id, sandbox.labels

    def __enter__(self) -> BlockingSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def exec(self, command: Command, **options: Any) -> ExecResult:
        return self._loop.run(self.inner.exec(command, **options))

    def stream(self, command: Command, **options: Any) -> Iterator[Chunk | ExecResult]:
        pieces = self.inner.stream(command, **options)

        async def next_piece() -> Chunk | ExecResult | None:
            return await anext(pieces, None)

        while (piece := self._loop.run(next_piece())) is not None:
            yield piece

    def shell(self) -> BlockingShell:
        return BlockingShell(self._loop, self._loop.run(self.inner.shell()))

    def python(self, preload: Sequence[str] = ()) -> BlockingPython:
        return BlockingPython(self._loop, self._loop.run(self.inner.python(preload)))

    def get(self, path: str, **options: Any) -> bytes:
        return self._loop.run(self.inner.get(path, **options))

    def put(self, path: str, data: bytes, **options: Any) -> None:
        self._loop.run(self.inner.put(path, data, **options))

    def get_archive(self, path: str, **options: Any) -> bytes:
        return self._loop.run(self.inner.get_archive(path, **options))

    def put_archive(self, path: str, archive: bytes, **options: Any) -> None:
        self._loop.run(self.inner.put_archive(path, archive, **options))

    def list(self, path: str) -> Sequence[FileInfo]:
        return self._loop.run(self.inner.list(path))

    def snapshot(self) -> BlockingSnapshot:
        return BlockingSnapshot(self._loop, self._loop.run(self.inner.snapshot()))

    def fork(self, count: int) -> Sequence[BlockingSandbox]:
        return [BlockingSandbox(self._loop, child) for child in self._loop.run(self.inner.fork(count))]

    def pause(self) -> None:
        self._loop.run(self.inner.pause())

    def resume(self) -> None:
        self._loop.run(self.inner.resume())

    def destroy(self) -> None:
        self._loop.run(self.inner.destroy())


class BlockingPool:
    """See `SandboxPool`.

    Args:
        source: an image for this machine's own sandboxes, or a function that makes another pool; it is called in the
            loop's thread.
        options: arguments of `LocalPool`, if `source` is an image.
    """

    def __init__(self, source: Image | Callable[[], SandboxPool], **options: Any) -> None:
        self._loop = _Loop()

        async def make() -> SandboxPool:
            if not isinstance(source, Image):
                return source()
            pool = LocalPool(source, **options)
            await pool.start()
            return pool

        try:
            self.inner = self._loop.run(make())
        except BaseException:
            self._loop.stop()
            raise

    def __enter__(self) -> BlockingPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def create(
        self, *, snapshot: BlockingSnapshot | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> BlockingSandbox:
        inner = None if snapshot is None else snapshot.inner
        return BlockingSandbox(self._loop, self._loop.run(self.inner.create(snapshot=inner, env=env, **options)))

    def close(self) -> None:
        self._loop.run(self.inner.close())
        self._loop.stop()
