"""What a run cost and what it bought: dollars by account, by token, by attempt, and intelligence per dollar.

Computed from a run directory alone. Dollars are machine time × the machine's price, where every second counts, evaluation
and idling included; and what was bought beside it, such as judgements. The accounts add up to the bill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strop.costs.prices import MachinePrice, price_of
from strop.runs.reading import CostPoint, EvaluationEvent, RunRecord
from strop.statistics import Comparison, Estimate, compare

#: The phase in which the ledger books evaluations.
EVALUATION = "evaluation"
_NOTHING = CostPoint(0.0, -1, {"accounts": {}, "tokens": {}})


@dataclass(frozen=True, slots=True)
class Account:
    """What one activity of one phase took.

    Attributes:
        phase, activity: the account.
        seconds: wall time of the machine.
        usd: seconds × price, or what was paid for it.
    """

    phase: str
    activity: str
    seconds: float
    usd: float


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a million tokens of a kind cost.

    Attributes:
        kind: "sampled" or "trained".
        tokens: how many there were in the run.
        usd_per_million: of the activity that makes them alone (sampler, learner); None without tokens.
        usd_per_million_all: of the whole run's dollars, everything included; None without tokens.
    """

    kind: str
    tokens: int
    usd_per_million: float | None
    usd_per_million_all: float | None


@dataclass(frozen=True, slots=True)
class Gain:
    """What a stretch of the run, between two evaluations, gained and cost.

    Attributes:
        name: the stage, or "run" for all of it.
        comparison: the evaluations before and after, task by task.
        usd: dollars spent between them, the second one's own cost included; for "run", everything since its start.
        points_per_usd: intelligence per dollar: points of score (100 × gain) per dollar, with the paired-bootstrap
            interval of the gain (dollars are known exactly); None if nothing was spent.
        target_points: gain that was aimed at; None if none was set.
        usd_to_target: dollars until the lower bound of the gain had first passed it, in the evaluations along the
            stretch; None if it never did.
        solved_usd_before, solved_usd_after: dollars per solved task at the two evaluations: dollars per attempt ÷ score.
            An attempt there costs its mean number of tokens at what a sampled token cost over all evaluations of the
            run (their wall times alone differ with whatever else the machine did), or without those, what an attempt
            cost over all of them. Infinite where nothing was solved; None where evaluations aren't in the ledger.
        break_even: solved tasks after which the cheaper solving has paid for the stretch: usd ÷ (before − after).
            0 if nothing was solved before, infinite if solving got no cheaper; None where unknown.
    """

    name: str
    comparison: Comparison
    usd: float
    points_per_usd: Estimate | None
    target_points: float | None
    usd_to_target: float | None
    solved_usd_before: float | None
    solved_usd_after: float | None
    break_even: float | None


@dataclass(frozen=True, slots=True)
class CostReport:
    """What a run cost so far, and what it bought.

    Attributes:
        price: of the machine.
        seconds, usd: of the whole run.
        accounts: every account, the dearest first; they add up to the whole.
        sampled, trained: cost of tokens.
        tokens: counts of each kind over all phases.
        attempts, solved: made and solved over the whole run, evaluations included.
        usd_per_attempt, usd_per_solved: the whole run's dollars over them; None if there were none.
        gains: one per stage, then "run" if there is more than one; empty without two evaluations.
    """

    price: MachinePrice
    seconds: float
    usd: float
    accounts: tuple[Account, ...]
    sampled: TokenCost
    trained: TokenCost
    tokens: dict[str, int]
    attempts: int
    solved: int
    usd_per_attempt: float | None
    usd_per_solved: float | None
    gains: tuple[Gain, ...]


