"""Loss components that compare a chosen with a rejected sequence, or judge one by its label.

Which sequence is which stands in the advantages: above 0 chosen or desirable, below 0 rejected or undesirable. A group
is a pair. Each token carries the loss of its whole pair, so that the mean over sequences of token means, the only
aggregation here, is the mean over pairs. Token losses are in `losses`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from strop.errors import BatchError
from strop.learning.aggregation import Aggregation
from strop.learning.losses import LOSSES, Component, PerToken, Tokens

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class _BySequence(Component):
    """Shared by losses of whole sequences."""

    aggregation: Aggregation = "sequence_mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aggregation != "sequence_mean":
            raise ValueError("a preference is one number for whole sequences: leave aggregation at 'sequence_mean'")

    @property
    def by_sequence(self) -> bool:
        """See `Component`."""
        return True


@dataclass(frozen=True, kw_only=True)
class PairLoss(_BySequence):
    """Base of the losses over pairs.

    Raises:
        BatchError: on a group that isn't one chosen and one rejected sequence.
    """

    @property
    def compares_sequences(self) -> bool:
        """See `Component`."""
        return True

    def score(self, tokens: Tokens) -> Tensor:
        """What is compared: (sequences,), higher for what the model prefers."""
        raise NotImplementedError(f"{type(self).__name__} must define score")

    def objective(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """(pairs,) losses of the pairs' scores."""
        raise NotImplementedError(f"{type(self).__name__} must define objective")

    def __call__(self, tokens: Tokens) -> PerToken:
        """See `Component`."""
        chosen, rejected = pairs_of(tokens)
        score = self.score(tokens)
        loss = self.objective(score[chosen], score[rejected])
        by_sequence = score.new_zeros(len(score)).index_copy(0, chosen, loss).index_copy(0, rejected, loss)
        detached = score.detach()
        margin = detached[chosen] - detached[rejected]
        metrics = {
            "accuracy": (margin > 0).to(score.dtype),
            "margin": margin,
            "score_chosen": detached[chosen],
            "score_rejected": detached[rejected],
        }
        both = {name: detached.new_zeros(len(score)) for name in metrics}
        for name, values in metrics.items():  # a pair's value at both its sequences: the mean over them is the pairs'
            both[name][chosen] = both[name][rejected] = values
        return tokens.spread(by_sequence), both


