"""Attention over a prefix tree: every token attends to its ancestors and to itself, and to nothing else.

Queries go in pieces of consecutive nodes. What a piece can see is its own nodes and the ancestors of its first node
(an ancestor of a later node that lies before the piece is an ancestor of the first one too), so the keys of a piece
are a short gathered path and a contiguous range. Pieces with paths of like length are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from strop.learning.prefix_tree import PrefixTree

#: Nodes in a piece: short enough that few of the scores are masked, long enough for fast matrix products.
PIECE = 64
#: Scores that are computed at once, in elements: bounds memory, and keeps a piece's scores in cache.
SCORES_AT_ONCE = 1 << 22
#: Bytes of attention weights that a layer may keep for its backward pass; beyond it they are computed again.
KEPT_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that are computed together.

    Attributes:
        pieces: (n,) numbers of the pieces.
        path: (n · length,) nodes before each piece that it sees; filled up with 0, which `bias` hides.
        length: number of path keys of each piece.
        bias: (n, 1, 1, PIECE, length + PIECE) fp32, 0 where a query sees a key and -inf elsewhere.
    """

    pieces: Tensor
    path: Tensor
    length: int
    bias: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who sees whom, for the nodes of one tree filled up to whole pieces.

    Attributes:
        nodes: number of nodes.
        padded: number of nodes in whole pieces.
        buckets: every piece once.
    """

    nodes: int
    padded: int
    buckets: tuple[Bucket, ...]


def plan_attention(tree: PrefixTree, heads: int, device: torch.device) -> AttentionPlan:
    """Lay out the pieces of a tree.

    Args:
        tree: nodes, depth first.
        heads: query heads, for the memory bound.
        device: where attention runs.
    """
    nodes = len(tree.tokens)
    padded = -(-nodes // PIECE) * PIECE
    end = np.concatenate([tree.end, np.arange(nodes, padded) + 1])  # a filler sees itself alone
    paths = _ancestors_of_pieces(tree, nodes)
    by_length: dict[int, list[int]] = {}
    for piece, path in enumerate(paths):
        by_length.setdefault(-(-len(path) // PIECE) * PIECE, []).append(piece)
    buckets = []
    for rounded, pieces in sorted(by_length.items()):
        at_once = max(1, SCORES_AT_ONCE // (heads * PIECE * (rounded + PIECE)))
        for start in range(0, len(pieces), at_once):
            chosen = pieces[start : start + at_once]
            buckets.append(_bucket(chosen, [paths[piece] for piece in chosen], end, device))
    return AttentionPlan(nodes, padded, tuple(buckets))


def _ancestors_of_pieces(tree: PrefixTree, nodes: int) -> list[np.ndarray]:
    """For every piece, the ancestors of its first node."""
    found: list[np.ndarray | None] = [None] * (-(-nodes // PIECE))
    for path in tree.paths:
        for depth in np.flatnonzero(path % PIECE == 0):
            piece = int(path[depth]) // PIECE
            if found[piece] is None:
                found[piece] = path[:depth]
    return [path for path in found if path is not None]


def _bucket(pieces: list[int], paths: list[np.ndarray], end: np.ndarray, device: torch.device) -> Bucket:
    length = max(len(path) for path in paths)
    path = np.zeros((len(pieces), length), dtype=np.int64)
    hidden = np.ones((len(pieces), length), dtype=bool)
    for row, nodes in enumerate(paths):
        path[row, : len(nodes)], hidden[row, : len(nodes)] = nodes, False
    own = np.array(pieces)[:, None] * PIECE + np.arange(PIECE)  # (n, PIECE)
    keys = np.concatenate([path, own], axis=1)[:, None, :]  # (n, 1, length + PIECE)
    queries = own[:, :, None]
    seen = (keys <= queries) & (queries < end[keys])
    seen[:, :, :length] &= ~hidden[:, None, :]
    bias = np.where(seen, np.float32(0), np.float32(-np.inf))[:, None, None]
    return Bucket(
        pieces=torch.from_numpy(np.array(pieces)).to(device),
        path=torch.from_numpy(path.reshape(-1)).to(device),
        length=length,
        bias=torch.from_numpy(bias).to(device),
    )


class TreeAttention(Function):
    """softmax(q kᵀ · scale) v over a plan; softmax in fp32; grouped queries share keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """q (nodes, heads, head_dim); k, v (nodes, kv_heads, head_dim); gives (nodes, heads, head_dim)."""
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.scale = plan, scale
        out = torch.empty((plan.padded, *q.shape[1:]), dtype=q.dtype, device=q.device)
        tiles = out.view(-1, PIECE, *q.shape[1:])
        kept = []
        for bucket, queries, keys, values in _gathered(plan, q, k, v):
            weights = _weights(queries, keys, bucket.bias, scale)
            tiles[bucket.pieces] = _from_heads(weights @ values, q.shape[1])
            kept.append(weights)
        small = sum(weights.nbytes for weights in kept) <= KEPT_BYTES
        ctx.kept = kept if small and any(ctx.needs_input_grad) else None
        return out[: plan.nodes]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """dV = Pᵀ dO, dS = P ∘ (dO Vᵀ - Σ_k P ∘ dO Vᵀ), dQ = dS K, dK = dSᵀ Q."""
        q, k, v = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        dtypes = (q.dtype, torch.float32, torch.float32)  # what several pieces see gets the sum of their gradients
        out = [
            torch.zeros((plan.padded, *x.shape[1:]), dtype=dtype, device=x.device)
            for x, dtype in zip((q, k, v), dtypes, strict=True)
        ]
        tiles = [x.view(-1, PIECE, *x.shape[1:]) for x in out]
        up = _pieces(upstream, plan)
        for number, (bucket, queries, keys, values) in enumerate(_gathered(plan, q, k, v)):
            weights = ctx.kept[number] if ctx.kept else _weights(queries, keys, bucket.bias, ctx.scale)
            d_out = _to_heads(up[bucket.pieces], k.shape[1])  # (n, kv_heads, group · PIECE, head_dim)
            d_scores = torch._softmax_backward_data(d_out @ values.mT, weights, -1, weights.dtype)
            tiles[0][bucket.pieces] = _from_heads((d_scores @ keys).mul_(ctx.scale), q.shape[1])
            for whole, tile, gradient in (
                (out[1], tiles[1], (d_scores.mT @ queries).mul_(ctx.scale)),
                (out[2], tiles[2], weights.mT @ d_out),
            ):
                rows = gradient.transpose(1, 2).float()  # (n, length + PIECE, kv_heads, head_dim)
                tile.index_add_(0, bucket.pieces, rows[:, bucket.length :])
                if bucket.length:
                    whole.index_add_(0, bucket.path, rows[:, : bucket.length].flatten(0, 1))
        ctx.kept = None
        return out[0][: plan.nodes], out[1][: plan.nodes].to(k.dtype), out[2][: plan.nodes].to(v.dtype), None, None


