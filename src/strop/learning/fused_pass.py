"""The forward pass of a fused decoder over a prefix tree, ready for a backward pass. Sampling has a pass of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from strop.learning.operators import Embedding, GatedLinear, Linear, LowRank, NormedLinear, RMSNorm, Rotary, apply
from strop.learning.tree_attention import AttentionPlan, TreeAttention
from strop.models.experts import gated
from strop.models.fused import Decoder, DecoderLayer, LayerUpdates

#: Gives the fp32 buffer in which a weight's gradient is summed up; None for a frozen one.
GradientOf = Callable[[Tensor], Tensor | None]


def hidden_states(
    decoder: Decoder,
    tokens: Tensor,
    positions: Tensor,
    plan: AttentionPlan,
    rows: Tensor,
    anchor: Tensor,
    gradient_of: GradientOf,
    adapter: str = "",
    recompute: bool = False,
) -> Tensor:
    """Hidden states after the final norm.

    Args:
        decoder: the weights.
        tokens, positions: (nodes,) of the tree.
        plan: who sees whom.
        rows: (rows,) nodes whose states are wanted; the last layer's MLP runs on them alone.
        anchor: any tensor; gradients are collected if it requires one.
        gradient_of: buffer of each weight.
        adapter: whose updates are added; "" for none.
        recompute: keep only each layer's input for the backward pass (Chen et al. 2016, arXiv:1604.06174).

    Returns:
        (rows, hidden).
    """

    def norm(weight: Tensor) -> tuple[Any, ...]:
        return weight.detach(), decoder.norm_eps, gradient_of(weight)

    def linear(weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        if bias is None:
            return weight.detach(), None, gradient_of(weight), None
        return weight.detach(), bias.detach(), gradient_of(weight), gradient_of(bias)

    def updated(y: Tensor, x: Tensor, updates: LayerUpdates, matrix: str) -> Tensor:
        for part in updates[matrix]:
            buffers = gradient_of(part.a), gradient_of(part.b)
            y = apply(LowRank, y, x, part.a.detach(), part.b.detach(), *buffers, part.scale, part.columns)
        return y

    def normed_linear(x: Tensor, scale: Tensor, matrix: str, layer: DecoderLayer, updates: LayerUpdates) -> Tensor:
        weights = linear(getattr(layer, matrix), getattr(layer, f"{matrix}_bias"))
        if matrix not in updates:
            return apply(NormedLinear, x, *norm(scale), *weights)
        x = apply(RMSNorm, x, *norm(scale))
        return updated(apply(Linear, x, *weights), x, updates, matrix)

    cos, sin = (part[:, None, : decoder.head_dim // 2] for part in decoder.rotary(positions))

    def attention(x: Tensor, layer: DecoderLayer, updates: LayerUpdates) -> Tensor:
        heads, kv_heads = decoder.heads, decoder.kv_heads
        mixed = normed_linear(x, layer.input_norm, "qkv", layer, updates)
        q, k, v = torch.split(mixed.view(len(x), -1, decoder.head_dim), [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = apply(RMSNorm, q, *norm(layer.q_norm)), apply(RMSNorm, k, *norm(layer.k_norm))
        q, k = apply(Rotary, q, cos, sin), apply(Rotary, k, cos, sin)
        # A copy of v, so that what is kept of it does not keep q and k from before the rotation.
        return apply(TreeAttention, q, k, v.contiguous(), plan, decoder.attention_scale).flatten(1)

    def out(mixed: Tensor, layer: DecoderLayer, updates: LayerUpdates) -> Tensor:
        y = apply(Linear, mixed, *linear(layer.out, layer.out_bias))
        return updated(y, mixed, updates, "out") if "out" in updates else y

    def mlp(x: Tensor, layer: DecoderLayer, updates: LayerUpdates) -> Tensor:
        gate_up = normed_linear(x, layer.post_norm, "gate_up", layer, updates)
        down = linear(layer.down, layer.down_bias)
        if "down" not in updates:
            return apply(GatedLinear, gate_up, *down)
        inner = gated(gate_up)
        return updated(apply(Linear, inner, *down), inner, updates, "down")

    last = len(decoder.layers) - 1

    def computed(x: Tensor, number: int) -> Tensor:
        layer, updates = decoder.layers[number], decoder.updates(adapter)[number]
        mixed = attention(x, layer, updates)
        if number == last:
            x, mixed = x[rows], mixed[rows]
        x = x + out(mixed, layer, updates)
        return x + mlp(x, layer, updates)

    x = apply(Embedding, anchor, decoder.embedding.detach(), tokens, gradient_of(decoder.embedding))
    for number in range(last + 1):
        if recompute and torch.is_grad_enabled():
            x = checkpoint(computed, x, number, use_reentrant=False, preserve_rng_state=False)
        else:
            x = computed(x, number)
    return apply(RMSNorm, x, *norm(decoder.final_norm))
