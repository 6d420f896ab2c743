"""How this process gets its memory from the kernel: buffers are kept when they are freed, and lie in large pages.

A training step makes and frees the same gigabytes again and again. glibc gives what is freed back to the kernel, which
clears each page anew at its next use: a tenth of an SFT step of a small model on the CPU. Blocks above 32 MiB go back
all the same: kept, they would leave holes that nothing else fits, and in large pages they are soon cleared.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

# malloc.h of glibc.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_LARGEST = 32 << 20  # the most that glibc takes for it
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # PyTorch reads it once, at its first allocation


@cache
def keep_memory() -> None:
    """Set it so, once for this process; without effect where the C library isn't glibc.

    Memory that was needed once in smaller blocks stays with the process until it ends. Settings from outside stand:
    MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_ARENA_MAX of glibc, THP_MEM_ALLOC_ENABLE of PyTorch. Large
    pages come only if PyTorch has allocated nothing before.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, parameter, value in (
        ("MALLOC_MMAP_THRESHOLD_", _MMAP_THRESHOLD, _LARGEST),
        ("MALLOC_TRIM_THRESHOLD_", _TRIM_THRESHOLD, -1),
        ("MALLOC_ARENA_MAX", _ARENA_MAX, 1),  # a thread's own arena can't hold large blocks
    ):
        if name not in os.environ:
            mallopt(parameter, value)
    import torch

    if _HUGE_PAGES not in os.environ:
        os.environ[_HUGE_PAGES] = "1"
        torch.empty(1)
        del os.environ[_HUGE_PAGES]  # not for programs that this one starts
