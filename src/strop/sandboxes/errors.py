"""What can go wrong with a sandbox itself; a program that fails inside one is a result, never one of these.

Failures of the place (`SandboxFailure` and below) are `AttemptError`s: the attempt is retried and never scored. What
the caller asked for and can't have (`FileProblem`, `SandboxesUnavailable`) are `StropError`s.
"""

from __future__ import annotations

import errno
import os

from strop.errors import AttemptError, StropError
from strop.rollouts import FailureKind


class SandboxFailure(AttemptError):
    """A sandbox could not be made, or broke."""

    def __init__(self, reason: str) -> None:
        super().__init__(FailureKind.SANDBOX, reason)


class SandboxDead(SandboxFailure):
    """The sandbox ended, or was destroyed, before the answer came."""


class ResourceExhausted(SandboxFailure):
    """The host has no more of something: processes, descriptors, namespaces, memory."""


class SandboxStall(SandboxFailure):
    """A wait for the sandbox machinery passed its deadline."""


class SandboxesUnavailable(StropError):
    """This machine can't run the sandboxes that were asked for. Says what is missing and how to mend it."""


class NotOffered(StropError):
    """Something that the sandboxes of another system can't do, or a limit that they don't have."""


class FileProblem(StropError):
    """A file of a sandbox can't be read or written.

    Args:
        path: as the caller gave it.
        reason: for example "is larger than 1048576 bytes".
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path!r} {reason}")


#: What there is no more of, by errno value, and which limit of the host that is.
_EXHAUSTED = {
    errno.EAGAIN: "processes: kernel.pid_max, kernel.threads-max, or pids.max of the host's own control group",
    errno.EMFILE: "descriptors of one process: ulimit -n, of which a live sandbox takes one",
    errno.ENFILE: "descriptors of the machine: fs.file-max",
    errno.ENOMEM: "memory",
    errno.ENOSPC: "namespaces, mounts or control groups: user.max_*_namespaces, fs.mount-max, 65535 memory groups",
    errno.EUSERS: "user namespaces: user.max_user_namespaces",
    errno.EDQUOT: "a quota",
}


def failure(stage: str, error: int) -> SandboxFailure:
    """The typed error for an errno value at a stage of making or using a sandbox."""
    said = f"could not {stage}: {os.strerror(error)}"
    if error in _EXHAUSTED:
        return ResourceExhausted(f"{said} (the host has no more {_EXHAUSTED[error]})")
    return SandboxFailure(said)
