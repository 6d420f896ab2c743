"""The forward pass of a fused decoder over a prefix tree, ready for a backward pass. Sampling has a pass of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strop.learning.operators import Embedding, GatedSiLU, Linear, RMSNorm, Rotary, apply
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

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return apply(RMSNorm, x, weight.detach(), decoder.norm_eps, gradient_of(weight))

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        buffer = None if bias is None else gradient_of(bias)
        bias = None if bias is None else bias.detach()
        return apply(Linear, x, weight.detach(), bias, gradient_of(weight), buffer)

    cos, sin = (part[:, None, : decoder.head_dim // 2] for part in decoder.rotary(positions))

    def attention(x: Tensor, layer: DecoderLayer) -> Tensor:
        heads, kv_heads = decoder.heads, decoder.kv_heads
        mixed = linear(norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        q, k, v = torch.split(mixed.view(len(x), -1, decoder.head_dim), [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = norm(q, layer.q_norm), norm(k, layer.k_norm)
        q, k = apply(Rotary, q, cos, sin), apply(Rotary, k, cos, sin)
        return apply(TreeAttention, q, k, v, plan, decoder.attention_scale).flatten(1)

    def mlp(x: Tensor, layer: DecoderLayer) -> Tensor:
        gate_up = linear(norm(x, layer.post_norm), layer.gate_up, layer.gate_up_bias)
        return linear(apply(GatedSiLU, gate_up), layer.down, layer.down_bias)

    x = apply(Embedding, anchor, decoder.embedding.detach(), tokens, gradient_of(decoder.embedding))
    for number, layer in enumerate(decoder.layers):
        mixed = attention(x, layer)
        if number == len(decoder.layers) - 1:
            x, mixed = x[rows], mixed[rows]
        x = x + linear(mixed, layer.out, layer.out_bias)
        x = x + mlp(x, layer)
    return norm(x, decoder.final_norm)
