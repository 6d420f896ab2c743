"""What a batch of groups says about itself before it is trained on: its attempts, their spread, their staleness."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from strop.agents.metrics import Metrics, attempt_metrics
from strop.rollouts import Failed, FailureKind, Group, Rollout


def batch_metrics(groups: Sequence[Group], version: int) -> Metrics:
    """Metrics of a batch that is about to be trained on.

    Args:
        groups: the batch.
        version: of the weights that will be updated; staleness is counted from it, in versions.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ages = [version - v for r in rollouts for call in r.calls for v in (call.versions[:1] + call.versions[-1:])]
    rewards = [[reward for reward in group.rewards if reward is not None] for group in groups]
    spreads = [pstdev(some) for some in rewards if len(some) > 1]
    malformed = [
        bool(call.get("problem"))
        for r in rollouts
        for message in r.transcript
        for call in message.get("tool_calls") or ()
    ]
    return {
        **attempt_metrics(rollouts),
        **({"malformed_share": fmean(malformed)} if malformed else {}),
        "groups": float(len(groups)),
        "cut_off": float(sum(_cut_off(rollout) for rollout in rollouts)),  # oversampling prefers who is done early
        "reward_std_in_group": fmean(spreads) if spreads else 0.0,
        "groups_without_variance": fmean(spread == 0 for spread in spreads) if spreads else 1.0,
        "staleness_mean": fmean(ages) if ages else 0.0,
        "staleness_max": float(max(ages, default=0)),
    }


def _cut_off(rollout: Rollout) -> bool:
    """Whether the attempt was cancelled because enough others of its group had finished before it."""
    return isinstance(rollout.ending, Failed) and rollout.ending.kind is FailureKind.CANCELLED
