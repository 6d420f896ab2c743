"""Files of a local sandbox, through its agent: the host never resolves a path of a sandbox.

The agent's stream of entries (struct entry in helper/helper.h) is untrusted; archives are made from it here, and
archives for it are checked with tarfile's data filter before anything is sent.
"""

from __future__ import annotations

import asyncio
import errno
import io
import os
import struct
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strop.sandboxes import wire
from strop.sandboxes.errors import FileProblem, SandboxFailure
from strop.sandboxes.sandbox import MIB, FileInfo

if TYPE_CHECKING:
    from strop.sandboxes.local import LocalSandbox

_REASONS = {
    errno.ENOENT: "does not exist",
    errno.EISDIR: "is a folder",
    errno.ENODEV: "is not a regular file",
    errno.ENOTDIR: "has a part that is not a folder",
    errno.ENOSPC: "does not fit: the sandbox's disk or inode limit is reached",
    errno.ENXIO: "is not a regular file",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """A user of a sandbox."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


ROOT = Identity(0, 0, (), "/root")


async def find_user(sandbox: LocalSandbox, user: str | int) -> Identity:
    """A user by name, id or "id:group", looked up in the sandbox's own /etc/passwd and /etc/group.

    Raises:
        FileProblem: no user of that name.
    """
    if user in ("root", 0, "0"):
        return ROOT
    name, _, group = str(user).partition(":")
    number = int(name) if name.isdecimal() else None
    uid, gid, home = number, number or 0, "/"
    for entry in await _database(sandbox, "/etc/passwd", 7):
        if entry[0] == name or (number is not None and entry[2] == name):
            uid, gid, home, name = int(entry[2]), int(entry[3]), entry[5] or "/", entry[0]
            break
    if uid is None:
        raise FileProblem("/etc/passwd", f"has no user named {name!r}")
    groups = await _database(sandbox, "/etc/group", 4)
    if group:
        gid = int(group) if group.isdecimal() else next((int(entry[2]) for entry in groups if entry[0] == group), -1)
    if not (0 <= uid < 65536 and 0 <= gid < 65536):
        raise FileProblem("/etc/passwd", f"gives {user!r} an id outside 0 to 65535")
    members = tuple(int(entry[2]) for entry in groups if name in entry[3].split(","))[: wire.MAX_GROUPS]
    return Identity(uid, gid, members, home)


async def _database(sandbox: LocalSandbox, path: str, fields: int) -> list[list[str]]:
    """The lines of a passwd-like file whose numeric field is a number; others are skipped, as libc does."""
    try:
        text = (await read(sandbox, path, MIB)).decode("utf-8", "replace")
    except FileProblem:
        return []
    lines = (line.split(":") for line in text.splitlines())
    return [
        line for line in lines if len(line) == fields and line[2].isdecimal() and (fields == 4 or line[3].isdecimal())
    ]


def _raise(path: str, code: int, limit: int | None = None) -> None:
    if code == errno.EFBIG and limit is not None:
        raise FileProblem(path, f"is larger than {limit} bytes")
    if code:
        raise FileProblem(path, _REASONS.get(code) or f"failed: {os.strerror(code)}")


async def read(sandbox: LocalSandbox, path: str, max_bytes: int) -> bytes:
    """See `Sandbox.get`."""
    result = await sandbox.file_operation(wire.Files.READ, path, limit=max_bytes, keep=2 * max_bytes + 2)
    if result.timed_out:
        raise FileProblem(path, "could not be read in time")
    _raise(path, result.exit_code, max_bytes)
    return result.stdout


async def write(sandbox: LocalSandbox, path: str, data: bytes, mode: int, user: str | int | None) -> None:
    """See `Sandbox.put`."""
    identity = ROOT if user is None else await find_user(sandbox, user)
    result = await sandbox.file_operation(
        wire.Files.WRITE, path, stdin=data, mode=mode & 0o7777, limit=len(data), identity=identity
    )
    if result.timed_out:
        raise FileProblem(path, "could not be written in time")
    _raise(path, result.exit_code)


@dataclass(frozen=True, slots=True)
class _Entry:
    type: str
    path: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    data: bytes


def _entries(stream: bytes) -> Iterator[_Entry]:
    """Parse the agent's stream.

    Raises:
        ValueError: it is cut off, or claims what can't be.
    """
    at = 0
    while True:
        try:
            kind, mode, uid, gid, length, _, mtime, size = wire.ENTRY.unpack_from(stream, at)
        except struct.error:
            raise ValueError("the stream ends too early") from None
        at += wire.ENTRY.size
        type = chr(kind) if kind < 128 else "?"
        if type == "e":
            return
        carried = size if type in "fl" else 0
        if type not in "fldiswo" or at + length + carried > len(stream):
            raise ValueError(f"an entry of type {type!r} with {length} + {carried} bytes does not fit")
        path = stream[at : at + length].decode("utf-8", "surrogateescape")
        data = stream[at + length : at + length + carried]
        at += length + carried
        yield _Entry(type, path, mode & 0o7777, uid, gid, mtime, size, data)


async def read_tree(sandbox: LocalSandbox, path: str, max_bytes: int) -> bytes:
    """See `Sandbox.get_archive`."""
    return await _archive(sandbox, wire.Files.PACK, path, max_bytes)


async def read_changes(sandbox: LocalSandbox, max_bytes: int) -> bytes:
    """The writable layer as a tar archive in the form of an OCI layer: what was removed is a .wh. member."""
    return await _archive(sandbox, wire.Files.CHANGES, "/", max_bytes)


async def _archive(sandbox: LocalSandbox, operation: wire.Files, path: str, max_bytes: int) -> bytes:
    result = await sandbox.file_operation(operation, path, limit=max_bytes, keep=4 * max_bytes + 128 * MIB)
    if result.timed_out:
        raise FileProblem(path, "could not be read in time")
    _raise(path, result.exit_code, max_bytes)
    try:
        return await asyncio.to_thread(_as_tar, result.stdout)
    except ValueError as error:
        raise SandboxFailure(f"sandbox {sandbox.id} sent a broken tree: {error}") from None


def _as_tar(stream: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for entry in _entries(stream):
            archive.addfile(_member(entry), io.BytesIO(entry.data) if entry.type == "f" else None)
    return buffer.getvalue()


def _member(entry: _Entry) -> tarfile.TarInfo:
    member = tarfile.TarInfo(entry.path)
    member.mode, member.mtime, member.uid, member.gid = entry.mode, entry.mtime, entry.uid, entry.gid
    if entry.type == "d":
        member.type = tarfile.DIRTYPE
    elif entry.type == "w":
        folder, slash, name = entry.path.rpartition("/")
        member.name = f"{folder}{slash}.wh.{name}"
    elif entry.type == "o":
        member.name = f"{entry.path}/.wh..wh..opq"
    elif entry.type == "l":
        member.type, member.linkname = tarfile.SYMTYPE, entry.data.decode("utf-8", "surrogateescape")
    else:
        member.size = len(entry.data)
    return member


def checked_member(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """The member as tarfile's data filter leaves it, in a folder that does not exist here."""
    if not hasattr(tarfile, "data_filter"):
        raise FileProblem(path, "can't take archives: Python 3.11.4 or newer is needed, for tarfile's filter")
    try:
        return tarfile.data_filter(member, "/nonexistent-root")
    except tarfile.FilterError as error:
        raise FileProblem(path, f"can't take the archive's member {member.name!r}: {error}") from None


async def write_tree(sandbox: LocalSandbox, path: str, archive: bytes, user: str | int | None) -> None:
    """See `Sandbox.put_archive`."""
    identity = ROOT if user is None else await find_user(sandbox, user)
    stream = await asyncio.to_thread(_as_entries, archive, path)
    result = await sandbox.file_operation(wire.Files.UNPACK, path, stdin=stream, identity=identity)
    if result.timed_out:
        raise FileProblem(path, "could not be written in time")
    _raise(path, result.exit_code)


def _as_entries(archive: bytes, path: str) -> bytes:
    stream = bytearray()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
            for original in opened:
                member = checked_member(original, path)
                if member is not None:
                    _append(stream, opened, member)
    except tarfile.TarError as error:
        raise FileProblem(path, f"can't take the archive: {error}") from None
    stream += wire.ENTRY.pack(ord("e"), 0, 0, 0, 0, 0, 0, 0)
    return bytes(stream)


def _append(stream: bytearray, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
    name = member.name.strip("/").encode("utf-8", "surrogateescape")
    mode = member.mode if member.mode is not None else 0o755 if member.isdir() else 0o644
    if member.isdir():
        kind, data = "d", b""
    elif member.issym():
        kind, data = "l", member.linkname.encode("utf-8", "surrogateescape")
    else:
        source = archive.extractfile(member)
        kind, data = "f", source.read() if source is not None else b""
    if name and name != b".":
        stream += (
            wire.ENTRY.pack(ord(kind), mode & 0o777, 0, 0, len(name), 0, int(member.mtime or 0), len(data))
            + name
            + data
        )


async def list_folder(sandbox: LocalSandbox, path: str) -> list[FileInfo]:
    """See `Sandbox.list`."""
    result = await sandbox.file_operation(wire.Files.LIST, path, keep=256 * MIB)
    _raise(path, result.exit_code)
    kinds: dict[str, Literal["file", "folder", "link", "special"]] = {"i": "file", "d": "folder", "l": "link"}
    try:
        found = [
            FileInfo(
                entry.path, kinds.get(entry.type, "special"), entry.size, entry.mode, entry.uid, entry.gid, entry.mtime
            )
            for entry in _entries(result.stdout)
        ]
    except ValueError as error:
        raise SandboxFailure(f"sandbox {sandbox.id} sent a broken listing: {error}") from None
    return sorted(found, key=lambda info: info.path)
