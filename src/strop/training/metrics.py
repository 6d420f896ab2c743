"""What a batch of groups says about itself before it is trained on: its attempts, their spread, their staleness."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from strop.agents.metrics import Metrics, attempt_metrics, scored
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
        **_cut_off(rollouts),
        "reward_std_in_group": fmean(spreads) if spreads else 0.0,
        "groups_without_variance": fmean(spread == 0 for spread in spreads) if spreads else 1.0,
        "staleness_mean": fmean(ages) if ages else 0.0,
        "staleness_max": float(max(ages, default=0)),
        **_by_environment(groups),
    }


#: Metrics that are logged of each environment by itself.
_OF_EACH = ("attempts", "failed", "reward", "solved", "tokens_per_attempt", "truncated")


def _by_environment(groups: Sequence[Group]) -> Metrics:
    """Where groups are of several environments, what each of them gave: "reward/shopkeeper" …"""
    names = sorted({group.task.environment for group in groups})
    metrics: Metrics = {}
    for name in names if len(names) > 1 else ():
        its = [group for group in groups if group.task.environment == name]
        found = attempt_metrics([rollout for group in its for rollout in group.rollouts])
        metrics |= {f"{key}/{name}": found[key] for key in _OF_EACH if key in found}
        metrics[f"groups/{name}"] = float(len(its))
        flat = [len({reward for reward in group.rewards if reward is not None}) < 2 for group in its]
        metrics[f"groups_without_variance/{name}"] = fmean(flat)
    return metrics


def _cut_off(rollouts: Sequence[Rollout]) -> Metrics:
    """Who was cancelled because enough others of the group had finished before, and how far they had come.

    Oversampling prefers attempts that end early: tokens (of whole replies) and seconds so far are lower bounds of what
    these attempts would have taken, to be read beside `tokens_per_attempt` and `seconds_per_attempt` of those kept.
    """
    endings = [(rollout, rollout.ending) for rollout in rollouts]
    cut = [r for r, ending in endings if isinstance(ending, Failed) and ending.kind is FailureKind.CANCELLED]
    if not cut:
        return {"cut_off": 0.0}
    kept = [rollout.ended - rollout.started for rollout in scored(rollouts)]
    return {
        "cut_off": float(len(cut)),
        "cut_off_tokens": fmean(rollout.sampled_tokens for rollout in cut),
        "cut_off_seconds": fmean(rollout.ended - rollout.started for rollout in cut),
        **({"seconds_per_attempt": fmean(kept)} if kept else {}),
    }
