"""Where model-written code runs: isolated places, cheap enough for thousands at once.

    async with LocalPool(Image.host()) as pool:
        sandbox = await pool.create()
        print((await sandbox.exec("echo hi")).text)

`LocalPool` is this machine's own kernel; `BlockingPool` is the same without async; `strop.sandboxes.server` and
`strop.sandboxes.client` carry it over HTTP. `probe()` says what this machine can do and what it lacks.
"""

from strop.sandboxes.blocking import BlockingPool, BlockingSandbox
from strop.sandboxes.cgroups import remove_stale
from strop.sandboxes.errors import (
    FileProblem,
    ResourceExhausted,
    SandboxDead,
    SandboxesUnavailable,
    SandboxFailure,
    SandboxStall,
)
from strop.sandboxes.images import Image
from strop.sandboxes.local import LocalSandbox
from strop.sandboxes.pool import LocalPool, LocalSnapshot
from strop.sandboxes.probing import Lack, Report, probe
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

__all__ = [
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
    "Process",
    "PythonSession",
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
    "probe",
    "remove_stale",
]
