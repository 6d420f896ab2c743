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


class _Layers:
    """The layers of a decoder over one prefix tree, under one adapter; see `hidden_states` for the arguments."""

    def __init__(
        self, decoder: Decoder, positions: Tensor, plan: AttentionPlan, gradient_of: GradientOf, adapter: str
    ) -> None:
        self._decoder, self._plan, self._gradient_of = decoder, plan, gradient_of
        self._updates_of = decoder.updates(adapter)
        self._cos, self._sin = (
            part[:, None, : decoder.head_dim // 2].contiguous() for part in decoder.rotary(positions)
        )

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return apply(RMSNorm, x, *self._scale(weight))

    def layer(self, x: Tensor, number: int, rows: Tensor | None) -> Tensor:
        """One layer; behind its attention for `rows` alone, if they are given."""
        layer, updates = self._decoder.layers[number], self._updates_of[number]
        mixed = self._attention(x, layer, updates)
        if rows is not None:
            x, mixed = x[rows], mixed[rows]
        x = x + self._updated(apply(Linear, mixed, *self._linear(layer, "out")), mixed, updates, "out")
        return x + self._mlp(x, layer, updates)

    def _attention(self, x: Tensor, layer: DecoderLayer, updates: LayerUpdates) -> Tensor:
        heads, kv_heads = self._decoder.heads, self._decoder.kv_heads
        mixed = self._normed_linear(x, layer.input_norm, "qkv", layer, updates)
        q, k, v = torch.split(mixed.view(len(x), -1, self._decoder.head_dim), [heads, kv_heads, kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(q, layer.q_norm), self.norm(k, layer.k_norm)
        q, k = apply(Rotary, q, self._cos, self._sin), apply(Rotary, k, self._cos, self._sin)
        # A copy of v, so that what is kept of it does not keep q and k from before the rotation.
        return apply(TreeAttention, q, k, v.contiguous(), self._plan, self._decoder.attention_scale).flatten(1)

    def _mlp(self, x: Tensor, layer: DecoderLayer, updates: LayerUpdates) -> Tensor:
        gate_up = self._normed_linear(x, layer.post_norm, "gate_up", layer, updates)
        down = self._linear(layer, "down")
        if "down" not in updates:
            return apply(GatedLinear, gate_up, *down)
        inner = gated(gate_up)
        return self._updated(apply(Linear, inner, *down), inner, updates, "down")

    def _normed_linear(
        self, x: Tensor, scale: Tensor, matrix: str, layer: DecoderLayer, updates: LayerUpdates
    ) -> Tensor:
        if matrix not in updates:
            return apply(NormedLinear, x, *self._scale(scale), *self._linear(layer, matrix))
        x = self.norm(x, scale)
        return self._updated(apply(Linear, x, *self._linear(layer, matrix)), x, updates, matrix)

    def _updated(self, y: Tensor, x: Tensor, updates: LayerUpdates, matrix: str) -> Tensor:
        for part in updates.get(matrix, ()):
            buffers = self._gradient_of(part.a), self._gradient_of(part.b)
            y = apply(LowRank, y, x, part.a.detach(), part.b.detach(), *buffers, part.scale, part.columns)
        return y

    def _scale(self, weight: Tensor) -> tuple[Any, ...]:
        return weight.detach(), self._decoder.norm_eps, self._gradient_of(weight)

    def _linear(self, layer: DecoderLayer, matrix: str) -> tuple[Any, ...]:
        weight, bias = getattr(layer, matrix), getattr(layer, f"{matrix}_bias")
        if bias is None:
            return weight.detach(), None, self._gradient_of(weight), None
        return weight.detach(), bias.detach(), self._gradient_of(weight), self._gradient_of(bias)


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
    layers = _Layers(decoder, positions, plan, gradient_of, adapter)
    x = apply(Embedding, anchor, decoder.embedding.detach(), tokens, gradient_of(decoder.embedding))
    for number in range(len(decoder.layers)):
        wanted = rows if number == len(decoder.layers) - 1 else None
        if recompute and torch.is_grad_enabled():
            x = checkpoint(layers.layer, x, number, wanted, use_reentrant=False, preserve_rng_state=False)
        else:
            x = layers.layer(x, number, wanted)
    return layers.norm(x, decoder.final_norm)
