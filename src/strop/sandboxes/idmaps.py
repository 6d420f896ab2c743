"""Which users of the host stand behind the users of a sandbox, and who may write that down for the kernel."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.sandboxes.errors import SandboxFailure

#: First host id of the 65,536 that root's sandboxes' users have. One range for all of them: they never share a file.
BASE_ID = 0x70000000
ID_RANGE = 65536


@dataclass(frozen=True, slots=True)
class IdMap:
    """The users of sandboxes.

    Attributes:
        users, groups: (first id inside, first id of the host, count), ascending and without gaps.
        writer: "root" writes any map, "newuidmap" those of /etc/subuid, "self" maps one id alone.
    """

    users: tuple[tuple[int, int, int], ...]
    groups: tuple[tuple[int, int, int], ...]
    writer: Literal["root", "newuidmap", "self"]

    @property
    def count(self) -> int:
        """How many users exist inside."""
        return min(sum(part[2] for part in self.users), sum(part[2] for part in self.groups), ID_RANGE)

    def apply(self, pid: int) -> None:
        """Map the ids of a process that has just entered a new user namespace.

        Raises:
            SandboxFailure: the kernel or newuidmap refused; says what was said.
        """
        if self.writer == "self":
            _write(pid, "setgroups", "deny")
        for kind, parts in (("uid", self.users), ("gid", self.groups)):
            if self.writer == "newuidmap":
                _ask_setuid_program(kind, pid, parts)
            else:
                _write(pid, f"{kind}_map", "\n".join(" ".join(map(str, part)) for part in parts))


def find_id_map() -> IdMap:
    """The largest map that this process may write."""
    if os.geteuid() == 0:
        whole = ((0, BASE_ID, ID_RANGE),)
        return IdMap(whole, whole, "root")
    users, groups = _subordinate("subuid"), _subordinate("subgid")
    if users and groups and shutil.which("newuidmap") and shutil.which("newgidmap"):
        return IdMap(((0, os.geteuid(), 1), users), ((0, os.getegid(), 1), groups), "newuidmap")
    return IdMap(((0, os.geteuid(), 1),), ((0, os.getegid(), 1),), "self")


def _subordinate(name: str) -> tuple[int, int, int] | None:
    """This user's first range in /etc/subuid or /etc/subgid, as ids from 1."""
    try:
        owner = pwd.getpwuid(os.geteuid()).pw_name
        lines = [line.split(":") for line in Path("/etc", name).read_text().splitlines()]
    except (OSError, KeyError):
        return None
    for line in lines:
        if len(line) == 3 and line[0] in (owner, str(os.geteuid())) and line[1].isdecimal() and line[2].isdecimal():
            return (1, int(line[1]), min(int(line[2]), ID_RANGE - 1))
    return None


def _write(pid: int, name: str, text: str) -> None:
    try:
        Path(f"/proc/{pid}/{name}").write_text(text)
    except OSError as error:
        raise SandboxFailure(f"could not write {name} of a sandbox: {error.strerror}") from None


def _ask_setuid_program(kind: str, pid: int, parts: tuple[tuple[int, int, int], ...]) -> None:
    command = [f"new{kind}map", str(pid), *(str(number) for part in parts for number in part)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise SandboxFailure(f"{command[0]} refused: {done.stderr.strip()}")
