"""What a set of scored attempts says: pass@1, pass@k, intervals, and how two evaluations of the same tasks compare.

Pure functions over NumPy float64, and the record they work on. Sampling attempts lives in `strop.evaluation`,
printing in `strop.evaluation.tables`. Every random draw is seeded: the same evaluation gives the same interval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.errors import EvaluationError

Array = NDArray[np.float64]

#: Resamples of every bootstrap: the ends of a 95 % interval then move by about 1 % of its width between seeds.
RESAMPLES = 10_000
#: How many task indices are drawn at once: bounds a bootstrap's memory to some 64 MB however many tasks there are.
_DRAWS_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its interval, in the figure's own unit.

    Attributes:
        value: the figure.
        low, high: ends of the interval.
        n: how many independent units (tasks) it rests on.
    """

    value: float
    low: float
    high: float
    n: int

    def scaled(self, factor: float) -> Estimate:
        """The same estimate in another unit, for a positive `factor`."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n)


def pass_at_k(attempts: int, solved: int, k: int) -> float:
    """Probability that at least one of k attempts solves the task: the unbiased estimator from n ≥ k attempts.

    1 − C(n − c, k) / C(n, k), as the product 1 − ∏_{i = n−c+1..n} (1 − k/i), which neither overflows nor cancels
    (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", eq. 1 and figure 3). The plug-in
    1 − (1 − c/n)^k is biased low.

    Args:
        attempts: n, attempts made at the task.
        solved: c, how many of them solved it.
        k: how many attempts are allowed.

    Raises:
        EvaluationError: k is not in 1..n, or c is not in 0..n.
    """
    if not 0 <= solved <= attempts:
        raise EvaluationError(f"{solved} of {attempts} attempts can't be solved: a count between 0 and {attempts} can.")
    if not 1 <= k <= attempts:
        raise EvaluationError(
            f"pass@{k} can't be estimated from {attempts} attempts a task: make at least {max(k, 1)} attempts, "
            f"or ask for a k between 1 and {attempts}."
        )
    missed = attempts - solved
    if missed < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(missed + 1, attempts + 1, dtype=np.float64)))


def wilson(successes: float, n: int, confidence: float = 0.95) -> Estimate:
    """A share with the Wilson score interval (Wilson 1927): right for small n and for shares near 0 and 1.

    Args:
        successes: how many of the n trials succeeded (a sum of shares is allowed).
        n: independent trials, at least 1.
        confidence: of the interval, between 0 and 1.

    Raises:
        EvaluationError: no trials, or more successes than trials.
    """
    if n < 1 or not 0 <= successes <= n:
        raise EvaluationError(f"{successes:g} successes in {n} trials have no interval: give 0 to n of n ≥ 1 trials.")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = successes / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At 0 and n the interval ends there exactly; rounding must not push it past the estimate.
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == n else (centre + spread) / scale
    return Estimate(share, low, high, n)


def bootstrap_means(values: Sequence[float] | Array, *, seed: int = 0, resamples: int = RESAMPLES) -> Array:
    """Means of `resamples` resamples, with replacement, of the values. Shape (resamples,).

    Args:
        values: one number a task (a cluster): attempts at one task are not independent, so tasks are resampled whole.
        seed: of the draws.
        resamples: how many.
    """
    data = np.asarray(values, dtype=np.float64)  # (tasks,)
    if data.size == 0:
        raise EvaluationError("There are no tasks to resample: an interval needs at least one scored task.")
    rng = np.random.default_rng(seed)
    means = np.empty(resamples, dtype=np.float64)
    rows = max(1, _DRAWS_AT_ONCE // data.size)
    for start in range(0, resamples, rows):
        stop = min(start + rows, resamples)
        draws = rng.integers(0, data.size, size=(stop - start, data.size))
        means[start:stop] = data[draws].mean(axis=1)
    return means


def bootstrap_mean(
    values: Sequence[float] | Array, *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Estimate:
    """The mean with its percentile bootstrap interval (Efron and Tibshirani 1993, chapter 13).

    Args:
        values: one number a task.
        confidence: of the interval, between 0 and 1.
        seed, resamples: of the bootstrap.

    Raises:
        EvaluationError: there are no values.
    """
    means = bootstrap_means(values, seed=seed, resamples=resamples)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Estimate(float(np.mean(np.asarray(values, dtype=np.float64))), float(low), float(high), len(values))


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact p-value that wins and losses are equally likely; ties are left out.

    With one attempt a task this is McNemar's exact test on the discordant pairs (McNemar 1947):
    2 · P(X ≤ min(wins, losses)) for X ~ Binomial(wins + losses, ½), at most 1.
    """
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1))
    return min(1.0, float(2 * tail / 2**n))


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The scored attempts at one task.

    Attributes:
        task_id: the task.
        label: what results are broken down by, for example "steps 2, kind bill"; "" without any.
        rewards: reward of each scored attempt.
        solved: 1.0 or 0.0 for each scored attempt; empty where the environment has no notion of solving.
    """

    task_id: str
    label: str
    rewards: tuple[float, ...]
    solved: tuple[float, ...] = ()

    @property
    def labels(self) -> list[str]:
        """The parts of its label: "steps 2" and "kind bill"."""
        return self.label.split(", ") if self.label else []

    @property
    def score(self) -> float:
        """Share of solved attempts, or the mean reward where nothing counts as solved."""
        return float(np.mean(self.solved or self.rewards))

    def at_k(self, k: int) -> float:
        """pass@k of this task."""
        if not self.solved:
            raise EvaluationError(f"Task {self.task_id} has no notion of solving: pass@k needs one, rewards don't do.")
        if not set(self.solved) <= {0.0, 1.0}:
            raise EvaluationError(f"Task {self.task_id} holds shares of solved attempts: pass@k needs each attempt.")
        return pass_at_k(len(self.solved), round(sum(self.solved)), k)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A model's scored attempts at a set of held-out tasks.

    Attributes:
        name: which evaluation it was, for example "start" or "step 10".
        tasks: one result a task that has a scored attempt, each task once.
        metrics: means over scored attempts, for example {"tool_errors_met": 0.8}.
        failed: attempts that the system failed; they are in no score.
    """

    name: str
    tasks: tuple[TaskResult, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: int = 0

    def __post_init__(self) -> None:
        seen = {task.task_id for task in self.tasks}
        if len(seen) != len(self.tasks):
            raise EvaluationError(f"Evaluation {self.name!r} lists a task twice: put its attempts into one result.")
        if empty := next((task.task_id for task in self.tasks if not task.rewards), None):
            raise EvaluationError(f"Evaluation {self.name!r} lists task {empty} without an attempt: leave it out.")

    @property
    def attempts(self) -> int:
        """Scored attempts."""
        return sum(len(task.rewards) for task in self.tasks)

    def score(self, confidence: float = 0.95) -> Estimate:
        """pass@1 (or the mean reward) over tasks, each task weighing the same. See `score_of`."""
        return score_of(self.tasks, confidence)

    def pass_at(self, k: int, confidence: float = 0.95) -> Estimate:
        """Mean pass@k over tasks, with a cluster bootstrap interval over tasks.

        Raises:
            EvaluationError: a task has fewer than k scored attempts, or no notion of solving.
        """
        return _share([task.at_k(k) for task in self.tasks], confidence)

    def by_label(self, confidence: float = 0.95) -> dict[str, Estimate]:
        """Score of the tasks that carry each label, in natural order ("steps 2" before "steps 10")."""
        labels = sorted({label for task in self.tasks for label in task.labels}, key=natural_key)
        return {label: self.only(label).score(confidence) for label in labels}

    def only(self, label: str) -> Evaluation:
        """The part of it whose tasks carry this label."""
        return replace(self, tasks=tuple(task for task in self.tasks if label in task.labels))

    def as_record(self) -> dict[str, Any]:
        """As JSON values: what an "evaluation" event of a run directory carries. `from_record` reads it back."""
        score = self.score()
        return {
            "name": self.name,
            "score": score.value,
            "low": score.low,
            "high": score.high,
            "n": score.n,
            "failed": self.failed,
            "metrics": dict(self.metrics),
            "tasks": [[task.task_id, task.label, list(task.solved), list(task.rewards)] for task in self.tasks],
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Evaluation:
        """Read what `as_record` wrote. A lone number stands for one attempt, null for "no notion of solving".

        Raises:
            EvaluationError: the record isn't an evaluation.
        """
        try:
            tasks = tuple(
                TaskResult(str(task_id), str(label), _numbers(rewards), _numbers(solved))
                for task_id, label, solved, rewards in record["tasks"]
            )
            metrics = {str(name): float(value) for name, value in record.get("metrics", {}).items()}
            return cls(str(record["name"]), tasks, metrics, int(record.get("failed", 0)))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EvaluationError(
                f"This record isn't an evaluation ({type(error).__name__}: {error}): it needs a name and tasks, each "
                "[task id, label, solved, rewards]."
            ) from error


@dataclass(frozen=True, slots=True)
class Comparison:
    """How evaluation `after` differs from `before`, over the tasks that both scored.

    Attributes:
        before, after: names of the evaluations.
        score_before, score_after: mean score over the common tasks.
        gain: after − before, in score units (1.0 is 100 points), with its paired-bootstrap interval.
        wins, losses: tasks whose score rose, fell.
        p_value: exact two-sided sign test over them; McNemar's test with one attempt a task.
        left_out: tasks that only one of the two scored.
    """

    before: str
    after: str
    score_before: float
    score_after: float
    gain: Estimate
    wins: int
    losses: int
    p_value: float
    left_out: int


def compare(before: Evaluation, after: Evaluation, *, confidence: float = 0.95, seed: int = 0) -> Comparison:
    """Compare two evaluations task by task.

    The interval is the percentile bootstrap of the mean difference over tasks, each task keeping its pair of scores:
    what both models find hard cancels, so it is narrower than the intervals of two unpaired scores. Where no two tasks
    differ in their difference there is nothing to resample, and n tasks alike only say that fewer than Wilson's upper
    bound of 0 in n are otherwise: the interval is that wide on either side.

    Raises:
        EvaluationError: they have no task in common.
    """
    old = {task.task_id: task.score for task in before.tasks}
    new = {task.task_id: task.score for task in after.tasks}
    common = [task_id for task_id in old if task_id in new]
    if not common:
        raise EvaluationError(
            f"Evaluations {before.name!r} and {after.name!r} have no task in common: compare evaluations of the same "
            "environment, split and task count."
        )
    old_scores = np.array([old[task_id] for task_id in common], dtype=np.float64)
    new_scores = np.array([new[task_id] for task_id in common], dtype=np.float64)
    difference = new_scores - old_scores
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    return Comparison(
        before.name,
        after.name,
        float(old_scores.mean()),
        float(new_scores.mean()),
        _gain(difference, confidence, seed),
        wins,
        losses,
        sign_test(wins, losses),
        len(old) + len(new) - 2 * len(common),
    )


def _gain(difference: Array, confidence: float, seed: int) -> Estimate:
    """Mean difference with its interval; see `compare`."""
    if np.ptp(difference) > 0:
        return bootstrap_mean(difference, confidence=confidence, seed=seed)
    value, n = float(difference[0]), len(difference)
    margin = wilson(0, n, confidence).high
    return Estimate(value, value - margin, value + margin, n)


def score_of(tasks: Sequence[TaskResult], confidence: float = 0.95) -> Estimate:
    """Mean score over tasks.

    With one solved-or-not attempt a task the interval is Wilson's; with several, or with rewards, the cluster
    bootstrap over tasks.

    Raises:
        EvaluationError: there are no tasks.
    """
    if not tasks:
        raise EvaluationError("No task was scored, so there is no score: see the failed attempts for the reason.")
    scores = [task.score for task in tasks]
    if all(task.solved for task in tasks):
        return _share(scores, confidence)
    return bootstrap_mean(scores, confidence=confidence)


def _share(scores: Sequence[float], confidence: float) -> Estimate:
    """Mean of per-task shares: Wilson where they are all 0 or 1, or where there's no spread to resample."""
    if set(scores) <= {0.0, 1.0} or len(set(scores)) == 1:
        return wilson(sum(scores), len(scores), confidence)
    return bootstrap_mean(scores, confidence=confidence)


def _numbers(value: float | Iterable[float] | None) -> tuple[float, ...]:
    if value is None:
        return ()
    return (float(value),) if isinstance(value, (int, float)) else tuple(float(item) for item in value)


def natural_key(text: str) -> list[tuple[float, str]]:
    """Sort key under which numbers inside text count as numbers."""
    return [(float(part), "") if part.isdigit() else (math.inf, part) for part in re.split(r"(\d+)", text) if part]
