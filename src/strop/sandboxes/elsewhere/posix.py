"""A sandbox of another system, reached by running shell scripts in it: the whole protocol over one primitive.

An adapter says how a script is run and how the place ends; everything else (exact bytes, caps, time-outs, processes,
sessions, files) is here, once. What comes back is untrusted: it is parsed strictly, and what does not parse is a
failure of the place.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import stat
import tarfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

from strop.sandboxes.elsewhere import scripts
from strop.sandboxes.elsewhere.jobs import SLACK, Job, JobChannel
from strop.sandboxes.elsewhere.scripts import Call
from strop.sandboxes.errors import FileProblem, NotOffered, SandboxDead, SandboxFailure, SandboxStall
from strop.sandboxes.files import checked_member
from strop.sandboxes.sandbox import MIB, Chunk, Command, ExecResult, FileInfo, Limits, Snapshot
from strop.sandboxes.sessions import PythonCells, Shell

_REASONS = {
    "missing": "does not exist",
    "folder": "is a folder",
    "special": "is not a regular file",
    "other": "has a part that is not a folder",
    "no": "failed: the sandbox refused",
}


class PosixSandbox(ABC):
    """See the protocol `Sandbox`. An adapter gives `_run_script` and `_end`, and what its system can do beyond.

    Args:
        id: as its system knows it.
        limits: what its commands get; the system itself keeps the limits of the place.
        env: variables of every command.
        labels: of its maker.
        cwd: where commands start.
    """

    #: Name of the system, in messages.
    kind = "other"

    def __init__(
        self, id: str, limits: Limits, env: Mapping[str, str], labels: Mapping[str, str], cwd: str = "/"
    ) -> None:
        self.id, self.limits, self.labels = id, limits, dict(labels)
        self._env, self._cwd = dict(env), cwd
        self._dead: str | None = None
        self._on_end: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return f"<{self.kind} sandbox {self.id}{f' dead: {self._dead}' if self._dead else ''}>"

    # ---- what an adapter gives ----

    @abstractmethod
    async def _run_script(self, script: str, seconds: float) -> bytes:
        """Run a script with /bin/sh as root and return its standard output.

        Args:
            script: at most 128 KiB.
            seconds: after which it may be given up.

        Raises:
            SandboxDead: the place is gone.
            SandboxFailure: the script could not be run, or the answer did not come.
        """

    @abstractmethod
    async def _end(self) -> None:
        """End the place. Called once."""

    async def snapshot(self) -> Snapshot:
        """See the protocol.

        Raises:
            NotOffered: the system has none.
        """
        raise NotOffered(f"{self.kind} sandboxes have no snapshots")

    async def fork(self, count: int) -> Sequence[Self]:
        """See the protocol.

        Raises:
            NotOffered: the system has no snapshots.
        """
        raise NotOffered(f"{self.kind} sandboxes can't be forked")

    async def pause(self) -> None:
        """See the protocol.

        Raises:
            NotOffered: the system can't.
        """
        raise NotOffered(f"{self.kind} sandboxes can't be paused")

    async def resume(self) -> None:
        """See the protocol.

        Raises:
            NotOffered: the system can't.
        """
        raise NotOffered(f"{self.kind} sandboxes can't be paused")

    # ---- life ----

    def check_alive(self) -> None:
        """Raise SandboxDead, with the reason, if it is."""
        if self._dead is not None:
            raise SandboxDead(f"{self.kind} sandbox {self.id} is dead: {self._dead}")

    async def destroy(self) -> None:
        if self._dead is None:
            self._dead = "it was destroyed"
            self._on_end()
            await self._end()

    async def ask(self, script: Callable[[str], str], seconds: float | None = None) -> list[bytes]:
        """Run a script that is made for a frame, and return the fields of its answer.

        Raises:
            SandboxFailure: there is no answer in what came back, or it did not come within `seconds`.
        """
        self.check_alive()
        seconds = SLACK if seconds is None else seconds
        frame = scripts.new_name()
        try:
            async with asyncio.timeout(seconds):
                output = await self._run_script(script(frame), seconds)
        except TimeoutError:
            raise SandboxStall(f"{self.kind} sandbox {self.id} gave no answer within {seconds:g} s") from None
        try:
            return scripts.parse(frame, output)
        except ValueError as error:
            raise SandboxFailure(
                f"{self.kind} sandbox {self.id} gave no answer ({error}); the end of what it said: {output[-200:]!r}"
            ) from None

    # ---- commands ----

    def _call(self, command: Command, env: Mapping[str, str] | None, cwd: str | None, user: str | int | None) -> Call:
        named = None if user in (None, "root", 0, "0") else str(user)
        return Call(command=command, env={**self._env, **(env or {})}, cwd=cwd or self._cwd, user=named)

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
        """See the protocol. CPU time, memory and kills for memory are not known; a signal is seen by its exit code."""
        seconds, kept = timeout or self.limits.timeout, max_output or self.limits.output
        call = self._call(command, env, cwd, user)
        source = "/dev/null" if stdin is None else await self._send(stdin)
        began = asyncio.get_running_loop().time()
        code, out, err, stdout, stderr = await self._five(
            lambda frame: scripts.run(frame, call, source, seconds, kept, kill_leftovers), seconds + SLACK
        )
        wall = asyncio.get_running_loop().time() - began
        return ExecResult(
            stdout=stdout, stderr=stderr, exit_code=int(code), timed_out=int(code) in (124, 137) and wall >= seconds, wall=wall,
            stdout_bytes=int(out), stderr_bytes=int(err), truncated=int(out) > len(stdout) or int(err) > len(stderr),
        )  # fmt: skip

    async def _five(self, script: Callable[[str], str], seconds: float) -> list[bytes]:
        fields = await self.ask(script, seconds)
        if len(fields) != 5 or not all(field.isdigit() for field in fields[:3]):
            raise SandboxFailure(f"{self.kind} sandbox {self.id} answered something else than a result")
        return fields

    async def start_job(
        self, command: Command, *, call: Call | None = None, name: str | None = None, timeout: float | None = None
    ) -> Job:
        """Start a command that goes on."""
        name = name or scripts.new_name()
        call = call or self._call(command, None, None, None)
        job = Job(self, name, timeout)
        await job.ask(scripts.start, call=call)
        return job

    async def start(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
    ) -> Job:
        return await self.start_job(command, call=self._call(command, env, cwd, user), timeout=timeout)

    async def stream(
        self,
        command: Command,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk | ExecResult]:
        job = await self.start(command, env=env, cwd=cwd, user=user, timeout=timeout or self.limits.timeout)
        try:
            if stdin is not None:
                await job.write(stdin)
            await job.close_stdin()
            async for chunk in job:
                yield chunk
            yield await job.wait()
        finally:
            if job.result is None and self._dead is None:
                with contextlib.suppress(SandboxFailure):
                    await job.kill()

    async def shell(self) -> Shell:
        """See the protocol."""
        return await Shell.open(self, JobChannel)

    async def python(self, preload: Sequence[str] = ()) -> PythonCells:
        """See the protocol."""
        return await PythonCells.open(self, preload, JobChannel)

    # ---- files ----

    async def _send(self, data: bytes) -> str:
        """Put bytes into a new file of its /tmp; returns its path. An adapter may know a faster way."""
        path = f"/tmp/.strop-{scripts.new_name()}"
        for start in range(0, max(len(data), 1), scripts.CHUNK):
            piece = data[start : start + scripts.CHUNK]
            (done,) = await self.ask(partial(scripts.append, path=path, data=piece))
            if done != b"yes":
                raise FileProblem(path, "does not fit")
        return path

    def _refuse(self, path: str, what: bytes) -> None:
        raise FileProblem(path, _REASONS.get(what.decode("ascii", "replace"), "failed"))

    async def get(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        what, *contents = await self.ask(lambda frame: scripts.read(frame, _checked(path), max_bytes))
        if what == b"large":
            raise FileProblem(path, f"is larger than {max_bytes} bytes")
        if what != b"file" or len(contents) != 1:
            self._refuse(path, what)
        return contents[0]

    async def put(self, path: str, data: bytes, *, mode: int = 0o644, user: str | int | None = None) -> None:
        source = await self._send(data)
        owner = None if user is None else str(user)
        (what,) = await self.ask(lambda frame: scripts.place(frame, _checked(path), source, mode & 0o7777, owner))
        if what != b"yes":
            self._refuse(path, what)

    async def get_archive(self, path: str, *, max_bytes: int = 256 * MIB) -> bytes:
        target = f"/tmp/.strop-{scripts.new_name()}"
        try:
            what, size = await self.ask(
                lambda frame: scripts.pack(frame, _checked(path), target), self.limits.timeout + SLACK
            )
            if what != b"yes":
                self._refuse(path, what)
            if int(size) > max_bytes + 64 * MIB:
                raise FileProblem(path, f"is larger than {max_bytes} bytes")
            packed = bytearray()
            while len(packed) < int(size):
                at = len(packed)
                (piece,) = await self.ask(partial(scripts.slice_of, path=target, offset=at, count=MIB))
                if not piece:
                    raise SandboxFailure(f"{self.kind} sandbox {self.id} sent a broken archive")
                packed += piece
        finally:
            if self._dead is None:
                await self.ask(lambda frame: scripts.remove(frame, target))
        return _repack(bytes(packed), path, max_bytes)

    async def put_archive(self, path: str, archive: bytes, *, user: str | int | None = None) -> None:
        source = await self._send(_rechecked(archive, path))
        owner = None if user is None else str(user)
        (what,) = await self.ask(
            lambda frame: scripts.unpack(frame, _checked(path), source, owner), self.limits.timeout + SLACK
        )
        if what != b"yes":
            self._refuse(path, what)

    async def list(self, path: str) -> list[FileInfo]:
        what, *entries = await self.ask(lambda frame: scripts.listing(frame, _checked(path)))
        if what != b"folder" or len(entries) != 1:
            self._refuse(path, what)
        fields = entries[0].split(b"\0")[:-1]
        try:
            found = [_info(fields[at], fields[at + 1]) for at in range(0, len(fields), 2)]
        except (ValueError, IndexError):
            raise SandboxFailure(f"{self.kind} sandbox {self.id} sent a broken listing") from None
        return sorted(found, key=lambda info: info.path)


def _checked(path: str) -> str:
    if "\0" in path:
        raise ValueError(f"{path!r} holds a NUL byte")
    return path


def _info(status: bytes, name: bytes) -> FileInfo:
    raw, size, uid, gid, mtime = status.split()
    mode = int(raw, 16)
    kinds: dict[int, Any] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(mode), "special")
    return FileInfo(os.fsdecode(name), kind, int(size), stat.S_IMODE(mode), int(uid), int(gid), int(mtime))


def _repack(packed: bytes, path: str, max_bytes: int) -> bytes:
    """An archive as the protocol gives it: files, folders and links, names without "./"."""
    buffer = io.BytesIO()
    left = max_bytes
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(packed)) as source,
            tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as target,
        ):
            for member in source:
                member.name = member.name.removeprefix("./")
                if member.name in ("", ".") or not (
                    member.isreg() or member.isdir() or member.issym() or member.islnk()
                ):
                    continue
                left -= member.size if member.isreg() else 0
                if left < 0:
                    raise FileProblem(path, f"is larger than {max_bytes} bytes")
                contents = source.extractfile(member) if member.isreg() or member.islnk() else None
                if member.islnk() and contents is not None:  # of several names each gets the contents
                    data = contents.read()
                    member.type, member.linkname, member.size = tarfile.REGTYPE, "", len(data)
                    contents = io.BytesIO(data)
                target.addfile(member, contents)
    except tarfile.TarError as error:
        raise FileProblem(path, f"could not be packed: {error}") from None
    return buffer.getvalue()


def _rechecked(archive: bytes, path: str) -> bytes:
    """The archive with its members checked by tarfile's data filter.

    Raises:
        FileProblem: not an archive, or a member that would leave the folder.
    """
    buffer = io.BytesIO()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=buffer, mode="w") as target:
            for original in source:
                member = checked_member(original, path)
                if member is not None:
                    # None is the filter's word for: as usual, for whoever unpacks it
                    mode = member.mode if member.mode is not None else 0o755
                    member = member.replace(mode=mode, uid=0, gid=0, uname="", gname="")
                    target.addfile(member, source.extractfile(original) if original.isreg() else None)
    except tarfile.TarError as error:
        raise FileProblem(path, f"can't take the archive: {error}") from None
    return buffer.getvalue()
