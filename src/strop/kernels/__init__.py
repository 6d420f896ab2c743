"""What a decoder computes between its matrix products on the CPU, in C: attention over a key-value cache (attention.c),
norms, rotary positions and gates (elementwise.c), their backward passes (backward.c) and the softmax over a vocabulary
(head.c). Built when strop is installed; where it wasn't, for want of a compiler, sampler and learner compute the same
through PyTorch, slower: decoding several times.

What a token gives depends on its own inputs, and in attention on its row's keys and values up to its position: bit for
bit, whatever the batch and the number of threads. The tensors of a call are all bf16 or all fp32, and contiguous, where
nothing else is said.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIBRARY = Path(__file__).with_name("native.so")
#: What the library can take: query heads that share a key head, and numbers in a head.
MOST_HEADS, LANES, WIDEST = 16, 16, 256
#: Keys that a query can see in `attention_weights_`.
MOST_KEYS = 1 << 15

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "attention": [_POINTER] * 6 + [_LONG] * 3 + [_INT] * 3 + [_FLOAT, _INT],
    "residual_norm": [_POINTER] * 4 + [_LONG] * 2 + [_FLOAT, _INT],
    "place": [_POINTER] * 10 + [_LONG] * 2 + [_INT] * 3 + [_FLOAT, _INT],
    "gated": [_POINTER] * 2 + [_LONG] * 2 + [_INT],
    "norm_backward": [_POINTER] * 5 + [_LONG] * 2 + [_FLOAT, _INT],
    "gated_backward": [_POINTER] * 4 + [_LONG] * 2 + [_INT],
    "rotate": [_POINTER] * 4 + [_LONG] * 2 + [_INT] * 2 + [_FLOAT, _INT],
    "attention_weights": [_POINTER] * 2 + [_LONG] * 4 + [_FLOAT, _INT],
    "logsumexp": [_POINTER] * 2 + [_LONG] * 2 + [_FLOAT, _INT],
    "softmax_slope": [_POINTER] * 7 + [_LONG] * 2 + [_FLOAT, _INT],
}
#: Functions that say whether they had the memory.
_RETURNING = ("attention", "norm_backward")
#: Functions whose first tensor's tokens may be further apart.
_APART = ("attention", "rotate")


def built() -> bool:
    """Whether the library is there."""
    return LIBRARY.is_file()


def computes(x: Tensor) -> bool:
    """Whether the library is there and takes tensors like `x`."""
    import torch

    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float32) and built()


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


def norm_backward(x: Tensor, upstream: Tensor, weight: Tensor, epsilon: float, gradient: Tensor | None) -> Tensor:
    """The slope of x / rms(x) · weight.

    Args:
        x, upstream: (tokens, width).
        weight: (width,).
        epsilon: added to the mean of the squares.
        gradient: (width,) fp32; the weight's is added to it.

    Returns:
        (tokens, width).

    Raises:
        MemoryError: no memory for the parts of the weight's gradient.
    """
    out = x.new_empty(x.shape)
    if _call("norm_backward", x, upstream.contiguous(), weight, out, gradient, *x.shape, epsilon):
        raise MemoryError("there is no memory for the gradient of a norm")
    return out


def gated_backward(gate_up: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Of `gated`: the slopes (tokens, 2 · width) for upstream ones of (tokens, width), and what `gated` gave."""
    slopes, product = gate_up.new_empty(gate_up.shape), upstream.new_empty(upstream.shape)
    _call("gated_backward", gate_up, upstream.contiguous(), slopes, product, *upstream.shape)
    return slopes, product


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """Heads turned by their positions, or back: the first half of each with the second.

    Args:
        x: (tokens, heads, width); tokens may be further apart.
        cos, sin: (tokens, …, width / 2).
        back: turn the other way.
    """
    out = x.new_empty(x.shape)
    tokens, heads, width = x.shape
    _call(
        "rotate",
        x,
        cos.contiguous(),
        sin.contiguous(),
        out,
        tokens,
        x.stride(0),
        heads,
        width // 2,
        -1.0 if back else 1.0,
    )
    return out


def attention_weights_(scores: Tensor, seen: Tensor, queries: int, scale: float) -> None:
    """Turn scores into softmax(scores · scale) over the keys that each query sees, in fp32, and 0 elsewhere.

    Args:
        scores: (pieces, …, queries, length), length a multiple of `LANES` and at most `MOST_KEYS`; written.
        seen: (pieces, queries) int64: how many keys a query sees, from the first on; at least 1.
        queries: of a piece.
        scale: of the scores.

    Raises:
        ValueError: too many keys.
    """
    pieces, length = len(scores), scores.shape[-1]
    if length > MOST_KEYS:
        raise ValueError(f"a query can see {MOST_KEYS} keys, not {length}")
    heads = scores.numel() // (pieces * queries * length)
    _call("attention_weights", scores, seen, pieces, heads, queries, length, scale)


def logsumexp(logits: Tensor, temperature: float) -> Tensor:
    """(rows,) fp32: log Σ exp(logits / T), of (rows, vocab)."""
    import torch

    out = logits.new_empty(len(logits), dtype=torch.float32)
    _call("logsumexp", logits, out, *logits.shape, temperature)
    return out


def softmax_slope_(
    logits: Tensor, normalisers: Tensor, factors: Tensor, starts: Tensor, chosen: Tensor, slopes: Tensor,
    temperature: float,
) -> None:  # fmt: skip
    """Turn logits into factors · softmax(logits / T), plus the slopes of some tokens. In fp32, rounded once.

    Args:
        logits: (rows, vocab); written.
        normalisers, factors: (rows,) fp32; the first as `logsumexp` gives them.
        starts: (rows + 1,) int64: where each row's pairs begin, and their end.
        chosen: (pairs,) int64 tokens, the same one perhaps several times in a row.
        slopes: (pairs,) fp32, added where the tokens are.
        temperature: T.
    """
    sums = slopes.new_empty(slopes.shape)
    _call("softmax_slope", logits, normalisers, factors, starts, chosen, slopes, sums, *logits.shape, temperature)


def _call(name: str, first: Tensor, *arguments: Any) -> int:
    """Call a function of the library for the first tensor's dtype, with as many threads as PyTorch uses."""
    import torch

    if first.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"kernels take bf16 and fp32, not {first.dtype}")
    whole = arguments if name in _APART else (first, *arguments)
    tensors = [argument for argument in whole if isinstance(argument, torch.Tensor)]
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError(f"{name} was given a tensor that is not contiguous")
    pointers = (argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments)
    function = _function(name, "bf16" if first.dtype == torch.bfloat16 else "fp32")
    return function(first.data_ptr(), *pointers, torch.get_num_threads())  # type: ignore[no-any-return]


@cache
def _function(name: str, suffix: str) -> Any:
    """One of the library's functions."""
    function = getattr(ctypes.CDLL(str(LIBRARY)), f"{name}_{suffix}")  # after torch, so that both share one OpenMP
    function.argtypes = _ARGUMENTS[name]
    function.restype = _INT if name in _RETURNING else None
    return function
