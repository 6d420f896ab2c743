"""Which groups are worth training on, and what an overlong attempt costs (DAPO, Yu et al. 2025, arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence


def has_variance(rewards: Sequence[float | None]) -> bool:
    """Whether a group teaches anything: two of its scored members differ (DAPO's dynamic sampling, eq. 11)."""
    return len({reward for reward in rewards if reward is not None}) > 1


def overlong_penalty(tokens: int, max_tokens: int, window: int) -> float:
    """DAPO's soft overlong punishment, eq. 13, to be added to the reward.

    Args:
        tokens: sampled tokens of the attempt.
        max_tokens: length at which the whole penalty is reached.
        window: length of the slope before it.

    Returns:
        0 up to max_tokens - window, then falling linearly to -1 at max_tokens, and -1 beyond.

    Raises:
        ValueError: the window is not between 1 and max_tokens.
    """
    if not 0 < window <= max_tokens:
        raise ValueError(f"window = {window} does not lie between 1 and max_tokens = {max_tokens}")
    return -min(max(tokens - (max_tokens - window), 0) / window, 1.0)
