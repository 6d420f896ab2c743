"""The gated activation silu(gate) · up and its slope, in C where that is built. Shazeer 2020, arXiv:2002.05202."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from strop import kernels


def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of (rows, 2 · width), gate first: (rows, width). Not differentiable by itself."""
    if kernels.computes(gate_up):
        return kernels.gated(gate_up.contiguous())
    first, second = gate_up.chunk(2, dim=-1)
    return functional.silu(first).mul_(second)


def gate_slopes(gate_up: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The slopes of gate and up (rows, 2 · width) for upstream ones (rows, width), and what `gate` gave."""
    if kernels.computes(gate_up):
        return kernels.gated_backward(gate_up.contiguous(), upstream)
    first, second = gate_up.chunk(2, dim=-1)
    slopes = torch.empty_like(gate_up)
    d_first, d_second = slopes.chunk(2, dim=-1)
    silu = functional.silu(first)
    torch.mul(silu, upstream, out=d_second)
    torch.ops.aten.silu_backward.grad_input(upstream * second, first, grad_input=d_first)
    return slopes, silu.mul_(second)
