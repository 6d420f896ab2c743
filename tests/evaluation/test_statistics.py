"""pass@k, intervals and paired comparison against values computed by hand, by enumeration, or by scipy."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from strop.errors import EvaluationError
from strop.statistics import (
    Comparison,
    Evaluation,
    TaskResult,
    bootstrap_mean,
    compare,
    natural_key,
    pass_at_k,
    sign_test,
    wilson,
)


def evaluation(name: str, solved: dict[str, list[float]], label: str = "") -> Evaluation:
    return Evaluation(name, tuple(TaskResult(task, label, tuple(s), tuple(s)) for task, s in solved.items()))


def fifty_tasks(name: str, count_solved: int, start: int = 0) -> Evaluation:
    return evaluation(name, {f"t{i}": [1.0 if (i - start) % 50 < count_solved else 0.0] for i in range(50)})


# -- pass@k -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.data())
def test_pass_at_k_is_the_combinatorial_formula(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), abs=1e-12)


def test_pass_at_k_is_the_mean_over_every_choice_of_k_attempts() -> None:
    attempts = [1, 0, 0, 1, 0, 0, 0]
    for k in range(1, 8):
        every = [max(choice) for choice in itertools.combinations(attempts, k)]
        assert pass_at_k(7, 2, k) == pytest.approx(sum(every) / len(every))


def test_pass_at_k_neither_overflows_nor_cancels() -> None:
    exact = 1 - Fraction(math.comb(9_990, 1000), math.comb(10_000, 1000))
    assert pass_at_k(10_000, 10, 1000) == pytest.approx(float(exact), rel=1e-10)
    assert pass_at_k(200, 0, 100) == 0.0
    assert pass_at_k(200, 150, 100) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(5, 6, 1), (5, -1, 1), (5, 2, 6), (5, 2, 0), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(EvaluationError):
        pass_at_k(n, c, k)


# -- intervals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (10, 10), (1, 3), (7, 20), (118, 500), (152, 500)])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_wilson_is_scipys(successes: int, n: int, confidence: float) -> None:
    low, high = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    found = wilson(successes, n, confidence)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)
    assert found.value == successes / n
    assert found.low <= found.value <= found.high


def test_wilson_refuses_no_trials() -> None:
    with pytest.raises(EvaluationError, match="0 trials"):
        wilson(0, 0)


def test_the_bootstrap_interval_is_that_of_the_binomial_distribution() -> None:
    # Resampling n zeros and ones draws Binomial(n, share) exactly, so its quantiles are known.
    n, ones = 200, 70
    found = bootstrap_mean([1.0] * ones + [0.0] * (n - ones))
    low, high = stats.binom.ppf([0.025, 0.975], n, ones / n) / n
    assert (found.low, found.high) == pytest.approx((low, high), abs=1.01 / n)


def test_the_bootstrap_interval_of_many_values_is_the_normal_one() -> None:
    values = np.random.default_rng(7).normal(3.0, 2.0, size=3000)
    found = bootstrap_mean(values)
    half = 1.959964 * values.std() / math.sqrt(3000)
    assert found.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.05 * half)


def test_the_bootstrap_gives_the_same_interval_every_time() -> None:
    values = list(np.random.default_rng(0).random(50))
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(values, seed=1) != bootstrap_mean(values, seed=2)
    with pytest.raises(EvaluationError, match="no tasks"):
        bootstrap_mean([])


def test_attempts_at_one_task_are_not_independent() -> None:
    # 20 tasks, 50 attempts each, all attempts at a task alike: 20 independent units, not 1,000.
    clustered = evaluation("a", {f"t{i}": [float(i < 10)] * 50 for i in range(20)})
    score = clustered.score()
    assert score.n == 20
    assert score.high - score.low > 0.3  # 1,000 independent attempts would give 0.06


def test_each_task_weighs_the_same_however_many_attempts_it_has() -> None:
    mixed = evaluation("a", {"t1": [1.0, 1.0, 1.0, 1.0], "t2": [0.0]})
    assert mixed.score().value == 0.5
    assert mixed.attempts == 5


def test_a_score_without_spread_still_has_an_interval() -> None:
    assert evaluation("a", {f"t{i}": [0.0] for i in range(30)}).score().high == pytest.approx(
        stats.binomtest(0, 30).proportion_ci(0.95, method="wilson").high
    )
    halves = evaluation("a", {f"t{i}": [1.0, 0.0] for i in range(30)}).score()
    assert halves.low < 0.5 < halves.high


def test_pass_at_k_of_an_evaluation_averages_over_tasks() -> None:
    found = evaluation("a", {"t1": [1.0, 0.0, 0.0, 0.0], "t2": [1.0, 1.0, 0.0, 0.0]})
    assert found.pass_at(2).value == pytest.approx(((1 - 3 / 6) + (1 - 1 / 6)) / 2)  # C(3,2)/C(4,2), C(2,2)/C(4,2)
    assert found.pass_at(1).value == pytest.approx(found.score().value)
    with pytest.raises(EvaluationError, match="at least 5 attempts"):
        found.pass_at(5)


def test_rewards_without_a_notion_of_solving_have_a_score_and_no_pass_at_k() -> None:
    rewards = Evaluation("a", tuple(TaskResult(f"t{i}", "", (i / 10,)) for i in range(10)))
    assert rewards.score().value == pytest.approx(0.45)
    with pytest.raises(EvaluationError, match="no notion of solving"):
        rewards.pass_at(1)


# -- comparing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 5), (9, 2), (69, 35), (3, 40)])
def test_the_sign_test_is_scipys_exact_binomial_test(wins: int, losses: int) -> None:
    expected = stats.binomtest(wins, wins + losses, 0.5).pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected, rel=1e-9)


def swe_example() -> Comparison:
    """118 of 500 solved before, 152 after: 69 gained, 35 lost."""
    before = {f"t{i}": [1.0 if i < 118 else 0.0] for i in range(500)}
    after = {f"t{i}": [1.0 if 35 <= i < 118 + 69 else 0.0] for i in range(500)}
    return compare(evaluation("before", before), evaluation("after", after))


def test_a_paired_comparison_of_five_hundred_tasks() -> None:
    found = swe_example()
    assert (found.wins, found.losses, found.left_out) == (69, 35, 0)
    assert found.score_before == pytest.approx(118 / 500) and found.score_after == pytest.approx(152 / 500)
    assert found.gain.value == pytest.approx(34 / 500)
    # Variance of one difference: (69 + 35) / 500 - 0.068²; the normal interval around 6.8 points is 2.8 to 10.8.
    half = 1.959964 * math.sqrt((104 / 500 - 0.068**2) / 500)
    assert (found.gain.low, found.gain.high) == pytest.approx((0.068 - half, 0.068 + half), abs=0.003)
    assert found.p_value == pytest.approx(stats.binomtest(69, 104).pvalue)


def test_pairing_is_narrower_than_comparing_two_scores() -> None:
    before, after = fifty_tasks("a", 20), fifty_tasks("b", 30)
    paired = compare(before, after).gain
    unpaired = (before.score().high - before.score().low) ** 2 + (after.score().high - after.score().low) ** 2
    assert paired.high - paired.low < math.sqrt(unpaired)
    assert paired.low > 0


def test_tasks_that_are_all_alike_leave_room_for_those_that_were_not_seen() -> None:
    same = compare(fifty_tasks("a", 20), fifty_tasks("b", 20))
    margin = stats.binomtest(0, 50).proportion_ci(0.95, method="wilson").high
    assert (same.gain.value, same.gain.low, same.gain.high) == pytest.approx((0.0, -margin, margin))
    assert same.p_value == 1.0
    all_gained = compare(fifty_tasks("a", 0), fifty_tasks("b", 50))
    assert (all_gained.gain.value, all_gained.gain.low) == pytest.approx((1.0, 1.0 - margin))


def test_only_common_tasks_are_compared_and_none_is_an_error() -> None:
    one = evaluation("a", {"t1": [1.0], "t2": [0.0], "t3": [0.0]})
    two = evaluation("b", {"t2": [1.0], "t3": [0.0], "t4": [1.0], "t5": [1.0]})
    found = compare(one, two)
    assert (found.gain.n, found.left_out, found.gain.value) == (2, 3, 0.5)
    with pytest.raises(EvaluationError, match="no task in common"):
        compare(one, evaluation("c", {"t9": [1.0]}))


# -- tables and records -------------------------------------------------------------------------------------------


def test_scores_by_label_count_a_task_under_each_of_its_labels() -> None:
    tasks = tuple(
        TaskResult(f"{steps}-{kind}-{i}", f"steps {steps}, kind {kind}", (float(i < 3),), (float(i < 3),))
        for steps, kind in ((10, "bill"), (2, "bill"), (2, "change"))
        for i in range(4)
    )
    made = Evaluation("a", (*tasks, TaskResult("bare", "", (0.0,), (0.0,))))
    table = made.by_label()
    assert list(table) == ["kind bill", "kind change", "steps 2", "steps 10"]
    assert [score.n for score in table.values()] == [8, 4, 8, 4]
    assert all(score.value == 0.75 for score in table.values())
    assert {task.task_id for task in made.only("kind change").tasks} == {f"2-change-{i}" for i in range(4)}


def test_numbers_inside_names_count_as_numbers() -> None:
    names = ["rl-000100", "rl-000020", "evaluation-step-9", "evaluation-step-10", "", "7"]
    assert sorted(names, key=natural_key) == [
        "",
        "7",
        "evaluation-step-9",
        "evaluation-step-10",
        "rl-000020",
        "rl-000100",
    ]


def test_a_record_survives_json() -> None:
    made = Evaluation(
        "step 10",
        (TaskResult("a", "easy", (1.0, 0.5), (1.0, 0.0)), TaskResult("b", "hard", (0.25,))),
        {"tool_errors_met": 0.8},
        failed=3,
    )
    assert Evaluation.from_record(json.loads(json.dumps(made.as_record()))) == made


def test_a_record_may_hold_lone_numbers() -> None:
    found = Evaluation.from_record({"name": "start", "tasks": [["a", "easy", 1, 0.9], ["b", "", None, 0.1]]})
    assert found.tasks == (TaskResult("a", "easy", (0.9,), (1.0,)), TaskResult("b", "", (0.1,), ()))
    with pytest.raises(EvaluationError, match="shares"):
        Evaluation.from_record({"name": "x", "tasks": [["a", "", 0.5, 0.5]]}).pass_at(1)


@pytest.mark.parametrize(
    "record", [{}, {"name": "a"}, {"name": "a", "tasks": [["t"]]}, {"name": "a", "tasks": [["t", "", "x", "y"]]}]
)
def test_what_is_no_evaluation_is_refused(record: dict[str, object]) -> None:
    with pytest.raises(EvaluationError, match="isn't an evaluation"):
        Evaluation.from_record(record)


def test_a_task_twice_or_without_attempts_is_refused() -> None:
    with pytest.raises(EvaluationError, match="twice"):
        Evaluation("a", (TaskResult("t", "", (1.0,)), TaskResult("t", "", (1.0,))))
    with pytest.raises(EvaluationError, match="without an attempt"):
        Evaluation("a", (TaskResult("t", "", ()),))
    with pytest.raises(EvaluationError, match="No task was scored"):
        Evaluation("a", ()).score()
