"""fp32 master weights with their gradients and AdamW over them, in flat buffers that kernels pass over once.

Compute weights (bf16 or fp32) are rounded copies that `write_weights` refreshes. Gradients of every micro-batch are
summed here in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from strop.errors import BatchError, ConfigError, ModelError
from strop.models.fused import Weight

#: How an optimizer keeps its moments.
Moments = Literal["float32", "8bit"]


class MasterWeights:
    """Master weights of what is trained, and their optimizer.

    Args:
        weights: every weight; those that don't require a gradient (an adapter's base) are left alone.
        masters: fp32 values by HF parameter name, where the weights themselves are rounded already.
        weight_decay: decoupled decay of matrices; vectors (norms, biases) are not decayed.
        betas, epsilon: of AdamW. Loshchilov & Hutter 2017, arXiv:1711.05101, algorithm 2.
        moments: "8bit" keeps the moments in blocks of 8-bit numbers (Dettmers et al. 2021, arXiv:2110.02861), through
            bitsandbytes, in a quarter of the memory.

    Raises:
        ConfigError: bitsandbytes is not installed, and `moments` asks for it.
        ModelError: nothing is to be trained, or `masters` lacks a parameter or has it in another shape.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        masters: Mapping[str, Tensor] | None,
        *,
        weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        moments: Moments = "float32",
    ) -> None:
        trained = [weight for weight in weights if weight.tensor.requires_grad]
        if not trained:
            raise ModelError("the model has no weights to train: every parameter is frozen.")
        self._options = {"betas": betas, "eps": epsilon}
        self._decay, self._moments = weight_decay, moments
        # Matrices first, so that what is decayed is one contiguous stretch of the buffers.
        self.weights = [w for w in trained if w.tensor.dim() > 1] + [w for w in trained if w.tensor.dim() <= 1]
        decayed = sum(w.tensor.numel() for w in self.weights if w.tensor.dim() > 1)
        total, device = sum(w.tensor.numel() for w in self.weights), trained[0].tensor.device
        self.values = torch.empty(total, device=device)
        self.gradient = torch.zeros(total, device=device)
        self._sizes = [size for size in (decayed, total - decayed) if size]
        self._decays = [decay for size, decay in ((decayed, weight_decay), (total - decayed, 0.0)) if size]
        self._gradients = {id(w.tensor): view for w, view in self._views(self.gradient)}
        self.fill(masters)
        self.reset()

    def _views(self, flat: Tensor) -> list[tuple[Weight, Tensor]]:
        """Each weight with its part of a flat buffer, in its shape."""
        parts = torch.split(flat, [weight.tensor.numel() for weight in self.weights])
        return [(weight, part.view(weight.tensor.shape)) for weight, part in zip(self.weights, parts, strict=True)]

    def fill(self, masters: Mapping[str, Tensor] | None) -> None:
        """Set the master values, by HF parameter name; None takes them from the compute weights."""
        for weight, view in self._views(self.values):
            if masters is None:
                view.copy_(weight.tensor.detach())
                continue
            for name, part in weight.split(view):
                if name not in masters or masters[name].shape != part.shape:
                    there = tuple(masters[name].shape) if name in masters else "nothing"
                    raise ModelError(
                        f"weight {name} has the shape {tuple(part.shape)}, but what is loaded for it has {there}."
                    )
                part.copy_(masters[name])

    def reset(self) -> None:
        """Forget moments and gradients: a new stage begins."""
        self.gradient.zero_()
        parts = [torch.nn.Parameter(part) for part in torch.split(self.values, self._sizes)]
        for parameter, gradient in zip(parts, torch.split(self.gradient, self._sizes), strict=True):
            parameter.grad = gradient
        groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(parts, self._decays, strict=True)]
        if self._moments == "8bit":
            self._adamw: Any = _eight_bit_adamw()(groups, **self._options)
        else:
            self._adamw = torch.optim.AdamW(groups, fused=True, **self._options)  # type: ignore[arg-type]

    def gradient_of(self, tensor: Tensor) -> Tensor | None:
        """The fp32 buffer in which the gradient of a weight is summed up; None for one that is not trained."""
        return self._gradients.get(id(tensor))

    def take_gradients(self) -> None:
        """Move what autograd left in the weights' own `.grad` into the buffers."""
        for weight in self.weights:
            if weight.tensor.grad is not None:
                self._gradients[id(weight.tensor)].add_(weight.tensor.grad)
                weight.tensor.grad = None

    def step(self, learning_rate: float, max_norm: float) -> dict[str, float]:
        """Clip, take an AdamW step, clear the gradients.

        Returns:
            "grad_norm" before clipping, and "grad_clipped" (0 or 1).

        Raises:
            BatchError: the gradient is not finite; weights and moments stay as they were.
        """
        norm = float(torch.linalg.vector_norm(self.gradient))
        if not math.isfinite(norm):
            self.gradient.zero_()
            raise BatchError(
                f"the gradient's norm is {norm}: a loss or a log-probability of the batch is not finite. Nothing was "
                "updated. Look at the batch's largest log-probability difference, or lower the learning rate."
            )
        if norm > max_norm:
            self.gradient.mul_(max_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self.gradient.zero_()
        return {"grad_norm": norm, "grad_clipped": float(norm > max_norm)}

    def write_weights(self) -> None:
        """Round the masters into the compute weights."""
        for weight, view in self._views(self.values):
            weight.tensor.detach().copy_(view)

    def named_values(self) -> dict[str, Tensor]:
        """Master values by HF parameter name, as views."""
        return {name: part for weight, view in self._views(self.values) for name, part in weight.split(view)}

    def state(self) -> dict[str, Tensor]:
        """Moments and step counts, flat; empty before the first step."""
        return {
            f"{name}.{number}": torch.as_tensor(value)
            for number, group in enumerate(self._adamw.param_groups)
            for name, value in self._adamw.state[group["params"][0]].items()
        }

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `state` gave.

        Raises:
            ModelError: it is of another model.
        """
        self.reset()
        state: dict[int, dict[str, Any]] = {}
        moments = ("state1", "state2") if self._moments == "8bit" else ("exp_avg", "exp_avg_sq")
        beside = ("step", "qmap1", "qmap2", "absmax1", "absmax2") if self._moments == "8bit" else ("step",)
        for key, tensor in tensors.items():
            name, _, number = key.rpartition(".")
            fits = number.isdigit() and [tensor.numel()] == self._sizes[int(number) :][:1]
            if name not in beside and not (fits and name in moments):
                raise ModelError(
                    f"the optimizer state {key} ({tuple(tensor.shape)}) is not of this model, or not of moments kept as "
                    f"{self._moments}."
                )
            eight_bit_step = name == "step" and self._moments == "8bit"  # a plain number there
            state.setdefault(int(number), {})[name] = int(tensor) if eight_bit_step else tensor
        if self._moments == "8bit":  # its own state_dict packs them in another way
            for place, entry in state.items():
                self._adamw.state[self._adamw.param_groups[place]["params"][0]] = entry
        else:
            self._adamw.load_state_dict({**self._adamw.state_dict(), "state": state})


def _eight_bit_adamw() -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        raise ConfigError(
            "learner.moments", "8bit needs the package bitsandbytes", "Install it: pip install 'strop[low-memory]'"
        ) from None
    return AdamW8bit
