"""Weights as they were at some time: what a KL to the policy of a stage's beginning is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from strop.models.fused import Decoder, Weight


class ReferenceWeights:
    """A copy of the trained weights, in their compute dtype. Those that are frozen are the same in both.

    Args:
        weights: what is trained.
        flat: values that `flat` gave; None takes the present ones.
    """

    def __init__(self, weights: Sequence[Weight], flat: Tensor | None = None) -> None:
        self._weights = weights
        if flat is None:
            flat = torch.cat([weight.tensor.detach().reshape(-1) for weight in weights])
        self.flat = flat.to(weights[0].tensor.device)
        parts = torch.split(self.flat, [weight.tensor.numel() for weight in weights])
        self._tensors = {
            id(weight.tensor): part.view(weight.tensor.shape).to(weight.tensor.dtype)
            for weight, part in zip(weights, parts, strict=True)
        }

    def decoder(self, decoder: Decoder) -> Decoder:
        """The same decoder with these weights."""

        def swapped(value: Any) -> Any:
            return self._tensors.get(id(value), value)

        layers = tuple(
            replace(layer, **{field.name: swapped(getattr(layer, field.name)) for field in fields(layer)})
            for layer in decoder.layers
        )
        adapters = {
            name: tuple(
                {
                    matrix: tuple(replace(part, a=swapped(part.a), b=swapped(part.b)) for part in parts)
                    for matrix, parts in layer.items()
                }
                for layer in every
            )
            for name, every in decoder.adapters.items()
        }
        outside = {name: swapped(getattr(decoder, name)) for name in ("embedding", "head", "final_norm")}
        return replace(decoder, layers=layers, adapters=adapters, **outside)

    def named(self) -> dict[str, Tensor]:
        """These weights by HF parameter name."""
        return {name: part for weight in self._weights for name, part in weight.split(self._tensors[id(weight.tensor)])}
