"""Loss components: per-token losses of the trained tokens, by name. What a recipe calls its loss is a list of these.

A component never divides by a count: `strop.learning.aggregation` gives every token its weight from the whole batch.
Only trained tokens arrive here, so prompt and tool tokens can have no loss and no KL by construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from strop.errors import BatchError, ConfigError
from strop.learning.aggregation import Aggregation
from strop.learning.corrections import Correction, make_correction
from strop.learning.kl import Estimator, kl_estimate
from strop.learning.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

#: What a component gives: per-token losses, and metrics by token or by sequence whose mean is logged.
PerToken = tuple["Tensor", dict[str, "Tensor"]]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of some whole sequences.

    Attributes:
        logprobs: (tokens,) log-probability under the learner's weights, at the sampler's temperature; fp32, with
            gradient. Of a model that ends in a value head: the value of what comes before the token.
        sampler_logprobs: (tokens,) as recorded when they were sampled.
        advantages: (tokens,).
        sequence: (tokens,) number of the sequence that each belongs to, 0 … sequences - 1.
        groups: (sequences,) number of the group that each sequence belongs to.
        extras: further per-token values by name: "reference_logprobs", "proximal_logprobs" …
    """

    logprobs: Tensor
    sampler_logprobs: Tensor
    advantages: Tensor
    sequence: Tensor
    groups: Tensor
    extras: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        shapes = {
            name: tuple(getattr(self, name).shape)
            for name in ("logprobs", "sampler_logprobs", "advantages", "sequence")
        }
        shapes |= {name: tuple(extra.shape[:1]) for name, extra in self.extras.items()}
        if len(set(shapes.values())) != 1:
            raise BatchError(f"every trained token needs one value of each kind, but the shapes are {shapes}.")

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum over each sequence's tokens: (tokens,) → (sequences,)."""
        return values.new_zeros(len(self.groups)).index_add(0, self.sequence, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over each sequence's tokens: (tokens,) → (sequences,)."""
        return self.sequence_sum(values) / self.sequence_sum(values.new_ones(values.shape)).clamp_min(1)

    def spread(self, values: Tensor) -> Tensor:
        """Each sequence's value at all its tokens: (sequences,) → (tokens,)."""
        return values[self.sequence]

    def extra(self, name: str) -> Tensor:
        """A further per-token value.

        Raises:
            BatchError: the batch doesn't carry it.
        """
        if name not in self.extras:
            there = ", ".join(self.extras) or "none"
            raise BatchError(f"the loss needs {name} for every token; the batch carries these extras: {there}.")
        return self.extras[name]


@dataclass(frozen=True, kw_only=True)
class Component:
    """One part of the loss.

    Attributes:
        aggregation: how its per-token losses become one number.
        constant: what aggregation "constant" divides by, in tokens.
    """

    aggregation: Aggregation = "token_mean"
    constant: int | None = None

    def __post_init__(self) -> None:
        if (self.aggregation == "constant") != (self.constant is not None):
            raise ValueError("aggregation = 'constant' and constant = <tokens> go together: give both or neither")
        if self.constant is not None and self.constant < 1:
            raise ValueError(f"constant = {self.constant} must be at least 1 token")

    @property
    def needs(self) -> frozenset[str]:
        """Extras that the batch must carry."""
        return frozenset()

    @property
    def scales_with_advantage(self) -> bool:
        """Whether a token with advantage 0 has no gradient, so that no work need be done for it."""
        return False

    @property
    def compares_sequences(self) -> bool:
        """Whether it compares the sequences of a group, which must then be computed together."""
        return False

    @property
    def by_sequence(self) -> bool:
        """Whether its metrics are one value a sequence, and not one a token."""
        return False

    @property
    def reads(self) -> Literal["logprobs", "values"]:
        """What the model has to end in: a head over the vocabulary, or a value head."""
        return "logprobs"

    def __call__(self, tokens: Tokens) -> PerToken:
        """Losses (tokens,) and metrics (tokens,) each, or (sequences,) where it measures `by_sequence`."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")


LOSSES: Registry[Component] = Registry("loss")


def _ratio_metrics(ratio: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    return {"clip_low": low.to(ratio.dtype), "clip_high": high.to(ratio.dtype), "ratio": ratio.detach()}


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(Component):
    """Base of the policy losses.

    Attributes:
        anchor: where the ratio π_θ / π_anchor starts from. "sampler": what sampled the tokens. "proximal": the policy
            at the start of the step, whose log-probabilities the batch carries (decoupled PPO, Hilton et al. 2021,
            arXiv:2110.00641). "current": the present weights, so that the ratio is 1 and has a gradient.
        corrections: off-policy corrections, a list of `{name = …, …}`, multiplied. With log(anchor / sampler), or for
            anchor "sampler" (where only masks make sense) with log(current / sampler).
    """

    anchor: Literal["sampler", "proximal", "current"] = "sampler"
    corrections: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        made = tuple(make_correction(spec, "corrections") for spec in self.corrections)
        if self.anchor == "sampler" and self.weighs_from_sampler and any(correction.reweights for correction in made):
            raise ValueError(
                "the ratio of anchor 'sampler' is already the importance weight, so a correction that multiplies by one "
                "would count it twice; use anchor = 'current' or 'proximal', or a mask"
            )
        object.__setattr__(self, "_corrections", made)

    @property
    def weighs_from_sampler(self) -> bool:
        """Whether the objective has an importance ratio of its own."""
        return True

    @property
    def needs(self) -> frozenset[str]:
        """See `Component`."""
        return frozenset({"proximal_logprobs"} if self.anchor == "proximal" else ())

    @property
    def scales_with_advantage(self) -> bool:
        """See `Component`."""
        return True

    def objective(self, tokens: Tokens, log_ratio: Tensor) -> PerToken:
        """Per-token loss before corrections; `log_ratio` is log(π_θ / π_anchor) with gradient."""
        raise NotImplementedError(f"{type(self).__name__} must define objective")

    def __call__(self, tokens: Tokens) -> PerToken:
        """See `Component`."""
        current = tokens.logprobs.detach()
        anchor = {
            "sampler": lambda: tokens.sampler_logprobs,
            "proximal": lambda: tokens.extra("proximal_logprobs"),
            "current": lambda: current,
        }[self.anchor]()
        loss, metrics = self.objective(tokens, tokens.logprobs - anchor)
        made: tuple[Correction, ...] = self._corrections  # type: ignore[attr-defined]
        if made:
            off_policy = (current if self.anchor == "sampler" else anchor) - tokens.sampler_logprobs
            weight = made[0](off_policy, tokens)
            for correction in made[1:]:
                weight = weight * correction(off_policy, tokens)
            loss = loss * weight
            metrics["correction"] = weight
            metrics["correction_square"] = weight.square()
            metrics["corrected_away"] = (weight == 0).to(weight.dtype)
        return loss, metrics


@LOSSES.add("reinforce")
@dataclass(frozen=True, kw_only=True)
class Reinforce(PolicyLoss):
    """-A log π. Williams 1992. Its anchor plays no part but for corrections."""

    @property
    def weighs_from_sampler(self) -> bool:
        """See `PolicyLoss`."""
        return False

    def objective(self, tokens: Tokens, log_ratio: Tensor) -> PerToken:
        """See `PolicyLoss`."""
        return -tokens.advantages * tokens.logprobs, {}


@LOSSES.add("importance")
@dataclass(frozen=True, kw_only=True)
class Importance(PolicyLoss):
    """-A π/π_anchor, unclipped."""

    def objective(self, tokens: Tokens, log_ratio: Tensor) -> PerToken:
        """See `PolicyLoss`."""
        ratio = log_ratio.exp()
        return -tokens.advantages * ratio, {"ratio": ratio.detach()}


@dataclass(frozen=True, kw_only=True)
class _Clipped(PolicyLoss):
    """Shared by losses that clip a ratio to [1 - clip_low, 1 + clip_high].

    Attributes:
        clip_low, clip_high: how far the ratio may go down and up. They differ in DAPO's asymmetric clip (0.2, 0.28;
            arXiv:2503.14476, eq. 10).
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_low <= 1 or self.clip_high < 0:
            raise ValueError(
                f"clip_low = {self.clip_low} must lie between 0 and 1, and clip_high = {self.clip_high} must not be negative"
            )

    def clipped(self, ratio: Tensor, advantages: Tensor) -> PerToken:
        """-min(r A, clip(r) A), and where each side was clipped."""
        loss = (-ratio * advantages).maximum(-ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages)
        low = (ratio < 1 - self.clip_low) & (advantages < 0)
        high = (ratio > 1 + self.clip_high) & (advantages > 0)
        return loss, _ratio_metrics(ratio, low, high)


