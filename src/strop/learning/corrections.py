"""Off-policy corrections: weights for tokens whose sampler was not the policy that is differentiated.

Each takes log(π / μ) of every trained token, where μ is what the sampler recorded and π the policy the loss is anchored
at, and gives a factor for its loss: an importance weight that is truncated, or a mask that drops what is too far off,
by token or by sequence. Factors carry no gradient, and a dropped token stays in the denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from strop.learning.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from strop.learning.losses import Tokens


class Correction(Protocol):
    """A factor for every trained token.

    Attributes:
        reweights: whether it multiplies by a ratio. One that does has no place in a loss whose own ratio already
            starts at the sampler.
    """

    reweights: bool

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """Factors (tokens,) from log-ratios (tokens,)."""
        ...


CORRECTIONS: Registry[Correction] = Registry("correction")


def make_correction(spec: Mapping[str, Any], key: str) -> Correction:
    """The correction that a recipe names, `{"name": …, option: …}`.

    Raises:
        ConfigError: unknown name or option, or a value that is not right.
    """
    options = dict(spec)
    return CORRECTIONS.make(str(options.pop("name", "")), options, key)


def effective_sample_size(weights: Tensor) -> Tensor:
    """(Σ w)² / Σ w², of Kong 1992: how many equally weighted samples the weights are worth. 0 if all are 0."""
    square = weights.square().sum()
    return weights.sum().square() / square.clamp_min(1e-30)


@dataclass(frozen=True, slots=True)
class _Cap:
    cap: float = 2.0

    def __post_init__(self) -> None:
        if self.cap <= 0:
            raise ValueError(f"cap = {self.cap} must be above 0; 2.0 is usual")


@dataclass(frozen=True, slots=True)
class _Band:
    low: float = 0.5
    high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < 1 < self.high:
            raise ValueError(
                f"low = {self.low} and high = {self.high} must enclose 1, the ratio of an unchanged policy"
            )

    def inside(self, ratio: Tensor) -> Tensor:
        """1.0 where the ratio lies in the band, bounds included, else 0.0."""
        return ((ratio >= self.low) & (ratio <= self.high)).to(ratio.dtype)


@CORRECTIONS.add("truncated_tokens")
@dataclass(frozen=True, slots=True)
class TruncatedTokens(_Cap):
    """min(π/μ, cap) by token: truncated importance sampling. Ionides 2008; Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training".

    Attributes:
        cap: largest weight.
    """

    reweights = True

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """See `Correction`."""
        return log_ratio.exp().clamp(max=self.cap)


@CORRECTIONS.add("truncated_sequences")
@dataclass(frozen=True, slots=True)
class TruncatedSequences(_Cap):
    """min(Π π/μ, cap), the product over the token's whole sequence.

    Attributes:
        cap: largest weight.
    """

    reweights = True

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """See `Correction`."""
        return tokens.spread(tokens.sequence_sum(log_ratio)).exp().clamp(max=self.cap)


@CORRECTIONS.add("icepop")
@dataclass(frozen=True, slots=True)
class IcePop(_Band):
    """π/μ where it lies in a band, else 0, by token. Ling team 2025, arXiv:2510.18855, section 3.

    Attributes:
        low, high: the band; 0.5 and 5 as in the paper.
    """

    high: float = 5.0
    reweights = True

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """See `Correction`."""
        return log_ratio.exp() * self.inside(log_ratio.exp())


@CORRECTIONS.add("masked_sequences")
@dataclass(frozen=True, slots=True)
class MaskedSequences(_Band):
    """Π π/μ where it lies in a band, else 0, the product over the token's whole sequence: masked importance sampling.

    Attributes:
        low, high: the band.
    """

    reweights = True

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """See `Correction`."""
        ratio = tokens.spread(tokens.sequence_sum(log_ratio)).exp()
        return ratio * self.inside(ratio)


@CORRECTIONS.add("token_mask")
@dataclass(frozen=True, slots=True)
class TokenMask(_Band):
    """1 where π/μ lies in a band, else 0, by token.

    Attributes:
        low, high: the band.
    """

    reweights = False

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """See `Correction`."""
        return self.inside(log_ratio.exp())


@CORRECTIONS.add("sequence_mask")
@dataclass(frozen=True, slots=True)
class SequenceMask(_Band):
    """1 for sequences whose product of π/μ lies in a band, else 0.

    Attributes:
        low, high: the band.
    """

    reweights = False

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """See `Correction`."""
        return self.inside(tokens.spread(tokens.sequence_sum(log_ratio)).exp())


@CORRECTIONS.add("geometric_mask")
@dataclass(frozen=True, slots=True)
class GeometricMask(_Band):
    """1 for sequences whose geometric mean of π/μ lies in a band, else 0; it doesn't tighten with length.

    Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference mismatch".

    Attributes:
        low, high: the band.
    """

    low: float = 0.99
    high: float = 1.01
    reweights = False

    def __call__(self, log_ratio: Tensor, tokens: Tokens) -> Tensor:
        """See `Correction`."""
        return self.inside(tokens.spread(tokens.sequence_mean(log_ratio)).exp())
