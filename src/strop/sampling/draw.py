"""Drawing tokens from logits: seeded uniforms, inverse-CDF sampling, truncation. What a row gets depends on its own
logits, parameters, seed and token number alone, bit for bit, whatever rows are drawn beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from strop.sampling.sampler import SamplingParams

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
#: Probabilities are summed in blocks of this many; which block a draw falls into is decided in fp64.
_BLOCK = 256
#: Rows that pass through fp32 at once: they stay in cache.
_ROWS = 16


def _mixed(state: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195, fig. 17)."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def uniform(seed: int, number: int) -> float:
    """Uniform in [0, 1) for token `number` of the request with `seed`: SplitMix64 as a counter-based generator."""
    return (_mixed((_mixed(seed & _MASK) + (number + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    """Draw one token for each row.

    Args:
        logits: (rows, vocab), any floating dtype.
        params: temperature and truncation of each row.
        uniforms: in [0, 1), one for each row; unused by greedy rows.

    Returns:
        Token ids, and their log-probabilities under softmax(z / T) in fp32, truncated and renormalised where the
        row's parameters say so; a greedy row's at T = 1.
    """
    tokens: list[int] = []
    logprobs: list[float] = []
    for start in range(0, len(params), _ROWS):
        rows = slice(start, start + _ROWS)
        drawn = _draw(logits[rows], params[rows], uniforms[rows])
        tokens += drawn[0]
        logprobs += drawn[1]
    return tokens, logprobs


def _draw(logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]) -> tuple[list[int], list[float]]:
    scaled = logits.float()
    temperatures = [row.temperature or 1.0 for row in params]
    if any(temperature != 1.0 for temperature in temperatures):
        scaled = scaled / torch.tensor(temperatures, device=logits.device)[:, None]
    elif scaled is logits:
        scaled = scaled.clone()
    for number, row in enumerate(params):
        if row.temperature and (row.top_k or row.top_p < 1.0 or row.min_p > 0.0):
            scaled[number] = _truncated(scaled[number], row)
    top = scaled.amax(-1, keepdim=True)
    scaled.sub_(top)
    greedy = [number for number, row in enumerate(params) if not row.temperature]
    best = scaled[greedy].argmax(-1) if greedy else None
    relative = scaled.exp()  # probabilities, up to the row's total
    sums = _block_sums(relative)
    ends = sums.cumsum(-1)  # (rows, blocks) fp64
    total = ends[:, -1:]
    target = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * total
    block = _first_beyond(ends, target)
    before = ends.gather(1, block) - sums.gather(1, block)
    index = block * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    inside = relative.gather(1, index.clamp(max=logits.shape[1] - 1)).double()
    inside.masked_fill_(index >= logits.shape[1], 0.0)
    chosen = block * _BLOCK + _first_beyond(inside.cumsum(-1), target - before)
    if best is not None:
        chosen[greedy] = best[:, None]
    logprobs = scaled.gather(1, chosen).double() - total.log()
    return chosen[:, 0].tolist(), logprobs[:, 0].tolist()


def _block_sums(values: Tensor) -> Tensor:
    """Sums of blocks along the last dimension, the last block filled up with zeros: (rows, blocks) fp64."""
    rows, vocab = values.shape
    whole = vocab // _BLOCK * _BLOCK
    sums = values[:, :whole].view(rows, -1, _BLOCK).sum(-1) if whole else values.new_empty((rows, 0))
    if whole < vocab:
        sums = torch.cat([sums, values[:, whole:].sum(-1, keepdim=True)], dim=1)
    return sums.double()


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """Index of the first running sum beyond `target`; where rounding leaves none, of the last with any mass."""
    last = (ends < ends[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum((ends <= target).sum(-1, keepdim=True), last)


def _truncated(scaled: Tensor, params: SamplingParams) -> Tensor:
    """(vocab,) with -inf where top-k, then top-p, then min-p remove a token. Of equals, lower ids count as likelier."""
    values, order = scaled.sort(descending=True, stable=True)
    kept = min(params.top_k or len(values), len(values))
    if params.top_p < 1.0:
        before = values[:kept].double().softmax(0).cumsum(0).roll(1)
        before[0] = 0.0
        kept = int((before < params.top_p).sum())  # the token that crosses top_p is kept
    if params.min_p > 0.0:
        kept = min(kept, int((values >= values[0] + math.log(params.min_p)).sum()))
    return torch.full_like(scaled, float("-inf")).index_copy_(0, order[:kept], values[:kept])
