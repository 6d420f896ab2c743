"""Estimators of KL(π ‖ ρ) from tokens that were sampled from π. Schulman 2020, "Approximating KL divergence".

With log r = log ρ - log π at the sampled token: k1 = -log r (unbiased, any sign), k2 = (log r)² / 2 (biased, small
variance), k3 = r - 1 - log r (unbiased, never negative). As a loss, where what counts is the gradient: k2's is the
unbiased gradient of the KL, k3's that of KL(ρ ‖ π) instead, and k1's is 0 on average.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Per-token estimate, in nats.

    Args:
        logprobs: (tokens,) of the policy that sampled; the gradient goes through them.
        reference: (tokens,) of the other distribution, at the same tokens.
        estimator: which.

    Raises:
        ValueError: the shapes differ, or there is no such estimator.
    """
    if logprobs.shape != reference.shape:
        raise ValueError(
            f"log-probabilities {tuple(logprobs.shape)} and reference {tuple(reference.shape)} differ in shape"
        )
    log_ratio = reference - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return log_ratio.expm1() - log_ratio
    raise ValueError(f"there is no estimator {estimator!r}: there are k1, k2 and k3")
