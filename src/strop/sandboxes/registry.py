"""Which system's sandboxes a setting names, and how its pool is made."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from strop.config import SandboxSettings
from strop.errors import ConfigError
from strop.sandboxes.images import Image
from strop.sandboxes.pool import LocalPool
from strop.sandboxes.sandbox import Limits, SandboxPool
from strop.sandboxes.tiers import TIERS

#: Kinds that this machine's own kernel makes: "auto" takes the strongest tier that works and is not below `least`.
LOCAL = ("auto", *TIERS)
#: Module and class of each other kind; a module is loaded when its kind is asked for.
_ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "http": ("strop.sandboxes.client", "RemotePool"),
    "docker": ("strop.sandboxes.elsewhere.containers", "ContainerPool"),
    "podman": ("strop.sandboxes.elsewhere.containers", "PodmanPool"),
    "kubernetes": ("strop.sandboxes.elsewhere.kubernetes", "KubernetesPool"),
    "e2b": ("strop.sandboxes.elsewhere.e2b", "E2BPool"),
    "daytona": ("strop.sandboxes.elsewhere.daytona", "DaytonaPool"),
    "modal": ("strop.sandboxes.elsewhere.modal", "ModalPool"),
    "prime": ("strop.sandboxes.elsewhere.prime", "PrimePool"),
}
KINDS = (*LOCAL, *_ELSEWHERE)


def make_sandboxes(kind: str = "auto", *, image: Image | str | None = None, **options: Any) -> SandboxPool:
    """A pool of a kind, in a running event loop. Nothing is started before its first sandbox, but what is missing is said.

    Args:
        kind: one of `KINDS`.
        image: root file system of local kinds, the host's own programs if None; for other kinds the name of one, for
            those that take any.
        options: of the pool's class, for example `limits`, `ttl`, `max_live`.

    Raises:
        ConfigError: an unknown kind or option.
        SandboxesUnavailable: a missing SDK or program; says how to install it.
        NotOffered: a limit that the kind doesn't have.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(KINDS)}"
        raise ConfigError("sandboxes.kind", f"there is no kind {kind!r}", hint)
    if kind in LOCAL:
        least = options.pop("least", kind if kind != "auto" else "rootless")
        return _construct(kind, LocalPool, image or Image.host(), tier=kind, least=least, **options)
    if image is not None:
        options["image"] = image
    module, name = _ELSEWHERE[kind]
    return _construct(kind, getattr(importlib.import_module(module), name), **options)


def _construct(kind: str, make: Any, *arguments: Any, **options: Any) -> SandboxPool:
    try:
        pool: SandboxPool = make(*arguments, **options)
    except TypeError as error:
        raise ConfigError("sandboxes.options", f"{kind} sandboxes can't be made of them: {error}", "") from None
    return pool


def from_settings(settings: SandboxSettings, image: Image | None, limits: Limits) -> SandboxPool:
    """The pool that a recipe's settings name.

    Args:
        settings: the table.
        image: see `make_sandboxes`.
        limits: what local sandboxes get where the settings say nothing. Others get their own defaults, since few of
            them have all limits.

    Raises:
        ConfigError, SandboxesUnavailable, NotOffered: see `make_sandboxes`.
    """
    local = settings.kind in LOCAL
    base = limits if local else Limits(timeout=limits.timeout)
    try:
        given = replace(base, **settings.limits)  # type: ignore[arg-type]  # checked by Limits
    except TypeError as error:
        raise ConfigError("sandboxes.limits", str(error), "Fields of strop.sandboxes.Limits") from None
    options: dict[str, Any] = dict(settings.options)
    if settings.kind != "http":  # a server has limits of its own
        options["limits"] = given
    if local:
        options |= {"least": settings.least, "allow_weak": settings.allow_weak}
    return make_sandboxes(settings.kind, image=image, **options)
