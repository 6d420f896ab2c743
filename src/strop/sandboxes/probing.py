"""What kind of sandbox this machine can run, what is missing, and which command mends it.

The verdict comes from making a sandbox, not from guessing; the guesses only explain a failure.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from strop.errors import StropError
from strop.sandboxes.cgroups import CgroupRoots, find_roots
from strop.sandboxes.errors import SandboxFailure
from strop.sandboxes.idmaps import find_id_map
from strop.sandboxes.images import Image
from strop.sandboxes.tiers import TIERS, Lack, Tier, obstacle


@dataclass(frozen=True, slots=True)
class Report:
    """What `probe` found.

    Attributes:
        tier: the strongest kind of sandbox that this machine makes, see `tiers.Tier`, or "none".
        limits: "groups" where control groups limit a whole sandbox, else "processes": each process alone, and CPU time
            not at all, so that pools must be told `allow_weak`.
        lacks: what is missing, the fatal ones first.
        cgroups: hierarchies in use, by name.
        detail: one sentence about what was tried.
    """

    tier: str
    limits: Literal["groups", "processes"]
    lacks: tuple[Lack, ...]
    cgroups: tuple[str, ...]
    detail: str

    def __str__(self) -> str:
        lines = [
            f"sandboxes: {self.tier}, limits by {self.limits} ({self.detail})",
            f"  control groups: {', '.join(self.cgroups) or 'none'}",
        ]
        lines += [f"  missing: {lack.what}, for {lack.why}. To mend: {lack.mend}" for lack in self.lacks]
        return "\n".join(lines)


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _kernel_lacks() -> list[Lack]:
    """Settings that are known to forbid namespaces."""
    lacks = []
    if _setting("user/max_user_namespaces") in (None, "0"):
        lacks.append(
            Lack("user namespaces", "users that are nobody outside", "sysctl -w user.max_user_namespaces=65536")
        )
    if _setting("kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        lacks.append(
            Lack(
                "AppArmor's leave for user namespaces",
                "making them",
                "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
            )
        )
    if "overlay" not in Path("/proc/filesystems").read_text():
        lacks.append(Lack("overlayfs", "roots that are written to without copying", "modprobe overlay"))
    return lacks


def _lacks(roots: CgroupRoots) -> list[Lack]:
    found = (obstacle(tier) for tier in TIERS if tier != "rootless")
    lacks = [lack for lack in found if lack is not None]
    lacks += _kernel_lacks()
    if find_id_map().count == 1:
        lacks.append(
            Lack(
                "newuidmap, or a range of this user in /etc/subuid and /etc/subgid",
                "more than one user inside",
                "apt-get install uidmap && usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER",
                fatal=False,
            )
        )
    if roots.missing:
        lacks.append(
            Lack(
                f"writable control groups for {', '.join(roots.missing)}",
                "limits of memory, processes and CPU",
                "mount -o remount,rw /sys/fs/cgroup, or start the container with --cgroupns=host -v /sys/fs/cgroup:/sys/fs/cgroup:rw",
            )
        )
    if not ({"unified", "unified-limits"} & set(roots.folders)):
        lacks.append(
            Lack(
                "a version 2 control group hierarchy",
                "stopping a whole sandbox at one instant; signals do it otherwise",
                "mount -t cgroup2 none /sys/fs/cgroup/unified",
                fatal=False,
            )
        )
    return lacks


async def _try(tier: Tier) -> str | None:
    """Make a sandbox and run something; the reason if that fails."""
    from strop.sandboxes.pool import LocalPool

    try:
        async with LocalPool(Image.host(), tier=tier, least=tier, allow_weak=True) as pool:
            sandbox = await pool.create()
            result = await sandbox.exec("echo alive", timeout=10)
            return None if result.text == "alive\n" else f"a command printed {result.text!r}"
    except (StropError, SandboxFailure, OSError) as error:
        return str(error)


def _in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def probe() -> Report:
    """Try to make a sandbox here, of the strongest tier that works, and say what stands in the way of the stronger ones.
    Takes about a tenth of a second."""
    if sys.platform != "linux":
        lack = Lack("Linux", "namespaces", "use a remote pool, see docs/sandboxes.md")
        return Report("none", "processes", (lack,), (), f"this is {sys.platform}")
    roots = find_roots()
    lacks, groups = tuple(_lacks(roots)), tuple(sorted(roots.folders))
    limits: Literal["groups", "processes"] = "processes" if roots.missing else "groups"
    reasons: list[str] = []
    for tier in TIERS:
        if obstacle(tier) is not None:
            continue
        outcome: list[str | None] = [None]
        _in_thread(lambda tier=tier, outcome=outcome: outcome.__setitem__(0, asyncio.run(_try(tier))))  # type: ignore[misc]
        if outcome[0] is None:
            detail = "; ".join(["a sandbox was made and ran a command", *reasons])
            return Report(tier, limits, lacks, groups, detail)
        reasons.append(f"{tier} failed: {outcome[0]}")
    return Report("none", limits, lacks, groups, "; ".join(reasons) or "there was nothing to try")
