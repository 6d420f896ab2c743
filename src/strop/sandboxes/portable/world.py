"""From the place that bubblewrap made to a sandbox: mounts, limits, loss of privileges; helper/setup.c in Python."""

from __future__ import annotations

import contextlib
import os
import resource
from typing import Any

from strop.sandboxes.portable.kernel import (
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    enter_root,
    install_filter,
    keep_capabilities,
    mount,
    prctl,
)

#: Where everything is put together: a folder that bubblewrap made in its own /dev.
PLACE = "/dev/strop"
#: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, as in helper/setup.c.
_KEPT = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 8, 10))
#: Inodes of the writable layer that are taken here, beside a link for every layer.
_OWN_INODES = 11
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}


class SetUpError(Exception):
    """A stage of it failed.

    Args:
        stage: as it completes "could not …".
        error: errno value.
    """

    def __init__(self, stage: str, error: int) -> None:
        self.stage, self.error = stage, error
        super().__init__(stage)


def set_up(specification: dict[str, Any]) -> int:
    """Do all of it; returns a descriptor of the writable layer.

    Args:
        specification: "layers" (topmost first), "binds" (pairs of host path and path inside), "disk", "inodes",
            "open_files", "processes" and "memory" (None where a control group has it), "filter" (path).

    Raises:
        SetUpError: what could not be done.
    """
    with open(specification["filter"], "rb") as file:
        program = file.read()
    stage = "become root inside"
    try:
        _become_root()
        stage = "mount the writable layer"
        os.umask(0o022)
        upper = _mount_upper(specification["disk"], specification["inodes"] + len(specification["layers"]))
        stage = "mount the overlay"
        _mount_root(specification["layers"])
        stage = "bind a host folder (is its target in the image?)"
        for source, target in specification["binds"]:
            mount(source, f"{PLACE}/root{target}", flags=MS_BIND | MS_REC)  # read-only since bubblewrap
        stage = "mount /dev (the image needs an empty folder of this name)"
        _mount_devices()
        stage = "mount /proc (is the outer /proc masked?)"
        _mount_proc()
        stage = "enter the root"
        enter_root(f"{PLACE}/root")
        stage = "limit resources"
        _limit(specification)
        stage = "give up privileges"
        keep_capabilities(_KEPT)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        prctl(PR_SET_DUMPABLE, 0)
        prctl(PR_SET_PDEATHSIG, 9)
        stage = "install the seccomp filter"
        install_filter(program)
    except OSError as error:
        raise SetUpError(stage, error.errno or 0) from error
    return upper


def _become_root() -> None:
    with contextlib.suppress(PermissionError):  # of a map of one id, where it can't be and need not
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _mount_upper(disk: int, inodes: int) -> int:
    """One quota for files and /dev/shm; returns a descriptor of the overlay's upper folder."""
    mount("tmpfs", PLACE, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={disk},nr_inodes={inodes + _OWN_INODES}")
    for name in ("upper", "work", "shm", "root", "lower"):
        os.mkdir(f"{PLACE}/{name}")
    os.chmod(f"{PLACE}/shm", 0o1777)
    return os.open(f"{PLACE}/upper", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _mount_root(layers: list[str]) -> None:
    """Layers go by short names: mount(2) takes 4 KiB of options, and commas and colons would have to be escaped."""
    os.chdir(f"{PLACE}/lower")
    for number, layer in enumerate(layers):
        os.symlink(layer, str(number))
    lower = ":".join(str(number) for number in range(len(layers)))
    options = f"userxattr,upperdir={PLACE}/upper,workdir={PLACE}/work,lowerdir={lower}"
    mount("overlay", f"{PLACE}/root", "overlay", MS_NOSUID | MS_NODEV, options)


def _mount_devices() -> None:
    devices = f"{PLACE}/root/dev"
    mount("tmpfs", devices, "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k")
    for name in _DEVICES:
        os.close(os.open(f"{devices}/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        mount(f"/dev/{name}", f"{devices}/{name}", flags=MS_BIND)
    for name, target in _LINKS.items():
        os.symlink(target, f"{devices}/{name}")
    for name in ("pts", "shm"):
        os.mkdir(f"{devices}/{name}")
    mount(f"{PLACE}/shm", f"{devices}/shm", flags=MS_BIND)
    terminals = "newinstance,max=64,ptmxmode=0666,mode=0620" + (",gid=5" if _is_mapped(5) else "")
    mount("devpts", f"{devices}/pts", "devpts", MS_NOSUID | MS_NOEXEC, terminals)
    mount("", devices, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NOEXEC)


def _is_mapped(group: int) -> bool:
    with open("/proc/self/gid_map") as file:
        return any(int(start) <= group < int(start) + int(count) for start, _, count in map(str.split, file))


def _mount_proc() -> None:
    """Of the agent itself nobody sees more than that it is there: it was executed inside, so that its folder is root's
    there, and this root may list its descriptors."""
    root, masks = f"{PLACE}/root/proc", f"{PLACE}/masks"
    mount("proc", root, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    with contextlib.suppress(FileNotFoundError), open(f"{root}/sys/user/max_inotify_instances", "w") as file:
        file.write("32")  # counted for a user of the host, and so for all sandboxes together
    os.makedirs(f"{masks}/agent")
    for name, content in (("empty", b""), ("agent/cmdline", b"sandbox\0")):
        with open(f"{masks}/{name}", "wb") as mask:
            mask.write(content)
    for name, target in (("empty", "cmdline"), ("agent", "1")):
        mount(f"{masks}/{name}", f"{root}/{target}", flags=MS_BIND)
        mount("", f"{root}/{target}", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _limit(specification: dict[str, Any]) -> None:
    """A core limit of 1 byte, not 0: a core_pattern that is a pipe is skipped only then, see core(5)."""
    files = specification["open_files"]
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, 1024), files))
    if specification["processes"] is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (specification["processes"],) * 2)
    if specification["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (specification["memory"],) * 2)