@LOSSES.add("ppo_clip")
@dataclass(frozen=True, kw_only=True)
class PPOClip(_Clipped):
    """-min(r A, clip(r) A) by token. Schulman et al. 2017, arXiv:1707.06347, eq. 7.

    With aggregation "constant" and an advantage without standard deviation it is Dr. GRPO's (arXiv:2503.20783).

    Attributes:
        dual_clip: for A < 0 the loss is at most dual_clip · |A| (Ye et al. 2020, arXiv:1912.09729, eq. 5), above 1;
            None switches it off.
    """

    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip = {self.dual_clip} must be above 1, for example 3.0")

    def objective(self, tokens: Tokens, log_ratio: Tensor) -> PerToken:
        """See `PolicyLoss`."""
        ratio = log_ratio.exp()
        loss, metrics = self.clipped(ratio, tokens.advantages)
        if self.dual_clip is not None:
            negative = tokens.advantages < 0
            bound = -self.dual_clip * tokens.advantages
            metrics["clip_dual"] = (negative & (loss > bound)).to(ratio.dtype)
            loss = loss.minimum(bound).where(negative, loss)
        return loss, metrics


@LOSSES.add("gspo")
@dataclass(frozen=True, kw_only=True)
class GSPO(_Clipped):
    """PPO-clip with one ratio a sequence, the geometric mean of its tokens' ratios. Zheng et al. 2025,
    arXiv:2507.18071, eq. 5 to 7. The clip range is the paper's (section 5.1), its aggregation the sequence mean.
    """

    aggregation: Aggregation = "sequence_mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def objective(self, tokens: Tokens, log_ratio: Tensor) -> PerToken:
        """See `PolicyLoss`."""
        return self.clipped(tokens.spread(tokens.sequence_mean(log_ratio)).exp(), tokens.advantages)


