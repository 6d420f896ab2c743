"""What is added to rewards before they are compared: DAPO's soft overlong penalty."""

from __future__ import annotations

from strop.config import OverlongSettings
from strop.learning.filters import overlong_penalty
from strop.rollouts import Group


def shaped_rewards(group: Group, overlong: OverlongSettings | None) -> list[float | None]:
    """Rewards of a group's members with the penalty added; None stays None (not scored)."""
    if overlong is None:
        return group.rewards
    return [
        None
        if reward is None
        else reward + overlong_penalty(rollout.sampled_tokens, overlong.max_tokens, overlong.window)
        for reward, rollout in zip(group.rewards, group.rollouts, strict=True)
    ]
