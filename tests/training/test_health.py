"""Signals of sickness: each fires on its own case, and none on a healthy run."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from strop.config import HealthSettings, parse_recipe
from strop.errors import ConfigError, RunError
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.training.health import Canary, HealthWatch, Score, check_signals, diagnose, diagnose_scores

SETTINGS = HealthSettings()


def healthy(step: int) -> dict[str, float]:
    """A run that learns: reward up, entropy somewhat down, gradients that vary, a canary that changes."""
    return {
        "attempts": 64.0,
        "failed": 2.0,
        "reward": 0.2 + 0.02 * step,
        "mismatch_kl": 4e-4 * (1 + step % 3),
        "groups_without_variance": 0.3 + 0.01 * step,
        "truncated": 0.1,
        "malformed_share": 0.2,
        "entropy": 1.2 / (1 + 0.05 * step),
        "tokens_per_attempt": 60.0 + step,
        "grad_norm": 0.5 + 0.4 * (step % 4),
        "canary_version": float(step),
        "canary_logprob": -20.0 - 0.01 * step,
    }


def history(count: int, **last: list[float] | float) -> list[dict[str, float]]:
    """Healthy steps whose last ones are changed: a number at the last step, or a list for the last few."""
    steps = [healthy(step) for step in range(count)]
    for name, values in last.items():
        values = values if isinstance(values, list) else [values]
        for step, value in zip(steps[-len(values) :], values, strict=True):
            step[name] = value
    return steps


@pytest.mark.parametrize("count", [0, 1, 3, 8, 30])
def test_a_healthy_run_gives_no_signal(count):
    assert diagnose(history(count), SETTINGS) == []


SICK: list[tuple[str, dict[str, Any], str]] = [
    ("mismatch", {"mismatch_kl": 0.3}, "KL of 0.3 nats"),
    ("mismatch", {"mismatch_kl": math.nan}, "KL of nan"),
    ("no_variance", {"groups_without_variance": [0.95, 1.0, 1.0]}, "98% of groups"),
    ("truncated", {"truncated": [1.0, 0.95, 1.0]}, "98% of attempts run into the token limit"),
    ("malformed", {"malformed_share": [0.6, 0.9, 0.6]}, "70% of tool calls"),
    ("failures", {"failed": [32.0, 32.0, 32.0]}, "50% of attempts fail"),
    ("entropy", {"entropy": [0.05, 0.04, 0.03]}, "to 0.04 nats"),
    ("length", {"tokens_per_attempt": [400.0, 500.0, 600.0]}, "from 62 to 500 tokens"),
    ("gradient", {"grad_norm": 40.0}, "times what it was"),
    ("gradient", {"grad_norm": math.inf}, "is inf"),
    ("canary", {"canary_logprob": [-20.5, -20.5]}, "exactly the log-probability -20.5"),
]


@pytest.mark.parametrize(("name", "change", "sentence"), SICK)
def test_each_sickness_gives_its_signal_and_no_other(name, change, sentence):
    (signal,) = diagnose(history(12, **change), SETTINGS)
    assert signal.name == name and sentence in signal.sentence and signal.advice


@pytest.mark.parametrize("change", [
    {"groups_without_variance": [1.0, 1.0]},  # not for long enough
    {"truncated": [1.0, 0.2, 1.0]},
    {"grad_norm": 4.0},
    {"failed": [24.0] * 3, "cut_off": [22.0] * 3},  # cancelled by oversampling, not failed
    {"canary_version": [7.0, 7.0], "canary_logprob": [-20.5, -20.5]},  # nothing was published in between
])  # fmt: skip
def test_what_passes_or_has_its_reason_gives_none(change):
    assert diagnose(history(12, **change), SETTINGS) == []


def test_trends_are_not_seen_before_there_is_one():
    assert diagnose(history(7, tokens_per_attempt=[900.0] * 3), SETTINGS) == []
    assert diagnose(history(5, grad_norm=500.0), SETTINGS) == []


def test_reward_that_rises_while_the_held_out_score_falls():
    (signal,) = diagnose_scores([Score(0.4, 0.3), Score(0.2, 0.8)], SETTINGS)
    assert signal.name == "reward_hacking" and "from 0.4 to 0.2" in signal.sentence
    for scores in (
        [Score(0.4, 0.3)],
        [Score(0.4, 0.3), Score(0.5, 0.8)],  # both rise
        [Score(0.4, 0.8), Score(0.2, 0.3)],  # both fall
        [Score(0.4, 0.3), Score(0.38, 0.8)],  # within the noise
        [Score(0.4, math.nan), Score(0.2, 0.8)],  # no reward before
    ):
        assert diagnose_scores(scores, SETTINGS) == []


def recipe(**health: Any) -> Any:
    stages = [{"kind": "rl", "name": name, "steps": 50, "schedule": {"learning_rate": 1e-5}} for name in ("one", "two")]
    return parse_recipe({"name": "t", "environment": {"name": "arithmetic"}, "health": health, "stages": stages})


def warnings(path: Path) -> list[str]:
    return [event["signal"] for event in RunRecord(path).of_kind("warning")]


def play(run: Run, stage: str, steps: list[dict[str, float]], first: int = 0) -> None:
    for number, metrics in enumerate(steps, first):
        run.log("step", stage=stage, step=number, metrics=metrics)


def test_a_run_is_warned_once_and_again_only_if_it_lasts(tmp_path):
    run = Run.create(tmp_path / "r", recipe())
    run.listeners.append(HealthWatch(run).hear)
    play(run, "one", history(30, truncated=[1.0] * 26))
    assert warnings(run.path) == ["truncated", "truncated"]
    run.close()


def test_stages_are_judged_apart_and_a_resumed_run_remembers(tmp_path):
    run = Run.create(tmp_path / "r", recipe())
    run.listeners.append(HealthWatch(run).hear)
    play(run, "one", history(12))
    play(run, "two", [step | {"tokens_per_attempt": 900.0} for step in history(8)])
    assert warnings(run.path) == []
    run.close()
    again = Run.resume(tmp_path / "r")
    again.listeners.append(HealthWatch(again).hear)
    play(again, "two", [healthy(9) | {"tokens_per_attempt": 20_000.0}], first=8)
    assert warnings(again.path) == ["length"]
    again.close()


def test_a_hint_of_reward_hacking_is_found_in_a_runs_events(tmp_path):
    run = Run.create(tmp_path / "r", recipe())
    run.listeners.append(HealthWatch(run).hear)
    run.log("evaluation", stage="", step=0, name="start", score=0.5)
    play(run, "one", history(20))
    run.log("evaluation", stage="one", step=20, name="one 20", score=0.3)
    assert warnings(run.path) == ["reward_hacking"]
    run.close()


def test_a_recipe_may_stop_at_a_signal(tmp_path):
    run = Run.create(tmp_path / "r", recipe(stop=["canary"]))
    run.listeners.append(HealthWatch(run).hear)
    with pytest.raises(RunError, match=r"canary prompt exactly.*can be resumed"):
        play(run, "one", history(3, canary_logprob=[-1.0, -1.0]))
    run.close()
    with pytest.raises(ConfigError, match="there is no signal 'canari'"):
        check_signals(HealthSettings(stop=["canari"]))


def test_memory_of_a_long_stage_is_bounded(tmp_path):
    run = Run.create(tmp_path / "r", recipe())
    watch = HealthWatch(run)
    for number in range(2000):
        watch.hear({"kind": "step", "stage": "one", "step": number, "metrics": healthy(number % 20)})
    assert len(watch._steps) < 300 and watch._steps[0] == healthy(0)
    run.close()


async def test_the_canary_is_asked_in_the_background_and_heard_once(scripted_sampler):
    from strop.sampling.rendering import renderer_for

    sampler = scripted_sampler(["abc<|im_end|>"] * 2)
    canary = Canary(sampler, renderer_for(sampler.tokenizer, "some/folder"))
    assert canary.heard() == {}
    canary.ask()
    canary.ask()  # the first question is still open
    await asyncio.sleep(0.01)
    assert canary.heard() == {"canary_logprob": -2.0, "canary_version": 0.0} and canary.heard() == {}
    sampler.version = 1
    canary.ask()
    await asyncio.sleep(0.01)
    assert canary.heard() == {"canary_logprob": -2.0, "canary_version": 1.0} and len(sampler.prompts) == 2
