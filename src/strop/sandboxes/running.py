"""One running command: its pipes, what is kept of its output, its deadline. Knows nothing of how it was started.

Used by every implementation that runs on this machine.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import deque
from collections.abc import Callable
from typing import Literal

from strop.sandboxes.multiplexer import WRITE, Multiplexer
from strop.sandboxes.sandbox import Chunk, ExecResult

_PIECE = 65536
#: How long output is awaited after the main process has ended, while something else holds the pipe: seconds without
#: a byte, and in all.
DRAIN_IDLE, DRAIN_TOTAL = 0.1, 1.0
#: Chunks that a slow reader may leave waiting before the command is made to wait.
_BACKLOG = 64
#: Seconds before the output of a command that nobody reads meanwhile is looked at. Most commands end sooner, and then
#: their pipes are read once, without having been watched: the fewer times the loop wakes, the less a command costs.
_PATIENCE = 0.02


class Capture:
    """Keeps the first and the last bytes of a stream and counts all of them. Memory is bounded by `most`."""

    __slots__ = ("_head", "_head_room", "_tail", "_tail_room", "_tail_size", "total")

    def __init__(self, most: int) -> None:
        self.total = 0
        self._head_room = most - most // 2
        self._tail_room = most // 2
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_size = 0

    def feed(self, data: bytes) -> None:
        """Add bytes."""
        self.total += len(data)
        if self._head_room:
            self._head.append(data[: self._head_room])
            taken = len(self._head[-1])
            self._head_room -= taken
            data = data[taken:]
            if not data:
                return
        self._tail.append(data)
        self._tail_size += len(data)
        while self._tail_size - len(self._tail[0]) >= self._tail_room:
            self._tail_size -= len(self._tail.popleft())

    def content(self) -> bytes:
        """What was kept: everything, or head and tail."""
        tail = b"".join(self._tail)
        return b"".join(self._head) + (tail[len(tail) - self._tail_room :] if len(tail) > self._tail_room else tail)


class Running:
    """A command from its start to its result. `result` is a future of the ExecResult.

    Args:
        multiplexer: of the running loop.
        most: bytes kept of each stream.
        forward: output goes to a reader by `next_chunk`, and is not kept.
        sink: output goes to this function, and is not kept.
        patient: the output is likely to fit into its pipe, so it need not be looked at at once.
    """

    def __init__(
        self,
        multiplexer: Multiplexer,
        most: int,
        forward: bool = False,
        sink: Callable[[str, bytes], None] | None = None,
        patient: bool = False,
    ) -> None:
        self._multiplexer = multiplexer
        self._loop = asyncio.get_running_loop()
        self.result: asyncio.Future[ExecResult] = self._loop.create_future()
        self.started = self._loop.time()
        self.timed_out = False
        self.oom_kills_before = 0
        self._timer: asyncio.TimerHandle | None = None
        self._captured = not forward and sink is None
        self._watched = not (self._captured and patient)
        self._captures = {"stdout": Capture(most), "stderr": Capture(most)}
        self._open: dict[int, Literal["stdout", "stderr"]] = {}
        self._ended: Callable[..., ExecResult] | None = None  # the result but for its output
        self._last_byte = 0.0
        self._stdin = -1
        self._pending = memoryview(b"")
        self._close_after = False
        self._drained: asyncio.Event | None = None
        self._paused = False
        self._sink = sink
        #: Chunks for a reader that wants them as they come; None where the result alone is wanted.
        self.chunks: deque[Chunk] | None = deque() if forward else None
        self.news = asyncio.Event() if forward else None

    # ---- output ----

    def open_output(self, name: Literal["stdout", "stderr"]) -> int:
        """Make the pipe of a stream; returns the end for the command, which the caller closes after handing it on."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reading, False)
        self._open[reading] = name
        if self._watched:
            self._multiplexer.watch(reading, functools.partial(self._readable, reading))
        return writing

    def begin(self, timeout: float | None, expire: Callable[[], None]) -> None:
        """It is being started: call `expire` once `timeout` seconds are over, and look at its output before that."""
        if self._watched or (timeout is not None and timeout <= _PATIENCE):
            self.call_after(timeout, expire)
        else:
            self.call_after(_PATIENCE, self._watch, None if timeout is None else timeout - _PATIENCE, expire)

    def call_after(self, seconds: float | None, work: Callable[..., None], *arguments: object) -> None:
        """Call something if it has not ended by then, in place of what was to be called until now."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, work, *arguments)

    def _watch(self, timeout: float | None, expire: Callable[[], None]) -> None:
        self._watch_output()
        self.call_after(timeout, expire)

    def _watch_output(self) -> None:
        if not self._watched:
            self._watched = True
            for fd in self._open:
                self._multiplexer.watch(fd, functools.partial(self._readable, fd))

    def _readable(self, fd: int) -> None:
        try:
            data = os.read(fd, _PIECE)
        except BlockingIOError:
            return
        if not data:
            self._close_output(fd)
            if not self._open and self._ended is not None:
                self._finish()
            return
        self._take(self._open[fd], data)
        if self._ended is not None:
            self._last_byte = self._loop.time()

    def _take(self, name: Literal["stdout", "stderr"], data: bytes) -> None:
        if self._captured:
            self._captures[name].feed(data)
            return
        self._captures[name].total += len(data)
        if self._sink is not None:
            self._sink(name, data)
        else:
            self._forward(name, data)

    def _forward(self, name: Literal["stdout", "stderr"], data: bytes) -> None:
        assert self.chunks is not None and self.news is not None
        self.chunks.append(Chunk(name, data))
        self.news.set()
        if len(self.chunks) >= _BACKLOG and not self._paused:
            self._paused = True
            for fd in self._open:
                self._multiplexer.pause(fd)

    async def next_chunk(self) -> Chunk | None:
        """The next piece of output; None at the end. Only for a command started with `forward`."""
        assert self.chunks is not None and self.news is not None
        while not self.chunks:
            if self.result.done():
                return None
            self.news.clear()
            await self.news.wait()
        chunk = self.chunks.popleft()
        if self._paused and len(self.chunks) < _BACKLOG // 2:
            self._paused = False
            for fd in self._open:
                self._multiplexer.resume(fd)
        return chunk

    def _close_output(self, fd: int) -> None:
        del self._open[fd]
        self._multiplexer.forget(fd)
        os.close(fd)

    # ---- input ----

    def open_input(self, data: bytes | None) -> int:
        """Make the pipe of standard input, with `data` as all of it, or None to write later; returns the other end."""
        reading, self._stdin = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._stdin, False)
        self._multiplexer.watch(self._stdin, self._writable, 0)
        if data is not None:
            self._close_after = True
            self._pending = memoryview(data)
            self._writable()
        return reading

    def _writable(self) -> None:
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._stdin, self._pending[: 1 << 20]) :]
        except BlockingIOError:
            self._multiplexer.resume(self._stdin, WRITE)
            return
        except OSError:  # it does not read any more
            self._pending = memoryview(b"")
            self._close_after = True
        if self._close_after:
            self._close_input()
        else:
            self._multiplexer.pause(self._stdin)
        if self._drained is not None:
            self._drained.set()

    def _close_input(self) -> None:
        if self._stdin >= 0:
            self._multiplexer.forget(self._stdin)
            os.close(self._stdin)
            self._stdin = -1
        if self._drained is not None:
            self._drained.set()

    async def write(self, data: bytes) -> None:
        """Write to standard input and wait until the pipe has taken it; dropped if nobody reads any more."""
        while self._stdin >= 0 and self._pending:
            self._drained = asyncio.Event()
            await self._drained.wait()
        if self._stdin < 0:
            return
        self._pending = memoryview(data)
        self._drained = asyncio.Event()
        self._writable()
        await self._drained.wait() if self._pending else None

    async def close_stdin(self) -> None:
        """Close standard input once everything is written."""
        self._close_after = True
        if not self._pending:
            self._close_input()

    # ---- the end ----

    def end(self, exit_code: int, signal: int | None, oom_kills: int, cpu: float, peak: int, error: str | None) -> None:
        """The main process is gone: take what is still in the pipes, wait a little if others hold them, finish."""
        self._ended = functools.partial(
            ExecResult, exit_code=exit_code, signal=signal, timed_out=self.timed_out, oom_kills=oom_kills, cpu=cpu,
            peak_memory=peak, error=error, wall=self._loop.time() - self.started,
        )  # fmt: skip
        if self._timer is not None:
            self._timer.cancel()
        if self._paused:
            self._paused = False
            for fd in self._open:
                self._multiplexer.resume(fd)
        self.drain()
        if not self._open:
            self._finish()
        elif not self.result.done():
            self._watch_output()
            self._last_byte = self._loop.time()
            self.call_after(DRAIN_IDLE, self._check_drain, self._last_byte)

    def drain(self) -> None:
        """Take what is in the pipes now."""
        for fd in list(self._open):
            self._drain(fd)

    def _drain(self, fd: int) -> None:
        """Read what is there now, without going back to the loop for each piece."""
        name = self._open[fd]
        for _ in range(64):
            try:
                data = os.read(fd, _PIECE)
            except BlockingIOError:
                return
            if not data:
                self._close_output(fd)
                return
            self._take(name, data)

    def _check_drain(self, since: float) -> None:
        now = self._loop.time()
        if now - self._last_byte < DRAIN_IDLE and now - since < DRAIN_TOTAL:
            self.call_after(DRAIN_IDLE - (now - self._last_byte), self._check_drain, since)
        else:
            self._finish()

    def _finish(self) -> None:
        self.release()
        if self.result.done() or self._ended is None:
            return
        out, err = self._captures["stdout"], self._captures["stderr"]
        stdout, stderr = out.content(), err.content()
        kept = not self._captured or (len(stdout) == out.total and len(stderr) == err.total)
        self.result.set_result(
            self._ended(
                stdout=stdout, stderr=stderr, truncated=not kept, stdout_bytes=out.total, stderr_bytes=err.total
            )
        )
        if self.news is not None:
            self.news.set()

    def fail(self, error: Exception) -> None:
        """The place broke before the command ended."""
        self.release()
        if not self.result.done():
            self.result.set_exception(error)
            self.result.exception()  # a stream's reader may have gone: not an unretrieved error then
        if self.news is not None:
            self.news.set()

    def release(self) -> None:
        """Close everything that is still open."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in list(self._open):
            self._close_output(fd)
        self._pending = memoryview(b"")
        self._close_input()
