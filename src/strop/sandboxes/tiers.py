"""The kinds of sandbox that a machine can make by itself, strongest first, and what each needs.

Nobody gets a weaker one than he asked for: a pool names the weakest that it takes, and says which one it has.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from strop.errors import ConfigError
from strop.sandboxes.bubblewrap import FILTER, Bubblewrap, find_interpreter
from strop.sandboxes.cgroups import CgroupRoots
from strop.sandboxes.idmaps import find_id_map
from strop.sandboxes.images import Image
from strop.sandboxes.zygote import HELPER, Zygote

if TYPE_CHECKING:
    from strop.sandboxes.local import LocalSandbox

#: "namespaces": made by the helper in C as root; "rootless": by the same helper as any other user; "bubblewrap": by
#: bubblewrap and an agent in Python, as any user.
Tier = Literal["namespaces", "rootless", "bubblewrap"]
TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that this machine lacks.

    Attributes:
        what: the thing.
        why: what it is for.
        mend: a command or step that mends it.
        fatal: whether the strongest tier is impossible without it.
    """

    what: str
    why: str
    mend: str
    fatal: bool = True


_HELPER = Lack(
    "the compiled helper",
    "the tiers namespaces and rootless",
    "apt-get install gcc libc6-dev && pip install --force-reinstall strop",
)
_ROOT = Lack("root", "65,536 user ids inside, idmapped images and limits", "run as root, or in a container that is")
_BUBBLEWRAP = Lack("bubblewrap", "sandboxes without the compiled helper", "apt-get install bubblewrap")


def obstacle(tier: Tier) -> Lack | None:
    """What is missing for a tier, as far as a look can tell; None if it is worth a try."""
    if tier != "bubblewrap" and not HELPER.exists():
        return _HELPER
    if tier == "namespaces" and os.geteuid() != 0:
        return _ROOT
    if tier == "rootless" and os.geteuid() == 0:
        return Lack("another user than root", "the tier rootless", 'run as another user, or use "namespaces"')
    if tier == "bubblewrap":
        return _bubblewrap_obstacle()
    return None


def _bubblewrap_obstacle() -> Lack | None:
    if shutil.which("bwrap") is None:
        return _BUBBLEWRAP
    if not FILTER.exists():
        return Lack(f"a seccomp filter for {platform.machine()}", "the tier bubblewrap", _HELPER.mend)
    if find_interpreter() is None:
        return Lack("a Python that every user may run", "the agent of tier bubblewrap", "apt-get install python3")
    return None


def candidates(asked: Tier | Literal["auto"], least: Tier) -> tuple[Tier, ...]:
    """The tiers that may be tried, in this order.

    Raises:
        ConfigError: an unknown tier, or one that is weaker than `least`.
    """
    if least not in TIERS:
        raise ConfigError("least", f"{least!r} is not known", f"One of {', '.join(TIERS)}")
    allowed = TIERS[: TIERS.index(least) + 1]
    if asked == "auto":
        return allowed
    if asked not in TIERS:
        raise ConfigError("tier", f"{asked!r} is not known", f"auto, or one of {', '.join(TIERS)}")
    if asked not in allowed:
        raise ConfigError("tier", f'"{asked}" is weaker than the least that is taken, "{least}"', f'least = "{asked}"')
    return (asked,)


def make(
    tier: Tier,
    image: Image,
    roots: CgroupRoots,
    on_dead: Callable[..., None],
    on_end: Callable[[], None],
    find: Callable[[int], LocalSandbox | None],
) -> Zygote | Bubblewrap:
    """What makes the sandboxes of a pool, not yet started."""
    if tier == "bubblewrap":
        return Bubblewrap(image, roots, find_id_map(), on_dead, find)
    return Zygote(image, roots, find_id_map(), on_dead, on_end)
