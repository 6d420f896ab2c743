"""What a run cost and what it bought: figures worked out by hand from a run that was made up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic import PRICE, Writer, make_run

from strop.costs import MachinePrice, cost_report, summarise
from strop.costs.report import break_even, points_per_usd
from strop.runs.reading import RunRecord
from strop.statistics import Evaluation, TaskResult, compare


def scores(name: str, solved: list[int]) -> Evaluation:
    return Evaluation(name, tuple(TaskResult(f"t{i}", "", (float(s),), (float(s),)) for i, s in enumerate(solved)))


def test_the_published_example_of_intelligence_per_dollar() -> None:
    # 118 of 500 to 152 of 500 (35 lost, 69 gained) for $20,000, at $0.40 an attempt: 0.34 points per $1,000,
    # 95 % interval 0.14 to 0.54; $1.69 and $1.32 a solved task; paid back after 52,753 solved tasks.
    before = scores("before", [1] * 118 + [0] * 382)
    after = scores("after", [0] * 35 + [1] * (83 + 69) + [0] * 313)
    per_usd = points_per_usd(compare(before, after), 20_000)
    assert per_usd is not None
    per_thousand = per_usd.scaled(1000)
    assert per_thousand.value == pytest.approx(0.34)
    assert (per_thousand.low, per_thousand.high) == pytest.approx((0.14, 0.54), abs=0.015)
    solved_before, solved_after = 0.40 / (118 / 500), 0.40 / (152 / 500)
    assert (round(solved_before, 2), round(solved_after, 2)) == (1.69, 1.32)
    assert break_even(20_000, solved_before, solved_after) == pytest.approx(52_753, abs=1)


def test_break_even_at_its_edges() -> None:
    assert break_even(10, None, 1.0) is None
    assert break_even(10, 1.0, 2.0) == math.inf  # solving got dearer
    assert break_even(10, math.inf, 2.0) == 0.0  # nothing was solved before, at any price
    assert break_even(10, math.inf, math.inf) == math.inf
    assert points_per_usd(compare(scores("a", [0, 1]), scores("b", [1, 1])), 0.0) is None


def tiny_run(path: Path) -> RunRecord:
    """100 s of set-up and start, evaluation of 10 s; 40 s of RL; evaluation of 20 s. At $36 an hour: a cent a second."""
    writer = Writer(path, 0)
    writer.event("run", what="started", price=MachinePrice(36.0, "a cent a second").as_record())
    writer.spend(setup=100.0)
    with writer.ledger.within("evaluation"):
        writer.spend(sampler=10.0)
    writer.event("evaluation", stage="", step=0, **scores("start", [1] * 2 + [0] * 8).as_record())
    writer.cost("", 0)
    writer.ledger.phase = "rl"
    writer.spend(sampler=30.0, learner=10.0)
    writer.ledger.count(sampled=2_000_000, trained=1_000_000)
    writer.cost("rl", 1)
    with writer.ledger.within("evaluation"):
        writer.spend(sampler=20.0)
    writer.event("evaluation", stage="rl", step=1, **scores("rl", [1] * 8 + [0] * 2).as_record())
    writer.cost("rl", 1)
    return RunRecord(path)


def test_dollars_by_hand(tmp_path: Path) -> None:
    report = cost_report(tiny_run(tmp_path / "tiny"), target_points=10)
    assert report.usd == pytest.approx(1.70)
    assert report.seconds == pytest.approx(170)
    assert {(a.phase, a.activity): round(a.usd, 9) for a in report.accounts} == {
        ("setup", "setup"): 1.0,
        ("evaluation", "sampler"): 0.3,
        ("rl", "sampler"): 0.3,
        ("rl", "learner"): 0.1,
    }
    assert report.sampled.usd_per_million == pytest.approx((0.3 + 0.3) / 2)  # the sampler's dollars over 2 million
    assert report.sampled.usd_per_million_all == pytest.approx(1.70 / 2)
    assert report.trained.usd_per_million == pytest.approx(0.1)
    assert report.trained.usd_per_million_all == pytest.approx(1.70)
    (gain,) = report.gains
    assert (gain.name, gain.comparison.gain.value) == ("rl", pytest.approx(0.6))
    assert gain.usd == pytest.approx(0.60)  # 40 s of RL and the 20 s evaluation after it
    assert gain.points_per_usd is not None
    assert gain.points_per_usd.value == pytest.approx(60 / 0.60)
    rng = np.random.default_rng(1)
    means = rng.binomial(10, 0.6, 100_000) / 10 * 100 / 0.60  # six of ten differences are 1, the others 0
    low, high = np.quantile(means, [0.025, 0.975])
    assert (gain.points_per_usd.low, gain.points_per_usd.high) == pytest.approx((low, high), abs=0.1 * 100 / 0.60)
    # Evaluations cost thirty cents over 20 attempts.
    assert gain.solved_usd_before == pytest.approx(0.015 / 0.2)
    assert gain.solved_usd_after == pytest.approx(0.015 / 0.8)
    assert gain.break_even == pytest.approx(0.60 / (0.075 - 0.01875))
    assert gain.usd_to_target == pytest.approx(0.60)
    assert cost_report(RunRecord(tmp_path / "tiny"), target_points=59).gains[0].usd_to_target is None


def test_a_solved_task_costs_the_tokens_that_its_attempts_take(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "tokens", 0)
    writer.event("run", what="started", price=MachinePrice(36.0, "a cent a second").as_record())
    for stage, seconds, tokens, solved in (("", 50.0, 100, 2), ("rl", 10.0, 200, 8)):  # the first one on a busy machine
        with writer.ledger.within("evaluation"):
            writer.spend(sampler=seconds)
            writer.ledger.count(sampled=10 * tokens)
        made = scores(stage or "start", [1] * solved + [0] * (10 - solved))
        made = Evaluation(made.name, made.tasks, {"tokens_per_attempt": float(tokens)})
        writer.event("evaluation", stage=stage, step=0, **made.as_record())
        writer.cost(stage, 0)
    (gain,) = cost_report(RunRecord(tmp_path / "tokens")).gains
    # Sixty cents for 3,000 tokens: an attempt costs 2 cents before and 4 after.
    assert gain.solved_usd_before == pytest.approx(0.02 / 0.2)
    assert gain.solved_usd_after == pytest.approx(0.04 / 0.8)
    assert gain.break_even == pytest.approx(0.10 / 0.05)


def test_dollars_until_a_target_come_from_the_first_evaluation_that_proves_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tasks=200)
    gains = {gain.name: gain for gain in cost_report(run, target_points=15).gains}
    assert list(gains) == ["warmup", "rl", "run"]
    (first, *_) = [e for e in run.evaluations if e.stage == "rl"]
    baseline = next(e for e in run.evaluations if e.evaluation.name == "warmup")
    passing = [
        e for e in run.evaluations if e.stage == "rl" and compare(baseline.evaluation, e.evaluation).gain.low >= 0.15
    ]
    assert passing and passing[0] is not first  # the first evaluation of RL doesn't prove 15 points yet
    between = [p for p in run.cost_points if baseline.index < p.index <= passing[0].index + 1]
    expected = PRICE.usd(between[-1].seconds() - between[0].seconds())
    assert gains["rl"].usd_to_target == pytest.approx(expected)
    assert gains["run"].usd > gains["rl"].usd + gains["warmup"].usd  # it holds set-up and the first evaluation too


def test_accounts_add_up_to_the_clock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    report = cost_report(run)
    assert report.seconds == pytest.approx(run.cost_points[-1].clock)
    assert sum(account.usd for account in report.accounts) == pytest.approx(PRICE.usd(run.cost_points[-1].clock))
    assert report.attempts == 5 * 60 + 12 * 32  # four evaluations in the RL stage's three and two before; 12 batches
    assert report.usd_per_attempt == pytest.approx(report.usd / report.attempts)


def test_a_run_without_evaluations_attempts_or_costs_has_a_report(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "new", 0)
    writer.event("run", what="started", price=PRICE.as_record())
    report = cost_report(RunRecord(tmp_path / "new"))
    assert (report.usd, report.seconds, report.accounts, report.gains) == (0, 0, (), ())
    assert report.sampled.usd_per_million is None and report.usd_per_attempt is None
    assert summarise(RunRecord(tmp_path / "new"))["points_per_usd"] is None
    writer.event("evaluation", stage="", step=0, **scores("start", [1, 0]).as_record())
    assert cost_report(RunRecord(tmp_path / "new")).gains == ()


def test_a_machine_that_costs_nothing_has_no_points_per_dollar(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "free")
    report = cost_report(run, price=MachinePrice(0.0, "mine"))
    assert report.usd == 0
    assert report.gains[0].points_per_usd is None


def test_the_summary_has_the_documented_keys(tmp_path: Path) -> None:
    summary = json.loads((make_run(tmp_path / "run").path / "summary.json").read_text())
    assert [score["stage"] for score in summary["scores"]] == ["start", "warmup", "rl"]
    assert all(set(score) == {"stage", "score", "low", "high", "n"} for score in summary["scores"])
    assert set(summary["gain_rl"]) == {"points", "low", "high"}
    assert set(summary["recovery"]) == {"before", "after"}
    assert {"sampled", "trained"} <= set(summary["tokens"])
    assert set(summary["points_per_usd"]) == {"value", "low", "high"}
    assert summary["seconds"] > 0 and summary["cost_usd"] > 0
    gain = 100 * (summary["scores"][-1]["score"] - summary["scores"][1]["score"])
    assert summary["gain_rl"]["points"] == pytest.approx(gain, abs=3)  # failed attempts differ between the two
