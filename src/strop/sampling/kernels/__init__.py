"""What a decoder computes between its matrix products on the CPU, in C: attention over a key-value cache (attention.c)
and norms, rotary positions and gates (elementwise.c). Built when strop is installed; where it wasn't, for want of a
compiler, the sampler computes the same through PyTorch, several times slower.

What a token gives depends on its own inputs, and in attention on its row's keys and values up to its position: bit for
bit, whatever the batch and the number of threads. All tensors of a call are bf16, or all fp32, and contiguous.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = Path(__file__).with_name("decoding.so")
#: What the library can take: query heads that share a key head, and numbers in a head.
MOST_HEADS, LANES, WIDEST = 16, 16, 256

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "attention": [_POINTER] * 6 + [_LONG] * 3 + [_INT] * 3 + [_FLOAT, _INT],
    "residual_norm": [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT, _INT],
    "place": [_POINTER] * 10 + [_LONG] * 2 + [_INT] * 3 + [_FLOAT, _INT],
    "gated": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
}


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

    Args:
        queries: (tokens, heads, width); tokens may be further apart.
        keys, values: (cache rows, kv_heads, context, width).
        rows, positions: (tokens,) int64.
        scale: of the scores.
        out: (tokens, heads, width); written.

    Raises:
        MemoryError: no memory for the scores.
    """
    tokens, heads, width = queries.shape
    kv_heads, context = keys.shape[1], keys.shape[2]
    failed = _call(
        "attention", queries, keys, values, out, rows, positions,
        tokens, context, queries.stride(0), kv_heads, heads // kv_heads, width, scale,
    )  # fmt: skip
    if failed:
        raise MemoryError("there is no memory for the attention's scores")


def residual_norm(x: Tensor, added: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """`x += added`, then x / rms(x) · weight: rounded where PyTorch's addition and `rms_norm` round.

    Args:
        x: (tokens, width); written, unless `added` is None.
        added: (tokens, width).
        weight: (width,).
        epsilon: added to the mean of the squares.

    Returns:
        (tokens, width).
    """
    out = x.new_empty(x.shape)
    _call("residual_norm", x, added, weight, out, *x.shape, epsilon)
    return out


def place(
    qkv: Tensor, norms: tuple[Tensor | None, Tensor | None], epsilon: float, cos: Tensor, sin: Tensor, rows: Tensor,
    positions: Tensor, keys: Tensor, values: Tensor,
) -> Tensor:  # fmt: skip
    """Rotates queries and keys by their positions, and puts keys and values into the cache.

    Args:
        qkv: (tokens, (heads + 2 kv_heads) · width): queries, keys, values.
        norms: weights (width,) of RMSNorms of each query and key head before that; None where there are none.
        epsilon: of the norms.
        cos, sin: (context, …, width / 2), of every position.
        rows, positions: (tokens,) int64.
        keys, values: (cache rows, kv_heads, context, width); written at each token's row and position.

    Returns:
        The queries: (tokens, heads, width).
    """
    _, kv_heads, context, width = keys.shape
    heads = qkv.shape[1] // width - 2 * kv_heads
    queries = qkv.new_empty((len(qkv), heads, width))
    _call(
        "place", qkv, *norms, cos, sin, queries, keys, values, rows, positions,
        len(qkv), context, heads, kv_heads, width, epsilon,
    )  # fmt: skip
    return queries


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) · up, silu rounded to the dtype: (tokens, 2 · width), gate first, to (tokens, width)."""
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width))
    _call("gated", gate_up, out, tokens, width)
    return out


def _call(name: str, first: Tensor, *arguments: Any) -> int:
    """Call a function of the library for the first tensor's dtype, with as many threads as PyTorch uses."""
    import torch

    pointers = (argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments)
    function = _function(name, "bf16" if first.dtype == torch.bfloat16 else "fp32")
    return function(first.data_ptr(), *pointers, torch.get_num_threads())  # type: ignore[no-any-return]


@cache
def _function(name: str, suffix: str) -> Any:
    """One of the library's functions."""
    function = getattr(ctypes.CDLL(str(LIBRARY)), f"{name}_{suffix}")  # after torch, so that both share one OpenMP
    function.argtypes = _ARGUMENTS[name]
    function.restype = _INT if name == "attention" else None
    return function
