"""Advantages: how much better each attempt was than what it is compared with. Plain NumPy in float64.

An attempt without a reward (the system failed it) has no part in any mean or deviation and gets advantage 0. Where
all rewards of a group are equal the advantage is exactly 0, never rounding noise over epsilon. Per-token advantages
from a value function are in `strop.learning.gae`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from strop.learning.registry import Registry

Array = NDArray[np.float64]
#: Rewards of one group's members; None where an attempt was not scored.
Rewards = Sequence[float | None]


class Advantage(Protocol):
    """Rewards of a batch's groups to advantages of the same shape."""

    def __call__(self, groups: Sequence[Rewards]) -> list[Array]:
        """Advantages of every member of every group, float64; 0 where there is no reward."""
        ...


ADVANTAGES: Registry[Advantage] = Registry("advantage")


def make_advantage(spec: Mapping[str, Any], key: str = "advantage") -> Advantage:
    """The advantage that a recipe names, `{"name": …, option: …}`.

    Raises:
        ConfigError: unknown name or option, or a value that is not right.
    """
    options = dict(spec)
    return ADVANTAGES.make(options.pop("name"), options, key)


def apart(advantage: Advantage, kinds: Sequence[str]) -> Advantage:
    """An advantage that compares groups of one kind only, for instance of one environment.

    Args:
        advantage: what is computed for the groups of each kind by themselves.
        kinds: of each group of the batch.
    """

    def by_kind(groups: Sequence[Rewards]) -> list[Array]:
        result: list[Array] = [np.zeros(len(rewards)) for rewards in groups]
        for kind in dict.fromkeys(kinds):
            places = [place for place, its in enumerate(kinds) if its == kind]
            for place, values in zip(places, advantage([groups[place] for place in places]), strict=True):
                result[place] = values
        return result

    return by_kind


def _scored(rewards: Rewards) -> tuple[NDArray[np.bool_], Array]:
    """Which members count, and their rewards."""
    there = np.array([reward is not None for reward in rewards], dtype=bool)
    return there, np.array([reward for reward in rewards if reward is not None], dtype=np.float64)


def _spread(there: NDArray[np.bool_], values: Array) -> Array:
    """Values of the members that count, at their places; 0 elsewhere."""
    result = np.zeros(len(there))
    result[there] = values
    return result


def _centred(values: Array) -> Array:
    """Minus the mean; exactly 0 where all are equal (the mean of equal floats need not be one of them)."""
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    return np.asarray(values - values.mean())


@ADVANTAGES.add("grpo")
@dataclass(frozen=True, slots=True)
class GRPO:
    """Reward minus the group's mean, over its standard deviation. Shao et al. 2024, arXiv:2402.03300, section 4.1.

    Without the division it is Dr. GRPO's, Liu et al. 2025, arXiv:2503.20783.

    Attributes:
        divide_by_std: whether to divide.
        ddof: 1 for the sample deviation (over n - 1), which TRL and verl use; 0 for the population's (over n).
        epsilon: added to the deviation; 1e-6 as in verl (TRL adds 1e-4).
    """

    divide_by_std: bool = True
    ddof: Literal[0, 1] = 1
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.epsilon < 0:
            raise ValueError(f"epsilon = {self.epsilon} is negative; it should be 0 or a small number such as 1e-6")

    def __call__(self, groups: Sequence[Rewards]) -> list[Array]:
        """See `Advantage`."""
        result = []
        for rewards in groups:
            there, values = _scored(rewards)
            centred = _centred(values)
            if self.divide_by_std and centred.any():
                centred = centred / (values.std(ddof=self.ddof) + self.epsilon)
            result.append(_spread(there, centred))
        return result


@ADVANTAGES.add("rloo")
@dataclass(frozen=True, slots=True)
class RLOO:
    """Reward minus the mean of the other members' rewards. Kool et al. 2019; Ahmadian et al. 2024, arXiv:2402.14740.

    A group with one scored member has nothing to compare with: 0.
    """

    def __call__(self, groups: Sequence[Rewards]) -> list[Array]:
        """See `Advantage`. Uses r - (sum - r) / (n - 1) = (r - mean) · n / (n - 1)."""
        result = []
        for rewards in groups:
            there, values = _scored(rewards)
            result.append(_spread(there, _centred(values) * len(values) / max(len(values) - 1, 1)))
        return result


@ADVANTAGES.add("reinforce_plus_plus_baseline")
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline:
    """Reward minus the group's mean, then standardised over the whole batch. Hu et al. 2025, arXiv:2501.03262.

    Mean and deviation (over n - 1) are taken over attempts, so a long attempt weighs no more than a short one.

    Attributes:
        epsilon: added to the batch's standard deviation.
    """

    epsilon: float = 1e-6

    def __call__(self, groups: Sequence[Rewards]) -> list[Array]:
        """See `Advantage`."""
        return _standardised([(there, _centred(values)) for there, values in map(_scored, groups)], self.epsilon)


@ADVANTAGES.add("reinforce_plus_plus")
@dataclass(frozen=True, slots=True)
class ReinforcePlusPlus:
    """Reward standardised over the whole batch, without a group baseline. Hu et al. 2025, arXiv:2501.03262.

    Attributes:
        epsilon: added to the batch's standard deviation (over n - 1).
    """

    epsilon: float = 1e-6

    def __call__(self, groups: Sequence[Rewards]) -> list[Array]:
        """See `Advantage`."""
        return _standardised([_scored(rewards) for rewards in groups], self.epsilon)


@ADVANTAGES.add("reward")
@dataclass(frozen=True, slots=True)
class PlainReward:
    """The reward itself, minus a constant: plain REINFORCE.

    Attributes:
        baseline: the constant.
    """

    baseline: float = 0.0

    def __call__(self, groups: Sequence[Rewards]) -> list[Array]:
        """See `Advantage`."""
        return [_spread(there, values - self.baseline) for there, values in map(_scored, groups)]


def _standardised(members: list[tuple[NDArray[np.bool_], Array]], epsilon: float) -> list[Array]:
    """Centre and scale over all members of all groups that count."""
    values = np.concatenate([values for _, values in members]) if members else np.zeros(0)
    centred = _centred(values)
    if centred.any():
        centred = centred / (centred.std(ddof=1) + epsilon)
    ends = np.cumsum([len(values) for _, values in members])[:-1]
    return [_spread(there, part) for (there, _), part in zip(members, np.split(centred, ends), strict=True)]
