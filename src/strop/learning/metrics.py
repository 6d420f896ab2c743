"""What a training step measures: parts of the loss, and how far sampler and learner are apart.

Sums are kept in float64 over micro-batches and divided once, so that a split changes no figure.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from strop.learning.losses import Loss, Tokens
from strop.learning.microbatches import MicroBatch

#: Ratios between learner and sampler that are unremarkable; the share outside is logged.
BAND = (0.5, 2.0)


class BatchMeter:
    """Collects the metrics of one batch over its micro-batches."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.parts: dict[str, float] = defaultdict(float)
        self.sums: dict[str, float] = defaultdict(float)
        self.by_sequence: dict[str, float] = defaultdict(float)
        self.largest = 0.0
        self.tokens = self.sequences = self.computed = 0

    def component(self, name: str, contribution: Tensor, metrics: dict[str, Tensor], by_sequence: bool) -> None:
        """Add a component's share of the loss, and its metrics, one value a token or a sequence."""
        self.parts[name] += float(contribution.detach())
        sums = self.by_sequence if by_sequence else self.sums
        for metric, values in metrics.items():
            sums[metric] += float(values.detach().double().sum())

    def part(self, part: MicroBatch, tokens: Tokens) -> None:
        """Add what is measured of every trained token: with μ the sampler's and π the learner's distribution."""
        logprobs = tokens.logprobs.detach().double()
        log_ratio = logprobs - tokens.sampler_logprobs.double()  # log π / μ
        ratio = log_ratio.exp()
        self.tokens += len(logprobs)
        self.sequences += len(tokens.groups)
        self.computed += len(part.tree.tokens)
        self.largest = max(self.largest, float(log_ratio.abs().max()))
        outside = (ratio < BAND[0]) | (ratio > BAND[1])
        for name, values in {
            "entropy": -logprobs,
            "mismatch_mean": log_ratio.abs(),
            "mismatch_kl1": -log_ratio,  # KL(μ ‖ π), Schulman's k1 and k3 with samples from μ
            "mismatch_kl": ratio - 1 - log_ratio,
            "mismatch_outside": outside.double(),
        }.items():
            self.sums[name] += float(values.sum())

    def result(self) -> dict[str, float]:
        """The metrics."""
        means = {name: value / max(self.tokens, 1) for name, value in self.sums.items()}
        means |= {name: value / max(self.sequences, 1) for name, value in self.by_sequence.items()}
        if square := means.pop("correction_square", 0.0):
            means["effective_share"] = means["correction"] ** 2 / square  # (Σ w)² / (n Σ w²)
        return {
            "loss": sum(weight * self.parts[name] for name, weight, _ in self.loss.components),
            **{f"loss_{name}": self.parts[name] for name, _, _ in self.loss.components},
            **means,
            "mismatch_max": self.largest,
            "tokens_trained": float(self.tokens),
            "tokens_computed": float(self.computed),
        }
