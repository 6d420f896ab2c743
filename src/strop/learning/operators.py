"""The differentiable pieces of a fused decoder, each with a backward written by hand.

Weights take no part in autograd: every piece adds their gradients to fp32 buffers that it is given, so that bf16
compute accumulates in fp32 over micro-batches. A frozen weight has no buffer, and costs no gradient. Activations stay
in the compute dtype, reductions run in fp32. What is not a matrix product goes through `strop.kernels` where they are
built. How the pieces make a decoder is in `fused_pass`; attention, in `tree_attention`; the head, in `head`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional

from strop import kernels
from strop.models.gates import gate, gate_slopes

#: fp32 elements that an elementwise pass works on at once, so that its intermediate values stay in cache.
IN_CACHE = 1 << 17


def apply(piece: type[Function], *arguments: Any) -> Tensor:
    """Run a differentiable piece: `Function.apply` with a type."""
    return piece.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


class Embedding(Function):
    """Rows of an embedding. Arguments: weight (vocab, hidden), tokens (n,), gradient buffer."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, tokens: Tensor, gradient: Tensor | None) -> Tensor:
        """`anchor` is any tensor that requires a gradient: it makes autograd call `backward`."""
        ctx.save_for_backward(tokens)
        ctx.gradient = gradient
        return weight[tokens]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, ...]:
        """Adds to the rows that were looked up."""
        (tokens,) = ctx.saved_tensors
        if ctx.gradient is not None:
            ctx.gradient.index_add_(0, tokens, upstream.to(ctx.gradient.dtype))
        return None, None, None, None


