"""Where on this machine control groups for sandboxes can be made, and the removal of those that dead hosts left."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

#: Groups are named strop-PID-STARTTIME-NUMBER after the host process that owns them.
_OWNED = re.compile(r"strop-(\d+)-(\d+)-\d+")
_NEEDED = ("memory", "pids", "cpu")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class CgroupRoots:
    """Folders to make groups in, by the name that the zygote knows them under, and what is missing.

    Attributes:
        folders: "memory", "pids", "cpu" (v1), "unified" (v2, to freeze) or "unified-limits" (v2 for everything).
        missing: controllers that no hierarchy offers.
    """

    folders: dict[str, Path]
    missing: tuple[str, ...]


def _own_paths() -> dict[str, str]:
    """This process's group in each hierarchy: controller (or "" for v2) to path."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def _mount_points() -> dict[str, Path]:
    """Mount point of each v1 controller, and of v2 under ""."""
    points: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options = line.split(" ")[:4]
        if kind == "cgroup2":
            points.setdefault("", Path(point))
        elif kind == "cgroup":
            for name in _NEEDED:
                if name in options.split(","):
                    points.setdefault(name, Path(point))
    return points


def _unified_with_limits(mount: Path, own: str) -> Path | None:
    """The nearest v2 group in which children with memory, pids and cpu can be made.

    A group that has processes of its own can't give controllers to children (the "no internal processes" rule), so
    the parents of our own group are tried too, up to the root, which is exempt.
    """
    candidate = mount / own.lstrip("/")
    while True:
        with contextlib.suppress(OSError):
            wanted = set(_NEEDED)
            if wanted <= set((candidate / "cgroup.controllers").read_text().split()):
                control = candidate / "cgroup.subtree_control"
                if not os.access(candidate, os.W_OK):
                    return None
                if not wanted <= set(control.read_text().split()):
                    control.write_text(" ".join(f"+{name}" for name in _NEEDED))
                return candidate
        if candidate == mount:
            return None
        candidate = candidate.parent


def find_roots() -> CgroupRoots:
    """Look for writable hierarchies: v1 controllers where mounted, else v2; v2 beside v1 for freezing."""
    points, own = _mount_points(), _own_paths()
    folders: dict[str, Path] = {}
    for name in _NEEDED:
        if name in points:
            folder = points[name] / own.get(name, "/").lstrip("/")
            folder = folder if folder.is_dir() else points[name]
            if os.access(folder, os.W_OK):
                folders[name] = folder
    if "" in points:
        complete = None if folders else _unified_with_limits(points[""], own.get("", "/"))
        if complete:
            folders["unified-limits"] = complete
        elif os.access(points[""], os.W_OK):
            folders["unified"] = points[""]
    missing = () if "unified-limits" in folders else tuple(name for name in _NEEDED if name not in folders)
    return CgroupRoots(folders, missing)


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, None if it is gone: with the pid, a name for ever."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError, ValueError):
        return None


def new_owner() -> str:
    """A name for the groups of one pool of this process."""
    return f"strop-{os.getpid()}-{start_time(os.getpid())}-{next(_numbers)}"


def _remove(folder: Path) -> None:
    """Kill what is left in a group and remove it and the groups below it."""
    for child in [entry for entry in folder.iterdir() if entry.is_dir()]:
        _remove(child)
    for _ in range(200):
        with contextlib.suppress(OSError, ValueError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.005)


def remove_owner(roots: CgroupRoots, name: str) -> None:
    """Remove an owner's groups from every hierarchy, if its zygote could not do so itself."""
    for folder in roots.folders.values():
        if (folder / name).is_dir():
            _remove(folder / name)


def remove_stale() -> list[str]:
    """The janitor: remove the groups of owners that are gone. Returns the names that were removed."""
    removed = set()
    for folder in find_roots().folders.values():
        for entry in folder.glob("strop-*"):
            match = _OWNED.fullmatch(entry.name)
            if match and start_time(int(match[1])) != int(match[2]):
                _remove(entry)
                removed.add(entry.name)
    return sorted(removed)
