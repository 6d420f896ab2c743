"""Attention over a key-value cache on the CPU, in C (attention.c). Built when strop is installed; where it wasn't, for
want of a compiler, the sampler computes the same through PyTorch, several times slower.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = Path(__file__).with_name("attention.so")
#: What attention.c can take: query heads that share a key head, and numbers in a head.
MOST_HEADS, LANES, WIDEST = 16, 16, 256


def built() -> bool:
    """Whether the library is there."""
    return LIBRARY.is_file()


def supports(heads: int, kv_heads: int, width: int, context: int) -> bool:
    """Whether the library is there and takes these sizes."""
    fits = width % LANES == 0 and width <= WIDEST and context % LANES == 0
    return built() and fits and heads // kv_heads <= MOST_HEADS


def cached_attention(
    queries: Tensor, keys: Tensor, values: Tensor, rows: Tensor, positions: Tensor, scale: float, out: Tensor
) -> None:
    """softmax(q kᵀ · scale) v of every query token over its row's keys, up to its own position. In fp32 inside.

    What a token gives depends on its row's keys and values up to its position alone, bit for bit.

    Args:
        queries: (tokens, heads, width), bf16 or fp32, contiguous but for the distance between tokens.
        keys, values: (cache rows, kv_heads, context, width), contiguous, of the same dtype.
        rows, positions: (tokens,) int64.
        scale: of the scores.
        out: (tokens, heads, width), contiguous; written.

    Raises:
        MemoryError: no memory for the scores.
    """
    import torch

    tokens, heads, width = queries.shape
    kv_heads, context = keys.shape[1], keys.shape[2]
    failed = _function(queries.dtype)(
        queries.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(), rows.data_ptr(), positions.data_ptr(),
        tokens, context, queries.stride(0), kv_heads, heads // kv_heads, width, scale, torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("there is no memory for the attention's scores")


@cache
def _function(dtype: Any) -> Any:
    """The library's function for a dtype."""
    import torch

    library = ctypes.CDLL(str(LIBRARY))  # after torch, so that both share one OpenMP
    function = {torch.bfloat16: library.attention_bf16, torch.float32: library.attention_fp32}[dtype]
    function.argtypes = [ctypes.c_void_p] * 6 + [ctypes.c_long] * 3 + [ctypes.c_int] * 3 + [ctypes.c_float, ctypes.c_int]
    return function