class Linear(Function):
    """x Wᵀ + b. Arguments: x (n, in), weight (out, in), bias (out,) or None, their gradient buffers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Tensor | None, bias_gradient: Tensor | None
    ) -> Tensor:
        """(n, out)."""
        ctx.save_for_backward(x, weight)
        ctx.gradients = gradient, bias_gradient
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """dx = dy W; dW += dyᵀ x."""
        x, weight = ctx.saved_tensors
        _add_gradients(upstream, x, *ctx.gradients)
        return upstream @ weight, None, None, None, None


class NormedLinear(Function):
    """RMSNorm, then a linear layer: only the norm's input is kept.

    Arguments: x (n, in), the norm's weight (in,), epsilon, its gradient buffer, then as for `Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor,
        epsilon: float,
        scale_gradient: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        gradient: Tensor | None,
        bias_gradient: Tensor | None,
    ) -> Tensor:
        """(n, out)."""
        ctx.save_for_backward(x, scale, weight)
        ctx.epsilon, ctx.scale_gradient, ctx.gradients = epsilon, scale_gradient, (gradient, bias_gradient)
        return functional.linear(_norm(x, scale, epsilon), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Normalises again, which costs a hundredth of the matrix products."""
        x, scale, weight = ctx.saved_tensors
        if ctx.gradients != (None, None):
            _add_gradients(upstream, _norm(x, scale, ctx.epsilon), *ctx.gradients)
        dx = _norm_backward(x, scale, ctx.epsilon, ctx.scale_gradient, upstream @ weight)
        return dx, None, None, None, None, None, None, None


class GatedLinear(Function):
    """silu(gate) · up, then a linear layer: only gate and up are kept. Shazeer 2020, arXiv:2002.05202.

    Arguments: (n, 2 · width), gate then up; then as for `Linear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient: Tensor | None,
        bias_gradient: Tensor | None,
    ) -> Tensor:
        """(n, out)."""
        ctx.save_for_backward(gate_up, weight)
        ctx.gradients = gradient, bias_gradient
        return functional.linear(gate(gate_up), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Computes silu again."""
        gate_up, weight = ctx.saved_tensors
        slopes, product = gate_slopes(gate_up, upstream @ weight)
        _add_gradients(upstream, product, *ctx.gradients)
        return slopes, None, None, None, None


class LowRank(Function):
    """scale · x aᵀ bᵀ, added to some columns of y. Hu et al. 2021, arXiv:2106.09685.

    Arguments: y (n, out), which is written; x (n, in); a (rank, in), b (columns, rank), their gradient buffers; scale;
    the slice of columns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        a_gradient: Tensor | None,
        b_gradient: Tensor | None,
        scale: float,
        columns: slice,
    ) -> Tensor:
        """(n, out): y itself."""
        inner = functional.linear(x, a)
        y[:, columns] += functional.linear(inner, b) * scale
        ctx.mark_dirty(y)
        ctx.save_for_backward(x, inner, a, b)
        ctx.gradients, ctx.scale, ctx.columns = (a_gradient, b_gradient), scale, columns
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """With dz = scale · dy: db += dzᵀ (x aᵀ); da += (dz b)ᵀ x; dx = dz b a."""
        x, inner, a, b = ctx.saved_tensors
        slope = upstream[:, ctx.columns] * ctx.scale
        _add_gradients(slope, inner, ctx.gradients[1], None)
        slope = slope @ b
        _add_gradients(slope, x, ctx.gradients[0], None)
        return upstream, slope @ a, None, None, None, None, None, None


def _add_gradients(upstream: Tensor, x: Tensor, gradient: Tensor | None, bias_gradient: Tensor | None) -> None:
    if gradient is not None:
        gradient.add_(upstream.T @ x)
    if bias_gradient is not None:
        bias_gradient.add_(upstream.sum(0, dtype=bias_gradient.dtype))


class RMSNorm(Function):
    """x / rms(x) · w over the last dimension. Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, gradient: Tensor | None) -> Tensor:
        """Same shape as `x`."""
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.gradient = epsilon, gradient
        return _norm(x, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """See `_norm_backward`."""
        x, weight = ctx.saved_tensors
        return _norm_backward(x, weight, ctx.epsilon, ctx.gradient, upstream), None, None, None


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if kernels.computes(x):
        return kernels.residual_norm(x.reshape(-1, x.shape[-1]).contiguous(), None, weight, epsilon).view(x.shape)
    return functional.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _norm_backward(x: Tensor, weight: Tensor, epsilon: float, gradient: Tensor | None, upstream: Tensor) -> Tensor:
    """With x̂ = x / rms: dx = (w dy - x̂ mean(w dy x̂)) / rms; dw += Σ dy x̂. A few rows at a time stay in cache."""
    shape, width = x.shape, x.shape[-1]
    x, upstream = x.reshape(-1, width), upstream.reshape(-1, width)
    if kernels.computes(x):
        return kernels.norm_backward(x.contiguous(), upstream, weight, epsilon, gradient).view(shape)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    scale = weight.float()
    for start in range(0, len(x), max(1, IN_CACHE // width)):
        rows = slice(start, start + max(1, IN_CACHE // width))
        normed, slope = (part[rows].to(torch.float32, copy=True) for part in (x, upstream))
        inverse = torch.linalg.vecdot(normed, normed).div_(width).add_(epsilon).rsqrt_().unsqueeze_(1)
        normed.mul_(inverse)
        if gradient is not None:
            gradient.add_((normed * slope).sum(0))
        slope.mul_(scale)
        slope.addcmul_(normed, torch.linalg.vecdot(slope, normed).div_(-width).unsqueeze_(1))
        torch.mul(slope, inverse, out=out[rows])
    return out.view(shape)


class Rotary(Function):
    """Rotary position embedding, first half with second half. Su et al. 2021, arXiv:2104.09864."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (n, heads, head_dim); cos, sin (n, 1, head_dim / 2)."""
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """A rotation's transpose turns back."""
        cos, sin = ctx.saved_tensors
        return _rotated(upstream, cos, sin, back=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    if kernels.computes(x) and x[0].is_contiguous():
        return kernels.rotate(x, cos, sin, back)
    sin = -sin if back else sin
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    half = x.shape[-1] // 2
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
    return out
