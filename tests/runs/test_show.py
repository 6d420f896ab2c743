"""Tables and transcripts say what the files say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from synthetic import make_run

from strop.costs import cost_report
from strop.errors import EvaluationError, RunError
from strop.runs import show
from strop.runs.reading import RunRecord
from strop.statistics import Estimate, Evaluation, TaskResult, compare


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return make_run(tmp_path_factory.mktemp("runs") / "made-up")


def printed(renderable: RenderableType, width: int = 220) -> str:
    text = StringIO()
    Console(file=text, width=width, color_system=None).print(renderable)
    return text.getvalue()


def row(text: str, start: str) -> list[str]:
    """The cells of the first line that begins with `start`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_the_list_of_runs(run: RunRecord, tmp_path: Path) -> None:
    text = printed(show.show_runs(run.path.parent))
    first, last = run.milestones[0][1].evaluation.score(), run.milestones[-1][1].evaluation.score()
    assert row(text, "made-up")[:4] == ["made-up", "finished", "rl 12", f"{first.value:.0%} → {last.value:.0%}"]
    assert "No runs" in printed(show.show_runs(tmp_path))


def test_a_run_shows_scores_steps_costs_and_warnings(run: RunRecord) -> None:
    text = printed(show.show_run(run, last_steps=3))
    score = run.milestones[1][1].evaluation.score()
    assert f"{score.value:.1%} ({100 * score.low:.0f} to {100 * score.high:.0f})" in text
    assert "… 13 before" in text
    tenth = next(step for step in run.steps if (step.stage, step.step) == ("rl", 10))
    cells = row(text, "rl ")
    assert cells[1] == "10" and cells[3] == f"{tenth.metrics['reward']:.3f}"
    gain = compare(run.milestones[1][1].evaluation, run.milestones[2][1].evaluation).gain.scaled(100)
    assert f"{gain.value:+.1f}" in row(text, "gain, points")
    assert f"{gain.low:+.1f} to {gain.high:+.1f}" in text
    assert "warning at" in text and "they taught nothing" in text
    assert "2 vCPU × $0.045" in text


def test_a_narrow_terminal_gets_fewer_columns_and_whole_numbers(run: RunRecord) -> None:
    text = printed(show.show_steps(run.steps), width=80)
    assert "reward" in text and "solved" in text and "gradient" not in text
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    attempts = printed(show.show_step(run, 2), width=80)
    assert [line.split()[0] for line in attempts.splitlines()[3:]] == [str(number) for number in range(32)]
    assert printed(show.show_steps(run.steps), width=200).count("gradient") == 1


def test_a_gain_that_is_not_proven_pays_nothing_off(run: RunRecord) -> None:
    gain = cost_report(run).gains[-1]
    assert show.pays_off(gain) == f"{gain.break_even:,.0f}"
    unproven = replace(gain.comparison, gain=replace(gain.comparison.gain, low=-0.01))
    assert show.pays_off(replace(gain, comparison=unproven)) == "no gain is proven"
    assert show.pays_off(replace(gain, break_even=math.inf)) == "never"
    assert show.to_target(replace(gain, target_points=20.0, usd_to_target=0.0123)) == "$0.0123 (+20)"
    assert show.to_target(replace(gain, target_points=99.0, usd_to_target=None)) == "not reached (+99)"


def test_a_step_lists_its_attempts_with_the_numbers_that_open_them(run: RunRecord) -> None:
    text = printed(show.show_step(run, 2))
    attempts = run.attempts(run.find(step=2))
    for number in (0, 9, 31):
        cells = row(text, f"{number} ")
        reward = attempts[number].rollout.reward
        assert cells[1] == attempts[number].group.task.id
        assert cells[3] == ("-" if reward is None else f"{reward:.3f}")
    assert "not trained on: no variance" in text


