"""Attention over a prefix tree: every token attends to its ancestors and to itself, and to nothing else.

Queries go in pieces of consecutive nodes of one branch; the keys of a piece are the branch from its root on, each at
the place of its position. So a sum over keys runs in the same order whatever else is in the tree, which is the order
of the embedded sampler. Pieces with equally many keys are computed together. Where attention in C is built, the forward
pass goes through the sampler's own kernel. Either way the two agree in bf16 to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from strop import kernels
from strop.learning.prefix_tree import Ints, PrefixTree

#: Queries in a piece: completions are short, and a piece holds no more than one.
PIECE = 32
#: Keys come in whole blocks of this many: few sizes, and a multiple of every vector width.
KEY_BLOCK = 64
#: Scores that are computed at once, in elements: bounds memory, and keeps a piece's scores in cache.
SCORES_AT_ONCE = 1 << 22
#: Bytes of attention weights that a layer may keep for its backward pass; beyond it they are computed again.
KEPT_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Bucket:
    """Pieces that are computed together.

    Attributes:
        queries: (n · PIECE,) nodes; filled up with the number of nodes, a place that nothing is read from.
        keys: (n · length,) nodes at positions 0, 1, … of each piece's branch; filled up with 0, which nobody sees.
        length: number of keys of each piece, whole blocks.
        seen: (n · PIECE,) how many keys each query sees, from the first on.
    """

    queries: Tensor
    keys: Tensor
    length: int
    seen: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who sees whom, for the nodes of one tree.

    Attributes:
        nodes: number of nodes.
        buckets: every piece once.
        branches: (branches · context,) nodes at positions 0, 1, … of every branch, filled up with 0: a cache's rows.
        context: tokens of a row, whole blocks.
        rows, positions: (nodes,) where each node is in them.
    """

    nodes: int
    buckets: tuple[Bucket, ...]
    branches: Tensor
    context: int
    rows: Tensor
    positions: Tensor