@LOSSES.add("cispo")
@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """-sg[min(r, 1 + clip_high)] A log π: the weight is clipped, no token loses its gradient. MiniMax 2025,
    arXiv:2506.13585, eq. 4 and 5, where only the upper side is clipped.

    Attributes:
        clip_high: how far the weight may go above 1.
    """

    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clip_high < 0:
            raise ValueError(f"clip_high = {self.clip_high} must not be negative")

    def objective(self, tokens: Tokens, log_ratio: Tensor) -> PerToken:
        """See `PolicyLoss`."""
        ratio = log_ratio.detach().exp()
        high = (ratio > 1 + self.clip_high).to(ratio.dtype)
        loss = -ratio.clamp(max=1 + self.clip_high) * tokens.advantages * tokens.logprobs
        return loss, {"clip_high": high, "ratio": ratio}


@LOSSES.add("cross_entropy")
@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Component):
    """-log π: supervised learning."""

    def __call__(self, tokens: Tokens) -> PerToken:
        """See `Component`."""
        return -tokens.logprobs, {}


@LOSSES.add("kl")
@dataclass(frozen=True, kw_only=True)
class KL(Component):
    """KL to a reference policy whose log-probabilities the batch carries, see `strop.learning.kl`.

    Attributes:
        estimator: k1, k2 or k3; the default is GRPO's (arXiv:2402.03300, eq. 4).
    """

    estimator: Estimator = "k3"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimator == "k1":
            raise ValueError("the gradient of k1 is 0 on average, so it trains nothing; use 'k2' or 'k3'")

    @property
    def needs(self) -> frozenset[str]:
        """See `Component`."""
        return frozenset({"reference_logprobs"})

    def __call__(self, tokens: Tokens) -> PerToken:
        """See `Component`."""
        return kl_estimate(tokens.logprobs, tokens.extra("reference_logprobs"), self.estimator), {}


@dataclass(frozen=True, slots=True)
class Loss:
    """What a learner minimises: a weighted sum of components.

    Attributes:
        components: (name, weight, component), names distinct.
    """

    components: tuple[tuple[str, float, Component], ...]

    @property
    def needs(self) -> frozenset[str]:
        """Extras that the batch must carry."""
        return frozenset().union(*(component.needs for _, _, component in self.components))

    @property
    def scales_with_advantage(self) -> bool:
        """Whether tokens with advantage 0 have no gradient."""
        return all(component.scales_with_advantage for _, _, component in self.components)

    @property
    def compares_sequences(self) -> bool:
        """Whether groups must be computed whole."""
        return any(component.compares_sequences for _, _, component in self.components)

    @property
    def reads(self) -> frozenset[str]:
        """What the model has to end in; more than one asks for what no model is."""
        return frozenset(component.reads for _, _, component in self.components)


def make_loss(specs: Sequence[Mapping[str, Any]], key: str = "loss") -> Loss:
    """The loss that a recipe describes.

    Args:
        specs: `{"name": …, "weight": 1.0, option: …}` each.
        key: the recipe's key, for error messages.

    Raises:
        ConfigError: no component, unknown names or options, or values that are not right.
    """
    if not specs:
        raise ConfigError(key, "it has no components", f"Name at least one of: {', '.join(LOSSES.classes)}")
    components: list[tuple[str, float, Component]] = []
    for number, spec in enumerate(specs):
        options = dict(spec)
        name, weight = str(options.pop("name", "")), options.pop("weight", 1.0)
        place = f"{key}.{number}" if len(specs) > 1 else key
        if not isinstance(weight, int | float) or isinstance(weight, bool):
            raise ConfigError(f"{place}.weight", f"{weight!r} is not right", "It should be a number")
        component = LOSSES.make(name, options, place)
        if name in {other for other, _, _ in components}:
            raise ConfigError(place, f"{name!r} is named twice", "Give each component once")
        components.append((name, float(weight), component))
    return Loss(tuple(components))
