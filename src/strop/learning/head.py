"""Log-probabilities of chosen tokens under softmax(z / T), without logits for tokens that carry no loss.

The output layer runs in blocks of rows. The logits of a single block are kept in the compute dtype for the backward
pass; with several, each is computed again. Log-sum-exp and softmax are fp32, a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from strop import kernels

#: Bytes of logits in a block: bounds memory, while the matrix products keep many rows.
BLOCK_BYTES = 1 << 29
#: Elements that pass through fp32 at once: they stay in cache.
CHUNK = 1 << 20


class TokenLogprobs(Function):
    """Log-probabilities of (row, token) pairs; several pairs may share a row.

    Arguments: hidden (rows, hidden) after the final norm; weight (vocab, hidden) and its fp32 gradient buffer, None
    for a frozen one; rows (pairs,) ascending; tokens (pairs,); the temperature that divides the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        gradient: Tensor | None,
        rows: Tensor,
        tokens: Tensor,
        temperature: float,
    ) -> Tensor:
        """(pairs,) fp32."""
        chosen = torch.empty(len(rows), dtype=torch.float32, device=hidden.device)
        normaliser = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logits = hidden[:0]
        for start, stop in _ranges(len(hidden), BLOCK_BYTES // (len(weight) * weight.element_size())):
            logits = hidden[start:stop] @ weight.T
            normaliser[start:stop] = _logsumexp(logits, temperature)
            pairs = _pairs(rows, start, stop)
            chosen[pairs] = logits[rows[pairs] - start, tokens[pairs]].float() / temperature
        ctx.save_for_backward(hidden, weight, rows, tokens, normaliser)
        ctx.logits = logits if len(logits) == len(hidden) and ctx.needs_input_grad[0] else None
        ctx.gradient, ctx.temperature = gradient, temperature
        return chosen.sub_(normaliser[rows])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """With g the gradient of each pair and G its sum over a row: dz = (Σ g onehot - G softmax(z / T)) / T."""
        hidden, weight, rows, tokens, normaliser = ctx.saved_tensors
        upstream = upstream / ctx.temperature
        total = upstream.new_zeros(len(hidden)).index_add_(0, rows, upstream).neg_()
        d_hidden = torch.empty_like(hidden)
        for start, stop in _ranges(len(hidden), BLOCK_BYTES // (len(weight) * weight.element_size())):
            slope = hidden[start:stop] @ weight.T if ctx.logits is None else ctx.logits
            ctx.logits = None
            pairs = _pairs(rows, start, stop)
            here = normaliser[start:stop], total[start:stop], rows[pairs] - start, tokens[pairs], upstream[pairs]
            _slope_(slope, *here, ctx.temperature)
            torch.mm(slope, weight, out=d_hidden[start:stop])
            if ctx.gradient is not None:
                ctx.gradient.add_(slope.T @ hidden[start:stop])
        return d_hidden, None, None, None, None, None


def _logsumexp(logits: Tensor, temperature: float) -> Tensor:
    """(rows,) fp32 of logits / temperature."""
    if kernels.computes(logits):
        return kernels.logsumexp(logits, temperature)
    return torch.cat([scaled.logsumexp(-1) for _, _, scaled in _chunks(logits, temperature)])


def _slope_(
    logits: Tensor,
    normaliser: Tensor,
    total: Tensor,
    rows: Tensor,
    tokens: Tensor,
    upstream: Tensor,
    temperature: float,
) -> None:
    """Turn logits into dz, see `TokenLogprobs.backward`, but for its last division."""
    if kernels.computes(logits):
        starts = torch.searchsorted(rows, torch.arange(len(logits) + 1))
        kernels.softmax_slope_(logits, normaliser, total, starts, tokens.contiguous(), upstream, temperature)
        return
    for first, last, scaled in _chunks(logits, temperature):
        scaled.sub_(normaliser[first:last, None]).exp_().mul_(total[first:last, None])
        pairs = _pairs(rows, first, last)
        scaled.index_put_((rows[pairs] - first, tokens[pairs]), upstream[pairs], accumulate=True)
        logits[first:last] = scaled


def _ranges(count: int, size: int) -> Iterator[tuple[int, int]]:
    size = max(1, size)
    for start in range(0, count, size):
        yield start, min(start + size, count)


def _chunks(logits: Tensor, temperature: float) -> Iterator[tuple[int, int, Tensor]]:
    """Rows of logits / temperature in an fp32 buffer that is used again and again."""
    size = max(1, CHUNK // logits.shape[1])
    buffer = torch.empty((min(size, len(logits)), logits.shape[1]), dtype=torch.float32, device=logits.device)
    for first, last in _ranges(len(logits), size):
        scaled = buffer[: last - first]
        if temperature == 1.0:
            scaled.copy_(logits[first:last])
        else:
            torch.div(logits[first:last], temperature, out=scaled)
        yield first, last, scaled


def _pairs(rows: Tensor, start: int, stop: int) -> slice:
    """Where in the ascending `rows` those from `start` to `stop` lie."""
    bounds = torch.tensor((start, stop), device=rows.device)
    first, last = torch.searchsorted(rows, bounds).tolist()
    return slice(first, last)