def pairs_of(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Numbers of the chosen and of the rejected sequences, pair by pair.

    Raises:
        BatchError: a group isn't one chosen and one rejected sequence.
    """
    signs = tokens.sequence_mean(tokens.advantages).sign()
    order = tokens.groups.argsort(stable=True)
    chosen, rejected = order[signs[order] > 0], order[signs[order] < 0]
    groups = tokens.groups[chosen]
    whole = len(chosen) + len(rejected) == len(order) and groups.equal(tokens.groups[rejected])
    if not whole or bool((groups.diff() == 0).any()):
        raise BatchError(
            "a preference loss needs pairs: every group one sequence with positive and one with negative advantages."
        )
    return chosen, rejected


def _log_sigmoid(values: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)


def _log_ratio(tokens: Tokens) -> Tensor:
    """(sequences,) log(π / π_ref) of the whole sequence."""
    return tokens.sequence_sum(tokens.logprobs - tokens.extra("reference_logprobs"))


def _positive(name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{name} = {value} must be above 0")


@LOSSES.add("dpo")
@dataclass(frozen=True, kw_only=True)
class DPO(PairLoss):
    """-log σ(β h) with h the difference of the pair's log(π / π_ref). Rafailov et al. 2023, arXiv:2305.18290, eq. 7.

    With label smoothing ε it is cDPO, -(1 - ε) log σ(β h) - ε log σ(-β h): Mitchell 2023, "A note on DPO with noisy
    preferences", eq. 3.

    Attributes:
        beta: how much a difference counts; small values let the policy move far.
        label_smoothing: share of pairs that are thought to be the wrong way round.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("beta", self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing = {self.label_smoothing} must lie between 0 and 0.5")

    @property
    def needs(self) -> frozenset[str]:
        """See `Component`."""
        return frozenset({"reference_logprobs"})

    def score(self, tokens: Tokens) -> Tensor:
        """The implicit reward, β log(π / π_ref)."""
        return self.beta * _log_ratio(tokens)

    def objective(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """See `PairLoss`."""
        difference, smoothing = chosen - rejected, self.label_smoothing
        return -(1 - smoothing) * _log_sigmoid(difference) - smoothing * _log_sigmoid(-difference)


@LOSSES.add("ipo")
@dataclass(frozen=True, kw_only=True)
class IPO(PairLoss):
    """(h - 1 / (2 β))². Azar et al. 2023, arXiv:2310.12036, eq. 17, where β is called τ.

    Attributes:
        beta: the regularisation; the pair's difference is drawn towards 1 / (2 β).
        by_token: compare means over tokens instead of the paper's sums, which the length of an answer would decide.
            This is what the authors' experiments and TRL do.
    """

    beta: float = 0.1
    by_token: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("beta", self.beta)

    @property
    def needs(self) -> frozenset[str]:
        """See `Component`."""
        return frozenset({"reference_logprobs"})

    def score(self, tokens: Tokens) -> Tensor:
        """log(π / π_ref), a token or in all."""
        if self.by_token:
            return tokens.sequence_mean(tokens.logprobs - tokens.extra("reference_logprobs"))
        return _log_ratio(tokens)

    def objective(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """See `PairLoss`."""
        return (chosen - rejected - 1 / (2 * self.beta)).square()


@LOSSES.add("simpo")
@dataclass(frozen=True, kw_only=True)
class SimPO(PairLoss):
    """-log σ(β (log π(y_w) / |y_w| - log π(y_l) / |y_l|) - γ), without a reference. Meng et al. 2024,
    arXiv:2405.14734, eq. 6.

    Attributes:
        beta: as in the paper's section 3, 2.0 to 2.5.
        gamma: by how much the chosen one should win.
    """

    beta: float = 2.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("beta", self.beta)
        if self.gamma < 0:
            raise ValueError(f"gamma = {self.gamma} must not be negative")

    def score(self, tokens: Tokens) -> Tensor:
        """β times the mean log-probability of a token."""
        return self.beta * tokens.sequence_mean(tokens.logprobs)

    def objective(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """See `PairLoss`."""
        return -_log_sigmoid(chosen - rejected - self.gamma)


@LOSSES.add("orpo")
@dataclass(frozen=True, kw_only=True)
class ORPO(PairLoss):
    """-log p(y_w) - λ log σ(log odds(y_w) - log odds(y_l)), without a reference. Hong et al. 2024, arXiv:2403.07691,
    eq. 6 and 7, with p the geometric mean of the tokens' probabilities (eq. 3) and odds = p / (1 - p).

    Attributes:
        ratio_weight: λ.
    """

    ratio_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _positive("ratio_weight", self.ratio_weight)

    def score(self, tokens: Tokens) -> Tensor:
        """log p, the mean log-probability of a token."""
        return tokens.sequence_mean(tokens.logprobs)

    def objective(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """See `PairLoss`."""
        return -chosen - self.ratio_weight * _log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)). A token that is certain has no finite odds: p is kept one rounding below 1."""
    bounded = log_p.clamp(max=-1e-6)
    return bounded - (-bounded.expm1()).log()


@LOSSES.add("kto")
@dataclass(frozen=True, kw_only=True)
class KTO(_BySequence):
    """λ (1 - σ(±β (log(π / π_ref) - z₀))), + for desirable sequences and - for others, which need not come in pairs.
    Ethayarajh et al. 2024, arXiv:2402.01306, eq. 8.

    z₀, what the batch's answers to other prompts have gained over the reference and at least 0, comes with the tokens
    as "kl_baseline": a loss of one micro-batch can't know the whole batch.

    Attributes:
        beta: how much a difference counts.
        desirable_weight, undesirable_weight: λ of each; with n of each kind, desirable_weight · n_desirable should lie
            between 1 and 4/3 of undesirable_weight · n_undesirable (eq. 9).
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "desirable_weight", "undesirable_weight"):
            _positive(name, getattr(self, name))

    @property
    def needs(self) -> frozenset[str]:
        """See `Component`."""
        return frozenset({"reference_logprobs", "kl_baseline"})

    def __call__(self, tokens: Tokens) -> PerToken:
        """See `Component`."""
        ratio, sign = _log_ratio(tokens), tokens.sequence_mean(tokens.advantages).sign()
        baseline = tokens.sequence_mean(tokens.extra("kl_baseline"))
        weight = (sign > 0) * self.desirable_weight + (sign < 0) * self.undesirable_weight
        loss = weight * (1 - (sign * self.beta * (ratio - baseline)).sigmoid())
        gained = (self.beta * ratio).detach()
        return tokens.spread(loss), {"score": gained, "margin": sign * gained, "kl_baseline": baseline}


@LOSSES.add("bradley_terry")
@dataclass(frozen=True, kw_only=True)
class BradleyTerry(PairLoss):
    """-log σ(r_w - r_l), for a model that ends in a value head. Bradley & Terry 1952; Ouyang et al. 2022,
    arXiv:2203.02155, eq. 1.

    Attributes:
        centre: weight of (r_w + r_l)², which keeps rewards around 0. Eisenstein et al. 2023, arXiv:2312.09244, eq. 2.
    """

    centre: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centre < 0:
            raise ValueError(f"centre = {self.centre} must not be negative")

    @property
    def reads(self) -> Literal["logprobs", "values"]:
        """See `Component`."""
        return "values"

    def score(self, tokens: Tokens) -> Tensor:
        """The reward: what the value head gives at the sequence's only trained token."""
        return tokens.sequence_sum(tokens.logprobs)

    def objective(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        """See `PairLoss`."""
        return -_log_sigmoid(chosen - rejected) + self.centre * (chosen + rejected).square()