def cost_report(run: RunRecord, price: MachinePrice | None = None, target_points: float | None = None) -> CostReport:
    """Work out what a run cost.

    Args:
        run: the run, finished or not.
        price: overrides the machine's price that the run recorded.
        target_points: overrides the recipe's; for "dollars until the lower bound of the gain passed it".
    """
    price = price or run_price(run)
    if target_points is None:
        target_points = run.config.get("costs", {}).get("target_points")
    ledger = (run.cost_points or [_NOTHING])[-1].ledger
    accounts = tuple(
        Account(phase, activity, seconds, price.usd(seconds))
        for phase, parts in ledger["accounts"].items()
        for activity, seconds in parts.items()
        if seconds > 0
    )
    accounts += tuple(
        Account(phase, name.removesuffix("_usd"), 0.0, usd)
        for phase, parts in ledger.get("bought", {}).items()
        for name, usd in parts.items()
        if name.endswith("_usd") and usd > 0
    )
    tokens: dict[str, int] = {}
    for counts in ledger["tokens"].values():
        for kind, count in counts.items():
            tokens[kind] = tokens.get(kind, 0) + int(count)
    usd = math.fsum(account.usd for account in accounts)
    counts = run.attempt_counts
    return CostReport(
        price=price,
        seconds=math.fsum(account.seconds for account in accounts),
        usd=usd,
        accounts=tuple(sorted(accounts, key=lambda account: -account.usd)),
        sampled=_token_cost("sampled", "sampler", tokens, accounts, usd),
        trained=_token_cost("trained", "learner", tokens, accounts, usd),
        tokens=tokens,
        attempts=counts["made"],
        solved=counts["solved"],
        usd_per_attempt=usd / counts["made"] if counts["made"] else None,
        usd_per_solved=usd / counts["solved"] if counts["solved"] else None,
        gains=_gains(run, price, target_points),
    )


def run_price(run: RunRecord) -> MachinePrice:
    """The machine's price that the run recorded when it began or was last taken up, else the recipe's."""
    for event in reversed(run.of_kind("run")):
        if "price" in event:
            return MachinePrice.from_record(event["price"])
    costs = run.config.get("costs", {})
    return price_of(costs.get("machine", "auto"), costs.get("usd_per_hour"))


def points_per_usd(comparison: Comparison, usd: float) -> Estimate | None:
    """Intelligence per dollar of a gain: 100 × gain ÷ dollars, and so both ends of its interval; None for no dollars."""
    return comparison.gain.scaled(100.0 / usd) if usd > 0 else None


def break_even(usd: float, solved_before: float | None, solved_after: float | None) -> float | None:
    """Solved tasks after which spending `usd` has paid off; see `Gain.break_even`."""
    if solved_before is None or solved_after is None:
        return None
    if solved_after >= solved_before:
        return math.inf
    return usd / (solved_before - solved_after)


def _token_cost(
    kind: str, activity: str, tokens: dict[str, int], accounts: tuple[Account, ...], usd: float
) -> TokenCost:
    count = tokens.get(kind, 0)
    part = math.fsum(account.usd for account in accounts if account.activity == activity)
    if not count:
        return TokenCost(kind, 0, None, None)
    return TokenCost(kind, count, part / count * 1e6, usd / count * 1e6)


def _gains(run: RunRecord, price: MachinePrice, target: float | None) -> tuple[Gain, ...]:
    milestones = run.milestones
    pairs = []
    for name, after in milestones[1:]:  # what a stage gained, it gained on tasks that were scored before it too
        earlier = [
            e for e in run.evaluations if e.index < after.index and (e.stage, e.step) != (after.stage, after.step)
        ]
        outside = [e for e in earlier if e.stage != after.stage or e.step == 0]
        if before := next((e for e in reversed(outside) if _comparable(e, after)), None):
            pairs.append((name, before, after))
    gains = [_gain(run, price, target, *pair, since=_usd_at(run, price, pair[1])) for pair in pairs]
    if len(pairs) > 1 and _comparable(milestones[0][1], milestones[-1][1]):
        gains.append(_gain(run, price, target, "run", milestones[0][1], milestones[-1][1], since=0.0))
    return tuple(gains)


