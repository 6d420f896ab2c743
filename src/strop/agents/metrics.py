"""What a set of attempts says about itself: rewards, lengths, failures, recoveries. Means are over scored attempts;
what the environment counts is averaged under its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from strop.rollouts import Failed, Rollout, Scored

Metrics = dict[str, float]


def attempt_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Metrics of any set of attempts."""
    counted = list(scored(rollouts))
    failed = sum(isinstance(rollout.ending, Failed) for rollout in rollouts)
    metrics: Metrics = {"attempts": float(len(rollouts)), "failed": float(failed)}
    if counted:
        endings = [ending for rollout in counted if isinstance(ending := rollout.ending, Scored)]
        tokens = [rollout.sampled_tokens for rollout in counted]
        metrics |= {
            "reward": fmean(ending.reward for ending in endings),
            "solved": fmean(bool(ending.solved) for ending in endings),
            "tokens_per_attempt": fmean(tokens),
            "tokens_longest": float(max(tokens)),
            "calls_per_attempt": fmean(len(rollout.calls) for rollout in counted),
            "truncated": fmean(rollout.truncated for rollout in counted),
            "tries_per_attempt": fmean(rollout.tries for rollout in counted),
            "forks": float(sum(rollout.forks for rollout in counted)),
        }
        names = sorted({name for ending in endings for name in ending.metrics})
        metrics |= {name: fmean(ending.metrics.get(name, 0.0) for ending in endings) for name in names}
        if (rate := recovery_rate(counted)) is not None:
            metrics["recovery"] = rate
    return metrics


def recovery_rate(rollouts: Iterable[Rollout]) -> float | None:
    """Errors recovered from, of errors met (metrics `errors_recovered`, `errors_met`); None where none was met."""
    endings = [rollout.ending for rollout in rollouts if isinstance(rollout.ending, Scored)]
    met = sum(ending.metrics.get("errors_met", 0.0) for ending in endings)
    return sum(ending.metrics.get("errors_recovered", 0.0) for ending in endings) / met if met else None


def scored(rollouts: Iterable[Rollout]) -> Iterable[Rollout]:
    """Those that were scored."""
    return (rollout for rollout in rollouts if isinstance(rollout.ending, Scored))
