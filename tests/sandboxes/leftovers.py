"""What pools of this process have made and not yet taken back."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from strop.sandboxes.cgroups import find_roots


def groups_of_this_process() -> list[Path]:
    """Control groups that pools of this process own."""
    return [found for folder in find_roots().folders.values() for found in folder.glob(f"strop-{os.getpid()}-*")]


def processes_in_groups() -> list[int]:
    return [
        int(pid)
        for folder in groups_of_this_process()
        for file in folder.rglob("cgroup.procs")
        for pid in file.read_text().split()
    ]


def zygotes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name() == "zygote_helper"]
