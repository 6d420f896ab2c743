"""File operations inside a sandbox, run in a short-lived child of the agent as the user that was asked for; helper/files.c
in Python. Contents travel over descriptors 0 and 1; the outcome is an errno value."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from strop.sandboxes.wire import ENTRY, AgentRequest, Files

_MAX_DEPTH, _MAX_ENTRIES, _PIECE = 128, 200000, 65536
_OPAQUE = "user.overlay.opaque"


class _Refused(Exception):
    """Args: the errno value of the outcome."""


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise _Refused(errno.EPIPE)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _open_regular(path: bytes, folder: int | None = None, flags: int = 0) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags, dir_fd=folder)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise _Refused(errno.EISDIR if stat.S_ISDIR(mode) else errno.ENODEV)
    return fd


def _read_file(path: bytes, limit: int) -> None:
    fd = _open_regular(path)
    if os.fstat(fd).st_size > limit:
        raise _Refused(errno.EFBIG)
    total = 0
    while data := os.read(fd, _PIECE):  # to the end of file: files of /proc claim to be empty
        total += len(data)
        if total > limit:
            raise _Refused(errno.EFBIG)
        _write_all(1, data)


def _make_parents(path: bytes) -> None:
    slash = path.find(b"/", 1)
    while slash > 0:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path[:slash], 0o755)
        slash = path.find(b"/", slash + 1)


def _write_file(path: bytes, mode: int, mtime: int, size: int) -> None:
    """Writes beside and renames into place: readers see the old file or the new one, and a symlink is replaced."""
    _make_parents(path)
    beside = path + b".%d.part" % os.getpid()
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        while size:
            piece = _read_all(0, min(size, _PIECE))
            _write_all(fd, piece)
            size -= len(piece)
        os.fchmod(fd, mode & 0o7777)
        if mtime >= 0:
            os.utime(fd, (mtime, mtime))
        os.rename(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


class _Sender:
    """Sends a tree as entries, within a budget of bytes.

    Args:
        budget: of file contents.
        contents: send what files hold, not only their names.
        as_layer: send overlayfs's own marks too.
    """

    def __init__(self, budget: int, contents: bool, as_layer: bool) -> None:
        self._budget, self._contents, self._as_layer = budget, contents, as_layer
        self._count = 0

    def send(self, folder: int) -> None:
        """Send what lies in an open folder, then the end."""
        self._tree(folder, b"", 0)
        self._entry("e", b"", None, 0)

    def _entry(self, kind: str, path: bytes, status: os.stat_result | None, size: int) -> None:
        self._count += 1
        if self._count > _MAX_ENTRIES:
            raise _Refused(errno.EOVERFLOW)
        fields = (
            (0, 0, 0, 0)
            if status is None
            else (status.st_mode & 0o7777, status.st_uid, status.st_gid, int(status.st_mtime))
        )
        mode, uid, gid, mtime = fields
        _write_all(1, ENTRY.pack(ord(kind), mode, uid, gid, len(path), 0, mtime, size) + path)

    def _tree(self, folder: int, path: bytes, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _Refused(errno.ELOOP)
        for name in os.listdir(folder):
            raw = os.fsencode(name)
            below = path + b"/" + raw if path else raw
            if len(below) >= 4096:
                raise _Refused(errno.ENAMETOOLONG)
            try:
                status = os.stat(raw, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            self._one(folder, raw, below, status, depth)

    def _one(self, folder: int, name: bytes, path: bytes, status: os.stat_result, depth: int) -> None:
        mode = status.st_mode
        if stat.S_ISLNK(mode):
            target = os.readlink(name, dir_fd=folder)
            self._entry("l", path, status, len(target))
            _write_all(1, target)
        elif stat.S_ISREG(mode):
            self._file(folder, name, path, status)
        elif stat.S_ISDIR(mode):
            self._folder(folder, name, path, status, depth)
        elif self._as_layer and stat.S_ISCHR(mode) and status.st_rdev == 0:
            self._entry("w", path, status, 0)
        elif not self._contents:
            self._entry("s", path, status, 0)

    def _file(self, folder: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        if not self._contents:
            self._entry("i", path, status, status.st_size)
            return
        try:
            fd = _open_regular(name, folder, os.O_NOFOLLOW)
        except PermissionError:
            return
        left = os.fstat(fd).st_size
        if left > self._budget:
            raise _Refused(errno.EFBIG)
        self._budget -= left
        self._entry("f", path, status, left)
        while left:  # what shrank while it was read keeps the announced size
            data = os.read(fd, min(left, _PIECE)) or bytes(min(left, _PIECE))
            _write_all(1, data)
            left -= len(data)
        os.close(fd)

    def _folder(self, folder: int, name: bytes, path: bytes, status: os.stat_result, depth: int) -> None:
        self._entry("d", path, status, 0)
        if not self._contents:
            return
        try:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except (PermissionError, FileNotFoundError):
            return
        if self._as_layer and is_opaque(below):
            self._entry("o", path, status, 0)
        self._tree(below, path, depth + 1)
        os.close(below)


def is_opaque(folder: int) -> bool:
    """Whether overlayfs shows nothing of lower layers in an open folder."""
    try:
        return os.getxattr(folder, _OPAQUE) == b"y"
    except OSError:
        return False


def _unpack_tree(root: bytes) -> None:
    while True:
        kind, mode, _, _, length, _, mtime, size = ENTRY.unpack(_read_all(0, ENTRY.size))
        type = chr(kind)
        if type == "e":
            return
        if len(root) + length + 1 >= 4096:
            raise _Refused(errno.ENAMETOOLONG)
        path = root + b"/" + _read_all(0, length)
        _make_parents(path)
        if type == "d":
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, mode & 0o7777)
        elif type == "l":
            target = _read_all(0, size)
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.symlink(target, path)
        elif type == "f":
            _write_file(path, mode, mtime, size)
        else:
            raise _Refused(errno.EBADMSG)


def _run(request: AgentRequest, path: bytes, upper: int) -> None:
    os.chdir("/")
    operation = Files(request.operation)
    if operation is Files.READ:
        _read_file(path, request.limit)
    elif operation is Files.WRITE:
        _write_file(path, request.mode, request.mtime, request.limit)
    elif operation is Files.UNPACK:
        _unpack_tree(path)
    elif operation is Files.CHANGES:
        _Sender(request.limit, contents=True, as_layer=True).send(upper)
    else:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK | os.O_CLOEXEC)
        _Sender(request.limit, contents=operation is Files.PACK, as_layer=False).send(folder)


def run_file_operation(request: AgentRequest, path: bytes, upper: int) -> int:
    """Do it; returns the outcome as an errno value.

    Args:
        request: what is asked.
        path: of the sandbox.
        upper: descriptor of the writable layer, for its changes.
    """
    try:
        _run(request, path, upper)
        return 0
    except _Refused as refused:
        return int(refused.args[0])
    except OSError as error:
        return error.errno or errno.EIO
