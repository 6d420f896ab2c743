"""Long-lived programs that answer one request after another: a persistent shell and Python cells.

Each has two pipes of its own beside its output, so that what a command prints is never mistaken for an answer. The
program at the other end belongs to the sandbox: its answers are bounded and only ever data.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.sandboxes.errors import SandboxFailure
from strop.sandboxes.multiplexer import Multiplexer
from strop.sandboxes.running import Capture
from strop.sandboxes.sandbox import CellResult, ExecResult

if TYPE_CHECKING:
    from strop.sandboxes.local import LocalProcess, LocalSandbox

_MAX_ANSWER = 1 << 20
#: Seconds that a session gets to answer after what it started was killed, before it is killed itself.
_COME_BACK = 0.5
_START_SECONDS = 60.0
_SHELL = r"""
while IFS= read -r -d '' -u 3 __line; do
  eval "$__line" 3<&- 4>&- </dev/null
  printf '%s\0%s\0' "$?" "$PWD" >&4
done
"""


class Channel:
    """One program, the pipe to it and the pipe from it. `complete` cuts an answer off a buffer, or says None."""

    def __init__(
        self, sandbox: LocalSandbox, command: Sequence[str], complete: Callable[[bytearray], bytes | None]
    ) -> None:
        self._sandbox, self._command, self._complete = sandbox, command, complete
        self._multiplexer = Multiplexer.current()
        self._process: LocalProcess | None = None
        self._to = self._from = -1
        self._buffer = bytearray()
        self._answer: asyncio.Future[tuple[bytes | None, bool]] | None = None  # and whether time was over
        self._outputs: dict[str, Capture] = {}

    @property
    def open(self) -> bool:
        """Whether the program runs."""
        return self._from >= 0

    async def start(self) -> None:
        """Start the program."""
        theirs_in, self._to = os.pipe2(os.O_CLOEXEC)
        self._from, theirs_out = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._from, False)
        os.set_blocking(self._to, False)
        self._buffer.clear()
        self._multiplexer.watch(self._from, self._readable)
        try:
            process = await self._sandbox.start(self._command, descriptors=(theirs_in, theirs_out), sink=self._take)
        except BaseException:
            self._shut()
            raise
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._process = process
        process.on_end(
            lambda: self._shut() if self._process is process else None
        )  # a late end must not shut its successor
        await process.close_stdin()

    def _take(self, stream: str, data: bytes) -> None:
        if stream in self._outputs:
            self._outputs[stream].feed(data)

    def _readable(self) -> None:
        try:
            data = os.read(self._from, 65536)
        except BlockingIOError:
            return
        self._buffer += data
        if not data or len(self._buffer) > _MAX_ANSWER:
            self._shut()
            return
        answer = self._complete(self._buffer)
        if answer is not None and self._answer is not None and not self._answer.done():
            self._answer.set_result((answer, False))

    def _shut(self) -> None:
        if self._from >= 0:
            self._multiplexer.forget(self._from)
            os.close(self._from)
            os.close(self._to)
            self._from = self._to = -1
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((None, False))

    async def ask(self, data: bytes, timeout: float, kept: int) -> tuple[bytes | None, bool, dict[str, Capture]]:
        """Send a request; returns (answer or None if the program ended, whether time was over, what it printed)."""
        self._answer = asyncio.get_running_loop().create_future()
        self._outputs = {"stdout": Capture(kept), "stderr": Capture(kept)}
        await self._write(data)
        timer = asyncio.get_running_loop().call_later(timeout, self._be_late)
        try:
            answer, timed_out = await self._answer
            if timed_out:
                answer = await self._call_back()
        except asyncio.CancelledError:
            await self.close()
            raise
        finally:
            timer.cancel()
        if self._process is not None:
            self._process.drain()
        outputs, self._outputs = self._outputs, {}
        return answer, timed_out, outputs

    def _be_late(self) -> None:
        """Time is over: let `ask` know, and keep what may still come for it."""
        late, self._answer = self._answer, asyncio.get_running_loop().create_future()
        if late is not None and not late.done():
            late.set_result((None, True))

    async def _write(self, data: bytes) -> None:
        while data and self._to >= 0:
            try:
                data = data[os.write(self._to, data) :]
            except BlockingIOError:
                await asyncio.sleep(0.002)
            except OSError:
                return

    async def _call_back(self) -> bytes | None:
        """Kill what the program started; kill it too if that does not bring it back."""
        assert self._process is not None and self._answer is not None
        await self._process.interrupt_below()
        try:
            return (await asyncio.wait_for(self._answer, _COME_BACK))[0]
        except TimeoutError:
            await self.close()
            return None

    async def end(self) -> ExecResult | None:
        """How the program ended; None if the sandbox ended first."""
        assert self._process is not None
        try:
            return await self._process.wait()
        except SandboxFailure:
            return None

    async def close(self) -> None:
        """Kill the program and what it started, and wait for that."""
        if self._process is not None:
            process, self._process = self._process, None
            await process.kill()
            with contextlib.suppress(SandboxFailure):
                await process.wait()
        self._shut()


def _cut_shell_answer(buffer: bytearray) -> bytes | None:
    parts = bytes(buffer).split(b"\0")
    if len(parts) < 3:
        return None
    del buffer[: len(parts[0]) + len(parts[1]) + 2]
    return parts[0] + b"\0" + parts[1]


class Shell:
    """A persistent bash; see the protocol `ShellSession`."""

    def __init__(self, sandbox: Any, channel: Callable[..., Any]) -> None:
        self.cwd = "/"
        self._sandbox = sandbox
        self._channel = channel(sandbox, ("bash", "--norc", "--noprofile", "-c", _SHELL), _cut_shell_answer)

    @classmethod
    async def open(cls, sandbox: Any, channel: Callable[..., Any] = Channel) -> Shell:
        """Start one, over the kind of channel that the sandbox has."""
        shell = cls(sandbox, channel)
        await shell._channel.start()
        return shell

    async def run(self, line: str, *, timeout: float | None = None) -> ExecResult:
        if "\0" in line:
            raise ValueError("a line for the shell holds a NUL byte")
        if not self._channel.open:
            await self._channel.start()
        loop = asyncio.get_running_loop()
        started = loop.time()
        limits = self._sandbox.limits
        answer, timed_out, outputs = await self._channel.ask(
            line.encode() + b"\0", timeout or limits.timeout, limits.output
        )
        out, err = outputs["stdout"], outputs["stderr"]
        code, signal = 137, None
        if answer is not None:
            status, _, cwd = answer.partition(b"\0")
            code, self.cwd = int(status) if status.isdigit() else 255, cwd.decode("utf-8", "replace")
        elif not timed_out:
            ended = await self._channel.end()
            self._sandbox.check_alive()
            code, signal = (ended.exit_code, ended.signal) if ended is not None else (255, None)
        stdout, stderr = out.content(), err.content()
        return ExecResult(
            stdout=stdout, stderr=stderr, exit_code=code, signal=signal, timed_out=timed_out, stdout_bytes=out.total,
            stderr_bytes=err.total, truncated=len(stdout) < out.total or len(stderr) < err.total, wall=loop.time() - started,
        )  # fmt: skip

    async def close(self) -> None:
        await self._channel.close()


def _cut_frame(buffer: bytearray) -> bytes | None:
    if len(buffer) < 4:
        return None
    (length,) = struct.unpack_from("<I", buffer)
    if len(buffer) < 4 + length:
        return None
    frame = bytes(buffer[4 : 4 + length])
    del buffer[: 4 + length]
    return frame


class PythonCells:
    """A running Python; see the protocol `PythonSession`."""

    def __init__(self, sandbox: Any, preload: Sequence[str], channel: Callable[..., Any]) -> None:
        self._sandbox = sandbox
        source = Path(__file__).with_name("cell_runner.py").read_text()
        command = ("python3", "-u", "-c", source, json.dumps(list(preload)))
        self._channel = channel(sandbox, command, _cut_frame)

    @classmethod
    async def open(cls, sandbox: Any, preload: Sequence[str], channel: Callable[..., Any] = Channel) -> PythonCells:
        """Start one, over the kind of channel that the sandbox has, and wait until it has imported.

        Raises:
            SandboxFailure: the image has no python3, or a module of `preload` can't be imported.
        """
        cells = cls(sandbox, preload, channel)
        await cells._start()
        return cells

    async def _start(self) -> None:
        await self._channel.start()
        answer, _, outputs = await self._channel.ask(b"", _START_SECONDS, 4096)
        if answer is None:
            said = outputs["stderr"].content().decode("utf-8", "replace").strip().splitlines()
            ended = await self._channel.end()
            reason = said[-1] if said else ended.error if ended is not None else "the sandbox ended"
            raise SandboxFailure(f"python3 did not start in sandbox {self._sandbox.id}: {reason}")

    async def run(self, code: str, *, timeout: float | None = None, fork: bool = False) -> CellResult:
        if not self._channel.open:
            await self._start()
        loop = asyncio.get_running_loop()
        started = loop.time()
        limits = self._sandbox.limits
        frame = json.dumps({"code": code, "fork": fork}).encode()
        request = struct.pack("<I", len(frame)) + frame
        answer, timed_out, outputs = await self._channel.ask(request, timeout or limits.timeout, limits.output)
        value, error = _read_answer(answer)
        if answer is None and not timed_out:
            self._sandbox.check_alive()
        return CellResult(
            stdout=outputs["stdout"].content(), stderr=outputs["stderr"].content(), value=value, timed_out=timed_out,
            error="TimeoutError: the cell's time was over" if timed_out else error, lost=answer is None, wall=loop.time() - started,
        )  # fmt: skip

    async def close(self) -> None:
        await self._channel.close()


def _read_answer(answer: bytes | None) -> tuple[str | None, str | None]:
    """(value, error) of an answer; whatever is not an answer is an error of the cell."""
    if answer is None:
        return None, "the interpreter ended"
    try:
        reply: Any = json.loads(answer)
        value, error = reply["value"], reply["error"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None, "the interpreter sent something else than an answer"
    return (value if isinstance(value, str) else None), (error if isinstance(error, str) else None)