def _gathered(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Bucket, Tensor, Tensor, Tensor]]:
    """Each bucket's queries (n, kv_heads, group · PIECE, head_dim), and keys and values (n, kv_heads, length + PIECE,
    head_dim)."""
    own_q, own_k, own_v = (_pieces(x, plan) for x in (q, k, v))
    for bucket in plan.buckets:
        queries = _to_heads(own_q[bucket.pieces], k.shape[1])
        keys, values = own_k[bucket.pieces], own_v[bucket.pieces]
        if bucket.length:
            paths = (x[bucket.path].view(-1, bucket.length, *x.shape[1:]) for x in (k, v))
            keys, values = (torch.cat([path, own], dim=1) for path, own in zip(paths, (keys, values), strict=True))
        yield bucket, queries, keys.transpose(1, 2), values.transpose(1, 2)


def _weights(queries: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """(n, kv_heads, group · PIECE, length + PIECE) in the compute dtype. The embedded sampler rounds as is done here."""
    scores = (queries @ keys.mT).float().mul_(scale)
    scores.view(*scores.shape[:2], -1, PIECE, scores.shape[-1]).add_(bias)
    return scores.softmax(-1).to(queries.dtype)


def _pieces(x: Tensor, plan: AttentionPlan) -> Tensor:
    """(nodes, heads, head_dim) → (pieces, PIECE, heads, head_dim), filled up with zeros."""
    filler = plan.padded - plan.nodes
    whole = torch.cat([x, x.new_zeros((filler, *x.shape[1:]))]) if filler else x
    return whole.reshape(-1, PIECE, *x.shape[1:])


def _to_heads(x: Tensor, kv_heads: int) -> Tensor:
    """(n, PIECE, heads, head_dim) → (n, kv_heads, group · PIECE, head_dim): the queries that share keys together."""
    n, piece, heads, width = x.shape
    return x.transpose(1, 2).reshape(n, kv_heads, heads // kv_heads * piece, width)


def _from_heads(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_to_heads`."""
    n, width = x.shape[0], x.shape[-1]
    return x.reshape(n, heads, -1, width).transpose(1, 2)
