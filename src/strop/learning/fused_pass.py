"""The forward pass of a fused decoder over a prefix tree, ready for a backward pass. Sampling has a pass of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from strop.learning.operators import Embedding, GatedLinear, Linear, NormedLinear, RMSNorm, Rotary, apply
from strop.learning.tree_attention import AttentionPlan, TreeAttention
from strop.models.fused import Decoder, DecoderLayer

#: Gives the fp32 buffer in which a weight's gradient is summed up.
GradientOf = Callable[[Tensor], Tensor]


def hidden_states(
    decoder: Decoder,
    tokens: Tensor,
    positions: Tensor,
    plan: AttentionPlan,
    rows: Tensor,
    anchor: Tensor,
    gradient_of: GradientOf,
) -> Tensor:
    """Hidden states after the final norm.

    Args:
        decoder: the weights.
        tokens, positions: (nodes,) of the tree.
        plan: who sees whom.
        rows: (rows,) nodes whose states are wanted; the last layer's MLP runs on them alone.
        anchor: any tensor; gradients are collected if it requires one.
        gradient_of: buffer of each weight.

    Returns:
        (rows, hidden).
    """

    def norm(weight: Tensor) -> tuple[Any, ...]:
        return weight.detach(), decoder.norm_eps, gradient_of(weight)

    def linear(weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        if bias is None:
            return weight.detach(), None, gradient_of(weight), None
        return weight.detach(), bias.detach(), gradient_of(weight), gradient_of(bias)

    cos, sin = (part[:, None, : decoder.head_dim // 2] for part in decoder.rotary(positions))

    def attention(x: Tensor, layer: DecoderLayer) -> Tensor:
        heads, kv_heads = decoder.heads, decoder.kv_heads
        mixed = apply(NormedLinear, x, *norm(layer.input_norm), *linear(layer.qkv, layer.qkv_bias))
        q, k, v = torch.split(mixed.view(len(x), -1, decoder.head_dim), [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = apply(RMSNorm, q, *norm(layer.q_norm)), apply(RMSNorm, k, *norm(layer.k_norm))
        q, k = apply(Rotary, q, cos, sin), apply(Rotary, k, cos, sin)
        # A copy of v, so that what is kept of it does not keep q and k from before the rotation.
        return apply(TreeAttention, q, k, v.contiguous(), plan, decoder.attention_scale).flatten(1)

    def mlp(x: Tensor, layer: DecoderLayer) -> Tensor:
        gate_up = apply(NormedLinear, x, *norm(layer.post_norm), *linear(layer.gate_up, layer.gate_up_bias))
        return apply(GatedLinear, gate_up, *linear(layer.down, layer.down_bias))

    x = apply(Embedding, anchor, decoder.embedding.detach(), tokens, gradient_of(decoder.embedding))
    for number, layer in enumerate(decoder.layers):
        mixed = attention(x, layer)
        if number == len(decoder.layers) - 1:
            x, mixed = x[rows], mixed[rows]
        x = x + apply(Linear, mixed, *linear(layer.out, layer.out_bias))
        x = x + mlp(x, layer)
    return apply(RMSNorm, x, *norm(decoder.final_norm))