def plan_attention(tree: PrefixTree, heads: int, device: torch.device) -> AttentionPlan:
    """Lay out the pieces of a tree.

    Args:
        tree: nodes, depth first.
        heads: query heads, for the memory bound.
        device: where attention runs.
    """
    nodes = len(tree.tokens)
    by_length: dict[int, list[tuple[int, Ints]]] = {}
    for first, branch in _pieces(tree):
        by_length.setdefault(-(-len(branch) // KEY_BLOCK) * KEY_BLOCK, []).append((first, branch))
    buckets = []
    for length, pieces in sorted(by_length.items()):
        at_once = max(1, SCORES_AT_ONCE // (heads * PIECE * length))
        for start in range(0, len(pieces), at_once):
            buckets.append(_bucket(pieces[start : start + at_once], length, nodes, device))
    context = max(by_length)
    branches = np.zeros((len(tree.paths), context), dtype=np.int64)
    rows = np.zeros(nodes, dtype=np.int64)
    for row, path in enumerate(tree.paths):
        branches[row, : len(path)], rows[path] = path, row
    places = (torch.from_numpy(array).to(device) for array in (branches.reshape(-1), rows, tree.positions))
    flat, row_of, position_of = places
    return AttentionPlan(nodes, tuple(buckets), flat, context, row_of, position_of)


def _pieces(tree: PrefixTree) -> Iterator[tuple[int, Ints]]:
    """Every node once, in runs of at most PIECE along a branch: the position of the first, and the branch up to the
    last."""
    new = np.ones(len(tree.tokens), dtype=bool)
    for path in tree.paths:
        mine = np.flatnonzero(new[path])  # the end of the path: what it shares was seen before
        new[path] = False
        for first in range(int(mine[0]), len(path), PIECE) if len(mine) else ():
            yield first, path[: first + PIECE]


def _bucket(pieces: list[tuple[int, Ints]], length: int, nodes: int, device: torch.device) -> Bucket:
    queries = np.full((len(pieces), PIECE), nodes, dtype=np.int64)
    keys = np.zeros((len(pieces), length), dtype=np.int64)
    positions = np.full((len(pieces), PIECE, 1), length - 1)
    for row, (first, branch) in enumerate(pieces):
        count = len(branch) - first
        queries[row, :count] = branch[first:]
        keys[row, : len(branch)] = branch
        positions[row, :count, 0] = np.arange(first, len(branch))
    return Bucket(
        queries=torch.from_numpy(queries.reshape(-1)).to(device),
        keys=torch.from_numpy(keys.reshape(-1)).to(device),
        length=length,
        seen=torch.from_numpy(positions.reshape(-1) + 1).to(device),
    )


class TreeAttention(Function):
    """softmax(q kᵀ · scale) v over a plan; softmax in fp32; grouped queries share keys and values."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
        """q (nodes, heads, head_dim); k, v (nodes, kv_heads, head_dim); gives (nodes, heads, head_dim)."""
        ctx.save_for_backward(q, k, v)
        ctx.plan, ctx.scale, ctx.kept = plan, scale, None
        if kernels.computes(q) and kernels.supports(q.shape[1], k.shape[1], q.shape[2], plan.context):
            return _in_c(plan, q, k, v, scale)
        out = torch.empty((plan.nodes + 1, *q.shape[1:]), dtype=q.dtype, device=q.device)
        kept = []
        for bucket, queries, keys, values in _gathered(plan, q, k, v):
            weights = _weights(queries, keys, bucket, scale)
            out[bucket.queries] = _from_heads(weights @ values, q.shape[1])
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
        d_q = torch.empty((plan.nodes + 1, *q.shape[1:]), dtype=q.dtype, device=q.device)
        # What several pieces see gets the sum of their gradients.
        d_k, d_v = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
        upstream = torch.cat([upstream, upstream.new_zeros((1, *upstream.shape[1:]))])
        for number, (bucket, queries, keys, values) in enumerate(_gathered(plan, q, k, v)):
            weights = ctx.kept[number] if ctx.kept else _weights(queries, keys, bucket, ctx.scale)
            d_out = _to_heads(
                upstream.index_select(0, bucket.queries), k.shape[1]
            )  # (n, kv_heads, group · PIECE, head_dim)
            d_scores = torch._softmax_backward_data(d_out @ values.mT, weights, -1, weights.dtype)
            d_q[bucket.queries] = _from_heads((d_scores @ keys).mul_(ctx.scale), q.shape[1])
            for whole, gradient in ((d_k, (d_scores.mT @ queries).mul_(ctx.scale)), (d_v, weights.mT @ d_out)):
                whole.index_add_(0, bucket.keys, gradient.transpose(1, 2).flatten(0, 1).float())
        ctx.kept = None
        return d_q[: plan.nodes], d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _in_c(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The forward pass through the sampler's kernel: every branch is a row of a cache."""
    keys, values = (x[plan.branches].view(-1, plan.context, *x.shape[1:]).transpose(1, 2).contiguous() for x in (k, v))
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kernels.cached_attention(q, keys, values, plan.rows, plan.positions, scale, out)
    return out


def _gathered(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Bucket, Tensor, Tensor, Tensor]]:
    """Each bucket's queries (n, kv_heads, group · PIECE, head_dim), and keys and values (n, kv_heads, length,
    head_dim)."""
    for bucket in plan.buckets:
        queries = _to_heads(q.index_select(0, bucket.queries.clamp(max=plan.nodes - 1)), k.shape[1])
        keys, values = (
            x.index_select(0, bucket.keys).view(-1, bucket.length, *x.shape[1:]).transpose(1, 2) for x in (k, v)
        )
        yield bucket, queries, keys, values


def _weights(queries: Tensor, keys: Tensor, bucket: Bucket, scale: float) -> Tensor:
    """(n, kv_heads, group · PIECE, length) in the compute dtype. The embedded sampler rounds as is done here."""
    scores = queries @ keys.mT
    if kernels.computes(scores) and bucket.length <= kernels.MOST_KEYS:
        kernels.attention_weights_(scores, bucket.seen, PIECE, scale)
        return scores
    exact = scores.float().mul_(scale)
    hidden = torch.arange(bucket.length, device=scores.device) >= bucket.seen.view(-1, 1, 1, PIECE, 1)
    exact.view(*scores.shape[:2], -1, PIECE, bucket.length).masked_fill_(hidden, -torch.inf)
    return exact.softmax(-1).to(queries.dtype)


def _to_heads(x: Tensor, kv_heads: int) -> Tensor:
    """(n · PIECE, heads, head_dim) → (n, kv_heads, group · PIECE, head_dim): the queries that share keys together."""
    heads, width = x.shape[1:]
    return x.view(-1, PIECE, heads, width).transpose(1, 2).reshape(-1, kv_heads, heads // kv_heads * PIECE, width)


def _from_heads(x: Tensor, heads: int) -> Tensor:
    """The inverse of `_to_heads`."""
    return x.reshape(len(x), heads, PIECE, x.shape[-1]).transpose(1, 2).flatten(0, 1)
