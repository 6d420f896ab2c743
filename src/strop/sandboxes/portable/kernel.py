"""The system calls that the standard library does not have, through the C library that the interpreter has loaded."""

from __future__ import annotations

import ctypes
import os
import platform

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
_MNT_DETACH, _SECCOMP_MODE_FILTER, _CAPABILITY_VERSION_3, _LAST_CAPABILITY = 2, 2, 0x20080522, 63
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def prctl(option: int, argument: int = 0) -> None:
    """See prctl(2)."""
    _check(_libc.prctl(option, ctypes.c_ulong(argument), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """See mount(2)."""
    data = options.encode() or None
    _check(_libc.mount(source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data))


def enter_root(folder: str) -> None:
    """Make a mounted folder the root, and let go of the old one."""
    os.chdir(folder)
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[platform.machine()]), b".", b"."))
    _check(_libc.umount2(b".", _MNT_DETACH))
    os.chdir("/")


def keep_capabilities(kept: int) -> None:
    """Drop every capability that is not in the mask, for ever."""
    for capability in range(_LAST_CAPABILITY + 1):
        if not kept >> capability & 1:
            try:
                prctl(PR_CAPBSET_DROP, capability)
            except OSError:  # the kernel knows fewer
                break
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)))


def install_filter(program: bytes) -> None:
    """Install a seccomp filter, given as an array of struct sock_filter."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))

    given = Program(len(program) // 8, program)
    pointer = ctypes.cast(ctypes.byref(given), ctypes.c_void_p)
    _check(
        _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))
    )
