"""Applies one overlay layer onto another: the copy behind a live snapshot, and the merge behind a flattened chain;
helper/layers.c in Python.

The source tree was written by a sandbox: symlinks are never followed, devices never opened.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from strop.sandboxes.portable.files import is_opaque

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Overlayfs's pointers into layers of one mount mean nothing in another.
_LEFT_OUT = {"user.overlay.origin", "user.overlay.impure"}
_MAX_DEPTH = 256


def _remove_tree(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        below = os.open(name, _FOLDER, dir_fd=folder)
        for entry in os.listdir(below):
            _remove_tree(below, entry)
        os.close(below)
        os.rmdir(name, dir_fd=folder)


def _copy_attributes(source: int, target: int) -> None:
    for name in os.listxattr(source):
        if name.startswith("user.") and name not in _LEFT_OUT:
            os.setxattr(target, name, os.getxattr(source, name))


def _copy_status(folder: int, name: str, status: os.stat_result) -> None:
    os.chown(name, status.st_uid, status.st_gid, dir_fd=folder, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(name, stat.S_IMODE(status.st_mode), dir_fd=folder)
    os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=folder, follow_symlinks=False)


def _copy_contents(source: int, target: int, size: int) -> None:
    """Hole by hole: a sparse terabyte stays sparse."""
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                break
            raise
        hole = os.lseek(source, at, os.SEEK_HOLE)
        os.lseek(target, at, os.SEEK_SET)
        while at < hole:
            sent = os.sendfile(target, source, at, hole - at)
            if not sent:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            at += sent
    os.ftruncate(target, size)


class _Layers:
    """One source applied to one target; remembers files with several names, so that they keep them."""

    def __init__(self, target: int) -> None:
        self._root = target
        self._links: dict[int, str] = {}

    def apply(self, source: int, target: int, path: str = "", depth: int = 0) -> None:
        if depth > _MAX_DEPTH:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        for name in os.listdir(source):
            below = f"{path}/{name}" if path else name
            status = os.stat(name, dir_fd=source, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                self._folder(source, target, below, name, depth)
            else:
                _remove_tree(target, name)
                if not self._other(source, target, below, name, status):
                    continue
            _copy_status(target, name, status)

    def _folder(self, source: int, target: int, path: str, name: str, depth: int) -> None:
        opened = os.open(name, _FOLDER, dir_fd=source)
        try:
            existing = os.stat(name, dir_fd=target, follow_symlinks=False).st_mode
        except FileNotFoundError:
            existing = 0
        if is_opaque(opened) or not stat.S_ISDIR(existing):
            _remove_tree(target, name)
            os.mkdir(name, 0o700, dir_fd=target)
        into = os.open(name, _FOLDER, dir_fd=target)
        _copy_attributes(opened, into)
        self.apply(opened, into, path, depth + 1)
        os.close(opened)
        os.close(into)

    def _other(self, source: int, target: int, path: str, name: str, status: os.stat_result) -> bool:
        """Copy what is no folder; False if it is left out."""
        mode = status.st_mode
        if stat.S_ISREG(mode):
            self._file(source, target, path, name, status)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
        elif stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or (stat.S_ISCHR(mode) and status.st_rdev == 0):
            os.mknod(name, mode, status.st_rdev, dir_fd=target)
        else:
            return False
        return True

    def _file(self, source: int, target: int, path: str, name: str, status: os.stat_result) -> None:
        if status.st_nlink > 1:
            first = self._links.setdefault(status.st_ino, path)
            if first != path:
                os.link(first, name, src_dir_fd=self._root, dst_dir_fd=target)
                return
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
        into = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=target)
        _copy_contents(opened, into, os.fstat(opened).st_size)
        _copy_attributes(opened, into)
        os.close(opened)
        os.close(into)


def apply_layer(source: int, target: int) -> None:
    """Apply the layer in one open folder onto that in another."""
    _Layers(target).apply(source, target)


def main() -> None:
    """Apply the layers in folders of the command line, lowest first, onto the one in the first."""
    os.umask(0)
    target, *sources = (os.open(path, _FOLDER) for path in sys.argv[1:])
    for source in sources:
        apply_layer(source, target)
