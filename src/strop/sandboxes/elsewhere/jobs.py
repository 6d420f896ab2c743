"""Commands that go on in a sandbox of another system: looked at by scripts again and again, spoken to by scripts.

A job's streams are files of the sandbox; `scripts.py` says where. Sessions (a shell, Python) are jobs that answer.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from signal import SIGKILL
from typing import TYPE_CHECKING, Any, Literal, cast

from strop.sandboxes.elsewhere import scripts
from strop.sandboxes.errors import SandboxFailure
from strop.sandboxes.running import Capture
from strop.sandboxes.sandbox import Chunk, ExecResult

if TYPE_CHECKING:
    from strop.sandboxes.elsewhere.posix import PosixSandbox

#: Seconds beyond a command's own time-out that the network and the other system may take.
SLACK = 60.0
#: Seconds that one look at a running command may wait for something new.
_PATIENCE = 2.0


class Job:
    """A command that goes on in a sandbox; see the protocol `Process`."""

    def __init__(self, sandbox: PosixSandbox, name: str, timeout: float | None) -> None:
        self._sandbox, self.name = sandbox, name
        self._offsets = [0, 0, 0]
        self._captures = {"stdout": Capture(sandbox.limits.output), "stderr": Capture(sandbox.limits.output)}
        self._iterated = self._timed_out = self._killed = False
        #: How it ended, once that has been seen.
        self.result: ExecResult | None = None
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._deadline = None if timeout is None else self._began + timeout
        self.answers = bytearray()

    async def ask(self, script: Callable[..., str], seconds: float | None = None, **options: Any) -> list[bytes]:
        """Run one of the scripts for jobs."""
        return await self._sandbox.ask(partial(script, name=self.name, **options), seconds)

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), scripts.CHUNK):
            await self.ask(scripts.write, data=data[start : start + scripts.CHUNK])

    async def close_stdin(self) -> None:
        await self.ask(scripts.close_input)

    async def signal(self, number: int) -> None:
        await self.ask(scripts.signal, number=number)

    async def interrupt_below(self) -> None:
        """Kill what it has started, but not itself."""
        await self.ask(scripts.kill, spare_main=True)

    async def kill(self) -> None:
        self._killed = True
        await self.ask(scripts.kill, spare_main=False)

    async def look(self, patience: float = _PATIENCE) -> list[Chunk]:
        """What is new; `result` is set once it has ended and everything has been seen."""
        if self._deadline is not None:
            patience = max(0.05, min(patience, self._deadline - self._loop.time()))
        fields = await self.ask(scripts.poll, patience + SLACK, offsets=tuple(self._offsets), patience=patience)
        if len(fields) != 4:
            raise SandboxFailure(f"sandbox {self._sandbox.id} gave {len(fields)} fields, not 4")
        code, *pieces = fields
        for number, piece in enumerate(pieces):
            self._offsets[number] += len(piece)
        self.answers += pieces[2]
        if code != b"-" and not any(pieces):
            await self._finish(code)
        elif self._deadline is not None and not self._timed_out and self._loop.time() >= self._deadline:
            self._timed_out = True
            await self.kill()
        found: list[Chunk] = []
        for stream, piece in zip(("stdout", "stderr"), pieces, strict=False):
            if piece:
                found.append(Chunk(cast(Literal["stdout", "stderr"], stream), piece))
        return found

    async def _finish(self, code: bytes) -> None:
        if not code.isdigit():
            raise SandboxFailure(f"sandbox {self._sandbox.id} gave {code[:20]!r} as an exit code")
        out, err = self._captures["stdout"], self._captures["stderr"]
        signal = SIGKILL if self._killed and int(code) == 128 + SIGKILL else None
        stdout, stderr = (b"", b"") if self._iterated else (out.content(), err.content())
        truncated = not self._iterated and (len(stdout) < out.total or len(stderr) < err.total)
        self.result = ExecResult(
            stdout=stdout, stderr=stderr, exit_code=int(code), signal=signal, timed_out=self._timed_out, truncated=truncated,
            stdout_bytes=self._offsets[0], stderr_bytes=self._offsets[1], wall=self._loop.time() - self._began,
        )  # fmt: skip
        await self.ask(scripts.forget)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        self._iterated = True
        while self.result is None:
            for chunk in await self.look():
                yield chunk

    async def wait(self) -> ExecResult:
        while self.result is None:
            for chunk in await self.look():
                self._captures[chunk.stream].feed(chunk.data)
        return self.result


class JobChannel:
    """What `sessions.Channel` is for a local sandbox: a program that answers requests, on descriptors 3 and 4."""

    def __init__(
        self, sandbox: PosixSandbox, command: Sequence[str], complete: Callable[[bytearray], bytes | None]
    ) -> None:
        self._sandbox, self._command, self._complete = sandbox, command, complete
        self._job: Job | None = None
        self._ended: ExecResult | None = None

    @property
    def open(self) -> bool:
        """Whether the program runs, as far as is known."""
        return self._job is not None

    async def start(self) -> None:
        """Start the program."""
        name = scripts.new_name()
        words = shlex.join(self._command)
        line = f"exec {words} 3<&0 4>>{scripts.job_folder(name)}/a </dev/null"
        self._job = await self._sandbox.start_job(line, name=name)

    async def ask(self, data: bytes, timeout: float, kept: int) -> tuple[bytes | None, bool, dict[str, Capture]]:
        """Send a request; returns (answer or None if the program ended, whether time was over, what it printed)."""
        outputs = {"stdout": Capture(kept), "stderr": Capture(kept)}
        job = self._job
        assert job is not None
        if data:
            await job.write(data)
        try:
            async with asyncio.timeout(timeout):
                return await self._answer(job, outputs), False, outputs
        except TimeoutError:
            await job.interrupt_below()
        except asyncio.CancelledError:
            await self.close()
            raise
        try:
            async with asyncio.timeout(_PATIENCE):
                return await self._answer(job, outputs), True, outputs
        except TimeoutError:
            await self.close()
            return None, True, outputs

    async def _answer(self, job: Job, outputs: dict[str, Capture]) -> bytes | None:
        while True:
            for chunk in await job.look():
                outputs[chunk.stream].feed(chunk.data)
            answer = self._complete(job.answers)
            if answer is not None:
                for chunk in await job.look(0.05):  # printed before the answer, seen after it
                    outputs[chunk.stream].feed(chunk.data)
                return answer
            if job.result is not None:
                self._job, self._ended = None, job.result
                return None

    async def end(self) -> ExecResult | None:
        """How the program ended."""
        return self._ended

    async def close(self) -> None:
        """Kill the program and what it started."""
        if self._job is not None:
            job, self._job = self._job, None
            await job.kill()
            await job.wait()
