"""The control groups of one sandbox that is not made by the zygote, which has its own; helper/cgroups.c in Python."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from strop.sandboxes.cgroups import CgroupRoots
from strop.sandboxes.wire import ControlMessage

#: Tries, and seconds between them, until a group is empty, which is a little after its last process has ended.
_TRIES, _PAUSE = 2000, 0.0005


class Groups:
    """One group in every hierarchy.

    Args:
        roots: where.
        owner: name of the group of all that this process makes.
        limits: what the sandbox may use.

    Raises:
        OSError: one can't be made or limited.
    """

    def __init__(self, roots: CgroupRoots, owner: str, limits: ControlMessage) -> None:
        self._folders = {name: root / owner / str(limits.id) for name, root in roots.folders.items()}
        for name, folder in self._folders.items():
            folder.mkdir(parents=True, exist_ok=True)
            if name == "unified-limits":
                (folder.parent / "cgroup.subtree_control").write_text("+memory +pids +cpu")
            for file, value in _settings(name, limits):
                with contextlib.suppress(FileNotFoundError):  # memory.swap.max, on kernels without swap accounting
                    (folder / file).write_text(value)

    def attach(self, pid: int) -> None:
        """Put a process, and what it will start, into them."""
        for folder in self._folders.values():
            (folder / "cgroup.procs").write_text(str(pid))

    def open_oom_counter(self) -> int | None:
        """A descriptor of the file that counts what the kernel killed for memory; None without that group."""
        for name, file in (("memory", "memory.oom_control"), ("unified-limits", "memory.events")):
            if name in self._folders:
                return os.open(self._folders[name] / file, os.O_RDONLY | os.O_CLOEXEC)
        return None

    def oom_kills(self) -> int:
        """What that file says now."""
        counter = self.open_oom_counter()
        if counter is None:
            return 0
        try:
            _, found, after = os.pread(counter, 512, 0).partition(b"oom_kill ")
            return int(after.split()[0]) if found else 0
        finally:
            os.close(counter)

    async def remove(self) -> None:
        """Remove them, once everything in them has ended."""
        for folder in self._folders.values():
            for _ in range(_TRIES):
                try:
                    _rmdir(folder)
                    break
                except OSError:
                    await asyncio.sleep(_PAUSE)


def _rmdir(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        folder.rmdir()


def _settings(name: str, limits: ControlMessage) -> list[tuple[str, str]]:
    """(file, value) of the limits in a hierarchy."""
    quota = limits.cpu_percent * 1000
    return {
        "memory": [("memory.limit_in_bytes", str(limits.memory))],
        "pids": [("pids.max", str(limits.processes))],
        "cpu": [("cpu.cfs_quota_us", str(quota or -1))],
        "unified-limits": [
            ("memory.max", str(limits.memory)),
            ("memory.swap.max", "0"),
            ("pids.max", str(limits.processes)),
            ("cpu.max", f"{quota or 'max'} 100000"),
        ],
    }.get(name, [])
