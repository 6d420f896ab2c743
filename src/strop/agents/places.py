"""Where an outside program runs: on this machine, or in a sandbox that reaches the gateway through a pipe and nothing
else. What it is told and what comes of it is `program`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from strop.agents.relay import Relay

if TYPE_CHECKING:
    from strop.sandboxes.sandbox import Sandbox

_OUTPUT = 1 << 20  # bytes kept of each output stream
_FILE = 16 << 20  # bytes of the largest file that goes to the scorer
_WORK = "/tmp/work"  # a program's folder in a sandbox


class Place(Protocol):
    """A fresh working directory and what runs in it, while the context is open."""

    async def __aenter__(self) -> Self:
        """Make the working directory."""
        ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End whatever still runs, and remove it."""
        ...

    async def reach(self, url: str) -> str:
        """The URL under which programs here reach `url`, which is on this machine's loopback."""
        ...

    async def put(self, name: str, content: bytes) -> str:
        """Write a file beside the working directory; its path, as programs here see it."""
        ...

    async def get(self, path: str) -> bytes | None:
        """Content of a file of the working directory; None if there is none that may be read."""
        ...

    async def run(self, command: str, variables: Mapping[str, str], seconds: float) -> tuple[int | None, str, str]:
        """Run a shell line to its end: exit code (None if its time was over), standard output and error.

        Cancelling it kills the program and everything it started.
        """
        ...


class HostPlace:
    """A temporary folder of this machine. The program can do whatever this user can."""

    async def __aenter__(self) -> Self:
        """See `Place`."""
        self._folder = Path(tempfile.mkdtemp(prefix="strop-agent-"))
        self._work = self._folder / "work"
        self._work.mkdir()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Place`."""
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def reach(self, url: str) -> str:
        """See `Place`."""
        return url

    async def put(self, name: str, content: bytes) -> str:
        """See `Place`."""
        path = self._folder / name
        path.write_bytes(content)
        return str(path)

    async def get(self, path: str) -> bytes | None:
        """See `Place`. Links that lead out of the working directory are not followed."""
        found = (self._work / path).resolve()
        if not found.is_relative_to(self._work.resolve()) or not found.is_file() or found.stat().st_size > _FILE:
            return None
        return found.read_bytes()

    async def run(self, command: str, variables: Mapping[str, str], seconds: float) -> tuple[int | None, str, str]:
        """See `Place`."""
        stdout, stderr = self._folder / "stdout", self._folder / "stderr"
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self._work), "LANG": "C.UTF-8"}
        with stdout.open("wb") as out, stderr.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self._work,
                env={**own, **variables},
                start_new_session=True,  # so that it can be killed with everything it started
            )
        code: int | None = None
        try:
            async with asyncio.timeout(seconds):
                code = await process.wait()
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code is not None and code < 0:
            code = 128 - code
        return code, _tail(stdout), _tail(stderr)


class SandboxPlace:
    """A sandbox without network: a relay inside it carries connections to the gateway over its own pipes."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._relay: Relay | None = None

    async def __aenter__(self) -> Self:
        """See `Place`."""
        await self._sandbox.exec(["mkdir", "-p", _WORK])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See `Place`. The sandbox itself belongs to the session."""
        if self._relay is not None:
            await self._relay.close()

    async def reach(self, url: str) -> str:
        """See `Place`."""
        self._relay = await Relay.open(self._sandbox, url)
        return self._relay.url

    async def put(self, name: str, content: bytes) -> str:
        """See `Place`."""
        path = f"{_WORK}-{name}"
        await self._sandbox.put(path, content)
        return path

    async def get(self, path: str) -> bytes | None:
        """See `Place`."""
        from strop.sandboxes.errors import FileProblem

        try:
            return await self._sandbox.get(f"{_WORK}/{path}", max_bytes=_FILE)
        except FileProblem:
            return None

    async def run(self, command: str, variables: Mapping[str, str], seconds: float) -> tuple[int | None, str, str]:
        """See `Place`."""
        result = await self._sandbox.exec(
            ["/bin/sh", "-c", command], env={"HOME": _WORK, **variables}, cwd=_WORK, timeout=seconds, max_output=_OUTPUT
        )
        return None if result.timed_out else result.exit_code, result.text, result.error_text


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _OUTPUT))
        return file.read().decode("utf-8", "replace")
