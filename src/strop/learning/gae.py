"""Generalised advantage estimation and reward-to-go, over the sampled tokens of one sequence.

Tool and prompt tokens are not steps: they are passed over, so that discount and lambda decay with sampled tokens
alone. A value function itself lives elsewhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def _aligned(**arrays: ArrayLike) -> list[NDArray[np.float64]]:
    """The arrays in float64, all of one length."""
    result = {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}
    if len({array.shape for array in result.values()}) > 1 or any(array.ndim != 1 for array in result.values()):
        raise ValueError(f"one number a token is needed: {', '.join(f'{n} {a.shape}' for n, a in result.items())}")
    return list(result.values())


def generalised_advantages(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    *,
    discount: float = 1.0,
    decay: float = 1.0,
    bootstrap: float | None = None,
) -> tuple[Array, Array]:
    """Advantages and value targets. Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    A_t = Σ_k (discount · decay)^k δ_{t+k}, with δ_t = r_t + discount · V_{t+1} - V_t, over sampled tokens.

    Args:
        rewards: (tokens,) reward given after each token. What arrives at a token that was not sampled counts for the
            sampled token before it, which brought it about.
        values: (tokens,) estimate before each token was sampled; ignored where `mask` is 0.
        mask: (tokens,) 1 where the token was sampled.
        discount: gamma, 0 to 1.
        decay: lambda, 0 to 1.
        bootstrap: value after the last token where a time limit cut the sequence off (truncation); None where the
            task itself ended (termination), after which nothing is to be had.

    Returns:
        Advantages, and targets for the value function (advantage + value), both (tokens,), 0 where `mask` is 0.

    Raises:
        ValueError: lengths differ.
    """
    reward, value, sampled = _aligned(rewards=rewards, values=values, mask=mask)
    advantages, targets = np.zeros_like(reward), np.zeros_like(reward)
    following = 0.0 if bootstrap is None else bootstrap  # V of the next sampled token
    running, arrived = 0.0, 0.0
    for at in reversed(range(len(reward))):
        arrived += reward[at]
        if not sampled[at]:
            continue
        running = arrived + discount * following - value[at] + discount * decay * running
        advantages[at], targets[at] = running, running + value[at]
        following, arrived = value[at], 0.0
    return advantages, targets


def reward_to_go(rewards: ArrayLike, mask: ArrayLike, *, discount: float = 1.0) -> Array:
    """Discounted sum of the rewards from each sampled token on; (tokens,), 0 where `mask` is 0.

    Args:
        rewards: (tokens,) as in `generalised_advantages`.
        mask: (tokens,) 1 where the token was sampled.
        discount: per sampled token.
    """
    return generalised_advantages(rewards, np.zeros(np.shape(rewards)), mask, discount=discount)[0]