def _comparable(one: EvaluationEvent, other: EvaluationEvent) -> bool:
    """Whether two evaluations scored a task in common: stages may have environments of their own."""
    tasks = {task.task_id for task in one.evaluation.tasks}
    return any(task.task_id in tasks for task in other.evaluation.tasks)


def _gain(
    run: RunRecord,
    price: MachinePrice,
    target: float | None,
    name: str,
    before: EvaluationEvent,
    after: EvaluationEvent,
    since: float,
) -> Gain:
    comparison = compare(before.evaluation, after.evaluation)
    usd = _usd_at(run, price, after) - since
    passed = None
    for found in run.evaluations:
        if target is not None and before.index < found.index <= after.index:
            gain = compare(before.evaluation, found.evaluation).gain
            if 100 * gain.low >= target:
                passed = _usd_at(run, price, found) - since
                break
    solved_before = _usd_per_solved(run, price, before, comparison.score_before)
    solved_after = _usd_per_solved(run, price, after, comparison.score_after)
    return Gain(
        name=name,
        comparison=comparison,
        usd=usd,
        points_per_usd=points_per_usd(comparison, usd),
        target_points=target,
        usd_to_target=passed,
        solved_usd_before=solved_before,
        solved_usd_after=solved_after,
        break_even=break_even(usd, solved_before, solved_after),
    )


def _around(run: RunRecord, index: int) -> tuple[CostPoint, CostPoint]:
    """The ledger as it was last written before an event, and as it was first written after it (or at last)."""
    before = [point for point in run.cost_points if point.index < index]
    after = [point for point in run.cost_points if point.index > index]
    last = (before or [_NOTHING])[-1]
    return last, (after or [last])[0]


def _usd_at(run: RunRecord, price: MachinePrice, found: EvaluationEvent) -> float:
    """Dollars spent when an evaluation was done."""
    point = _around(run, found.index)[1]
    return price.usd(point.seconds()) + point.bought()


def _usd_per_solved(run: RunRecord, price: MachinePrice, found: EvaluationEvent, score: float) -> float | None:
    """Dollars per solved task at an evaluation; see `Gain`."""
    last = (run.cost_points or [_NOTHING])[-1]
    usd = price.usd(last.seconds(EVALUATION)) + last.bought(EVALUATION)
    sampled = last.ledger["tokens"].get(EVALUATION, {}).get("sampled", 0)
    length = found.evaluation.metrics.get("tokens_per_attempt")
    attempts = sum(event.evaluation.attempts for event in run.evaluations)
    if not usd or not attempts:
        return None
    per_attempt = usd / sampled * length if sampled and length else usd / attempts
    return per_attempt / score if score > 0 else math.inf


def summarise(run: RunRecord) -> dict[str, Any]:
    """What summary.json holds; its keys are described in docs/run-directory.md.

    Args:
        run: a run that is done, or as far as it is.
    """
    report = cost_report(run)
    summary: dict[str, Any] = {"scores": []}
    for stage, found in run.milestones:
        score = found.evaluation.score()
        summary["scores"].append({"stage": stage, **_interval(score, "score"), "n": score.n})
    for gain in report.gains:
        if gain.name != "run":
            summary[f"gain_{gain.name}"] = _interval(gain.comparison.gain.scaled(100.0), "points")
    metrics = [found.evaluation.metrics for _, found in run.milestones]
    recoveries = [found["recovery"] for found in metrics if "recovery" in found]  # absent where no error was met
    summary["recovery"] = {"before": recoveries[0], "after": recoveries[-1]} if recoveries else None
    summary["seconds"] = report.seconds
    summary["tokens"] = {kind: report.tokens.get(kind, 0) for kind in ("prompt", "cached", "sampled", "trained")}
    summary["cost_usd"] = report.usd
    whole = report.gains[-1].points_per_usd if report.gains else None
    summary["points_per_usd"] = _interval(whole, "value") if whole else None
    return summary


def _interval(estimate: Estimate, name: str) -> dict[str, float]:
    return {name: estimate.value, "low": estimate.low, "high": estimate.high}
