"""Where model-written code runs: isolated places, cheap enough for thousands at once.

    async with LocalPool(Image.host()) as pool:
        sandbox = await pool.create()
        print((await sandbox.exec("echo hi")).text)

`LocalPool` is this machine's own kernel, `make_sandboxes` chooses between it and other systems; `BlockingPool` is the same without async; `strop.sandboxes.server` and
`strop.sandboxes.client` carry it over HTTP. `probe()` says what this machine can do and what it lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.sandboxes.blocking import BlockingPool, BlockingSandbox
from strop.sandboxes.cgroups import remove_stale
from strop.sandboxes.errors import (
    FileProblem,
    NotOffered,
    ResourceExhausted,
    SandboxDead,
    SandboxesUnavailable,
    SandboxFailure,
    SandboxStall,
)
from strop.sandboxes.images import Image
from strop.sandboxes.local import LocalSandbox
from strop.sandboxes.pool import LocalPool, LocalSnapshot
from strop.sandboxes.probing import Report, probe
from strop.sandboxes.sandbox import (
    CellResult,
    Chunk,
    ExecResult,
    FileInfo,
    Limits,
    Process,
    PythonSession,
    Sandbox,
    SandboxPool,
    ShellSession,
    Snapshot,
)
from strop.sandboxes.tiers import TIERS, Lack, Tier

if TYPE_CHECKING:
    from strop.sandboxes.client import RemotePool
    from strop.sandboxes.registry import make_sandboxes
    from strop.sandboxes.server import serve


def __getattr__(name: str) -> Any:
    """What needs a library for HTTP or settings is loaded when it is asked for."""
    if name == "RemotePool":
        from strop.sandboxes.client import RemotePool

        return RemotePool
    if name == "make_sandboxes":
        from strop.sandboxes.registry import make_sandboxes

        return make_sandboxes
    if name == "serve":
        from strop.sandboxes.server import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "TIERS",
    "BlockingPool",
    "BlockingSandbox",
    "CellResult",
    "Chunk",
    "ExecResult",
    "FileInfo",
    "FileProblem",
    "Image",
    "Lack",
    "Limits",
    "LocalPool",
    "LocalSandbox",
    "LocalSnapshot",
    "NotOffered",
    "Process",
    "PythonSession",
    "RemotePool",
    "Report",
    "ResourceExhausted",
    "Sandbox",
    "SandboxDead",
    "SandboxFailure",
    "SandboxPool",
    "SandboxStall",
    "SandboxesUnavailable",
    "ShellSession",
    "Snapshot",
    "Tier",
    "make_sandboxes",
    "probe",
    "remove_stale",
    "serve",
]