def test_an_attempt_is_read_turn_by_turn(run: RunRecord) -> None:
    attempts = run.attempts(run.find(step=2))
    number = next(n for n, a in enumerate(attempts) if len(a.rollout.calls) == 2 and a.solved is not None)
    text = printed(show.show_attempt(run, number, 2))
    where = [text.index(part) for part in ("Synthetic question", "→ lookup", "tool lookup", "The answer is 12345")]
    assert where == sorted(where)
    assert "<b>&amp; not markup</b>" in text or "timed out" in text  # what a tool said is never markup
    assert f"Reward {attempts[number].rollout.reward:g}" in text
    for call in attempts[number].rollout.calls:
        assert f"{len(call.tokens)} tokens, {call.cached} cached" in text


def test_a_failed_attempt_says_that_it_is_in_no_baseline(run: RunRecord) -> None:
    file, number = next(
        (file, n) for file in run.rollout_files if file.step for n, a in enumerate(run.attempts(file)) if a.failure
    )
    text = printed(show.show_attempt(run, number, file.step, stage=file.stage))
    assert "Failed by the system, in no baseline: sandbox: the sandbox died (synthetic)" in text


def test_tokens_come_with_their_probability(run: RunRecord) -> None:
    call = run.attempts(run.find(step=2))[0].rollout.calls[0]
    text = printed(show.show_attempt(run, 0, 2, logprobs=True), width=4000)
    expected = " ".join(
        f"{token}⟨{100 * 2.718281828459045**logprob:.0f}⟩"
        for token, logprob in zip(call.tokens, call.logprobs, strict=True)
    )
    assert expected in text


def test_an_attempt_that_is_not_there_is_named(run: RunRecord) -> None:
    with pytest.raises(RunError, match="has attempts 0 to 31, not 32"):
        show.show_attempt(run, 32, 2)


def test_evaluations_are_compared_from_runs_and_files(run: RunRecord, tmp_path: Path) -> None:
    last = run.evaluations[-1].evaluation
    (tmp_path / "last.json").write_text(json.dumps(last.as_record()))
    text = printed(show.show_comparison("made-up:start", str(tmp_path / "last.json"), run.path.parent))
    found = compare(run.evaluations[0].evaluation, last)
    gain = found.gain.scaled(100)
    assert f"{gain.value:+.1f} ({gain.low:+.1f} to {gain.high:+.1f})" in text
    assert f"{found.wins} tasks went up, {found.losses} down" in text
    for label in ("steps 1", "steps 2", "steps 3"):
        assert label in text
    assert printed(show.show_comparison("made-up:start", "made-up", run.path.parent)).count("+") == text.count("+")


def test_what_cannot_be_compared_says_why(run: RunRecord, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no evaluation 'rl 5'. There are: start, warmup, rl 4, rl 8, rl"):
        show.show_comparison("made-up:rl 5", "made-up", run.path.parent)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(RunError, match=r"bad\.json isn't an evaluation"):
        show.find_evaluation(str(tmp_path / "bad.json"))
    other = Evaluation("other", (TaskResult("elsewhere", "", (1.0,), (1.0,)),))
    (tmp_path / "other.json").write_text(json.dumps(other.as_record()))
    with pytest.raises(EvaluationError, match="no task in common"):
        show.show_comparison("made-up", str(tmp_path / "other.json"), run.path.parent)


@pytest.mark.parametrize(
    ("usd", "text"),
    [(0, "$0.00"), (0.0000169, "$0.0000169"), (0.00123, "$0.00123"), (0.0449, "$0.0449"), (1.7, "$1.70"), (99.5, "$99.50"), (1234.4, "$1,234"), (float("inf"), "∞")],
)  # fmt: skip
def test_dollars(usd: float, text: str) -> None:
    assert show.dollars(usd) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (9.99, "10.0 s"), (42.4, "42 s"), (59.7, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (200_000, "2 d 7 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert show.duration(seconds) == text


def test_figures_and_intervals() -> None:
    assert [show.figure(value) for value in (0.01234, 3.256, 20273.4)] == ["0.0123", "3.26", "20,273"]
    assert show.interval(Estimate(0.435, 0.368, 0.504, 200)) == "43.5% (36.8 to 50.4)"
    assert show.interval(Estimate(-2.04, -6.5, 4.9, 200), "+.1f") == "-2.0 (-6.5 to +4.9)"
