"""The sandbox protocol and its plain data: limits, results, chunks, files.

Every implementation (the embedded namespaces, the HTTP client, the adapters over other systems) has this surface and
passes the same conformance suite. How a sandbox is made is in `pool.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from strop.errors import ConfigError

#: A shell line, or an argument vector that is run without a shell.
Command = str | Sequence[str]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may use.

    Attributes:
        memory: bytes, files of its writable layer and /dev/shm included.
        processes: processes and threads, the agent included.
        cpus: cores' worth of time; 0 is no limit.
        disk: bytes of its writable layer and /dev/shm together.
        inodes: files and folders it may create.
        open_files: descriptors of one process.
        output: bytes kept of each output stream of one command; the middle is dropped.
        timeout: seconds that a command gets if the call says nothing.
    """

    memory: int = 512 * MIB
    processes: int = 256
    cpus: float = 1.0
    disk: int = 256 * MIB
    inodes: int = 65536
    open_files: int = 4096
    output: int = MIB
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name, least in (
            ("memory", 8 * MIB),
            ("processes", 4),
            ("disk", 64 << 10),
            ("inodes", 32),
            ("open_files", 16),
            ("output", 2),
        ):
            if getattr(self, name) < least:
                raise ConfigError(f"limits.{name}", f"{getattr(self, name)} is too little", f"At least {least}")
        if not 0 <= self.cpus <= 4096 or (self.cpus and self.cpus < 0.01):
            raise ConfigError("limits.cpus", f"{self.cpus} is out of range", "0 (no limit), or 0.01 and more")
        if not self.timeout > 0:
            raise ConfigError("limits.timeout", f"{self.timeout} is not positive", "Seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended.

    Attributes:
        stdout, stderr: the bytes that were kept: all of them, or head and tail if `truncated`.
        exit_code: as the shell counts: 128 + signal if one ended it, 127 not found, 126 can't be run.
        signal: the signal that ended it.
        timed_out: its time was over and it was killed, with everything it had started.
        oom_kills: processes of the sandbox that the kernel killed for memory while it ran.
        truncated: whether output was dropped.
        stdout_bytes, stderr_bytes: how much it wrote, counted until it was killed or closed.
        wall: seconds from the request to the end.
        cpu: seconds of CPU, of it and the children it waited for.
        peak_memory: bytes resident at most, of its largest process.
        error: why it could not be started, else None.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    exit_code: int = 0
    signal: int | None = None
    timed_out: bool = False
    oom_kills: int = 0
    truncated: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    wall: float = 0.0
    cpu: float = 0.0
    peak_memory: int = 0
    error: str | None = None

    @property
    def oom(self) -> bool:
        """Whether the kernel killed anything for memory."""
        return self.oom_kills > 0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """Standard error as text."""
        return self.stderr.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of output as it came."""

    stream: Literal["stdout", "stderr"]
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """How a Python cell ended.

    Attributes:
        stdout, stderr: bytes that were kept.
        value: repr of the last expression's value; None if there is none or it is None.
        error: the traceback, None if the code ended well.
        timed_out: its time was over.
        lost: the interpreter ended with it; the next cell starts in a new one.
        wall: seconds.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    value: str | None = None
    error: str | None = None
    timed_out: bool = False
    lost: bool = False
    wall: float = 0.0

    @property
    def text(self) -> str:
        """Standard output as text."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One entry of a folder: kind is "file", "folder", "link" or "special"; mode holds the permission bits."""

    path: str
    kind: Literal["file", "folder", "link", "special"]
    size: int
    mode: int
    uid: int
    gid: int
    mtime: int


class Process(Protocol):
    """A command that runs while others do."""

    async def write(self, data: bytes) -> None:
        """Write to its standard input; what it does not read before it ends is dropped."""
        ...

    async def close_stdin(self) -> None:
        """Let it read the end of its input."""
        ...

    def __aiter__(self) -> AsyncIterator[Chunk]:
        """Output as it comes, until it has ended."""
        ...

    async def signal(self, number: int) -> None:
        """Send a signal to its main process."""
        ...

    async def kill(self) -> None:
        """Kill it and everything it started."""
        ...

    async def wait(self) -> ExecResult:
        """Wait for its end. Output that was iterated over is not in the result."""
        ...


class ShellSession(Protocol):
    """A shell that keeps its directory, variables and functions from line to line. One line at a time."""

    @property
    def cwd(self) -> str:
        """Where it was after the last line."""
        ...

    async def run(self, line: str, *, timeout: float | None = None) -> ExecResult:
        """Run a line, or several. When time is over what it started is killed; the shell itself only if it does not
        come back then. A shell that has ended is replaced by a new one at the next call."""
        ...

    async def close(self) -> None:
        """End it and what it started."""
        ...


class PythonSession(Protocol):
    """A Python interpreter that is already running. One cell at a time."""

    async def run(self, code: str, *, timeout: float | None = None, fork: bool = False) -> CellResult:
        """Run code.

        Args:
            code: statements; the last may be an expression whose repr comes back.
            timeout: seconds; the limits' if None.
            fork: run in a copy of the interpreter that is thrown away: nothing of it stays, and running out of time
                does not lose the interpreter.
        """
        ...

    async def close(self) -> None:
        """End it."""
        ...


class Snapshot(Protocol):
    """The files of a sandbox at one moment, from which others can be made. Running programs are not part of it."""

    async def delete(self) -> None:
        """Free what it holds. Sandboxes made from it live on."""
        ...


class Sandbox(Protocol):
    """An isolated place where commands run. All methods raise `SandboxFailure` if the place itself fails."""

    @property
    def id(self) -> str:
        """Unique on its machine."""
        ...

    @property
    def labels(self) -> Mapping[str, str]:
        """What its maker wrote on it."""
        ...

    async def exec(
        self,
        command: Command,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        kill_leftovers: bool = False,
    ) -> ExecResult:
        """Run a command to its end.

        Args:
            command: a line for /bin/sh, or an argument vector.
            stdin: what it reads; None is an empty input.
            env: variables beside the sandbox's own.
            cwd: working directory; the image's if None.
            user: name, id or "id:group"; root (of the sandbox) if None.
            timeout: seconds, then it and everything below it is killed; the limits' if None.
            max_output: bytes kept of each stream; the limits' if None.
            kill_leftovers: when it has ended, kill what it and earlier commands left running.

        Raises:
            ValueError: a NUL byte in a string.
        """
        ...

    def stream(
        self,
        command: Command,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk | ExecResult]:
        """Run a command; output comes as it is written, the result last."""
        ...

    async def start(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
    ) -> Process:
        """Start a command and leave it running; without a timeout it lives as long as the sandbox."""
        ...

    async def shell(self) -> ShellSession:
        """A persistent shell (bash, which the image must have)."""
        ...

    async def python(self, preload: Sequence[str] = ()) -> PythonSession:
        """A Python interpreter (python3 of the image) that has imported the modules of `preload`."""
        ...

    async def get(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        """Contents of a regular file, links followed inside the sandbox.

        Raises:
            FileProblem: missing, not a regular file, or larger than `max_bytes`.
        """
        ...

    async def put(self, path: str, data: bytes, *, mode: int = 0o644, user: str | int | None = None) -> None:
        """Write a file whole, atomically; folders above it are made; a link at `path` is replaced.

        Raises:
            FileProblem: no room, or a path that can't be.
        """
        ...

    async def get_archive(self, path: str, *, max_bytes: int = 256 * MIB) -> bytes:
        """A folder as an uncompressed tar archive: files, folders and links; special files are left out."""
        ...

    async def put_archive(self, path: str, archive: bytes, *, user: str | int | None = None) -> None:
        """Unpack a tar archive into a folder. Members that would leave it are refused (tarfile's data filter)."""
        ...

    async def list(self, path: str) -> list[FileInfo]:
        """The entries of a folder, by name."""
        ...

    async def snapshot(self) -> Snapshot:
        """Keep the files as they are now; programs are stopped meanwhile and then go on."""
        ...

    async def fork(self, count: int) -> Sequence[Sandbox]:
        """`count` new sandboxes that begin with the files of this one as they are now."""
        ...

    async def pause(self) -> None:
        """Stop every program of it until `resume`."""
        ...

    async def resume(self) -> None:
        """Let the programs go on."""
        ...

    async def destroy(self) -> None:
        """End it and free everything. May be called twice."""
        ...


class SandboxPool(Protocol):
    """Where sandboxes come from."""

    async def create(
        self,
        *,
        snapshot: Snapshot | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> Sandbox:
        """A fresh sandbox.

        Args:
            snapshot: files to begin with; the image's if None.
            limits: the pool's if None.
            env: variables beside the image's.
            labels: for the caller's own use.
            ttl: seconds after which it is destroyed, whatever it does; the pool's if None.
        """
        ...

    async def close(self) -> None:
        """Destroy every sandbox and free everything."""
        ...
