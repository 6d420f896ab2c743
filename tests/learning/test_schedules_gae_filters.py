"""Schedules, generalised advantages, dynamic sampling and the overlong penalty."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.learning import Schedule, has_variance, overlong_penalty
from strop.learning.gae import generalised_advantages, reward_to_go


def test_the_first_step_of_a_warm_up_learns():
    schedule = Schedule(1.0, steps=10, warmup_steps=4)
    assert [schedule.at(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_cosine_midpoint_and_ends():
    schedule = Schedule(2.0, steps=11, kind="cosine", final_share=0.1)
    assert [schedule.at(0), schedule.at(5), schedule.at(10)] == pytest.approx([2.0, 1.1, 0.2])


def test_linear_ends_at_its_share():
    schedule = Schedule(1.0, steps=5, kind="linear", warmup_steps=1, final_share=0.5)
    assert [schedule.at(step) for step in range(5)] == pytest.approx([0.5, 1.0, 1 - 0.5 / 3, 1 - 1 / 3, 0.5])


@given(st.integers(1, 50), st.integers(0, 49), st.sampled_from(["constant", "linear", "cosine"]), st.floats(0, 1))
def test_no_rate_above_the_peak_and_none_wasted_before_the_end(steps, warmup, kind, share):
    if warmup >= steps:
        with pytest.raises(ValueError, match="warmup_steps"):
            Schedule(1.0, steps, kind, warmup, share)
        return
    rates = [Schedule(1.0, steps, kind, warmup, share).at(step) for step in range(steps)]
    assert all(0 < rate <= 1 + 1e-12 for rate in rates[:-1])
    assert max(rates) == pytest.approx(1.0)


@pytest.mark.parametrize("wrong", [{"learning_rate": 0.0}, {"final_share": 1.5}, {"kind": "step"}])
def test_bad_schedules(wrong):
    with pytest.raises(ValueError):
        Schedule(**{"learning_rate": 1.0, "steps": 3, **wrong})


def test_gae_by_hand():
    """Two sampled tokens, reward 1 at the end, discount 0.9, decay 0.8, the task ended."""
    advantages, targets = generalised_advantages([0, 1], [0.5, 0.25], [1, 1], discount=0.9, decay=0.8)
    last = 1 - 0.25
    first = 0 + 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * last
    np.testing.assert_allclose(advantages, [first, last])
    np.testing.assert_allclose(targets, [first + 0.5, last + 0.25])


def test_truncation_bootstraps_and_termination_does_not():
    ended, _ = generalised_advantages([0, 0], [0.5, 0.25], [1, 1], discount=0.9, decay=0.0)
    cut, _ = generalised_advantages([0, 0], [0.5, 0.25], [1, 1], discount=0.9, decay=0.0, bootstrap=2.0)
    np.testing.assert_allclose(ended, [0.9 * 0.25 - 0.5, -0.25])
    np.testing.assert_allclose(cut, [0.9 * 0.25 - 0.5, 0.9 * 2.0 - 0.25])


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_tool_tokens_are_passed_over(mask, seed, discount, decay):
    """The same as if tool tokens were not there, their rewards having arrived at the sampled token before."""
    rng = np.random.default_rng(seed)
    mask = np.array([True, *mask])
    rewards, values = rng.normal(size=len(mask)), rng.normal(size=len(mask))
    owner = np.cumsum(mask) - 1
    gathered = np.bincount(owner, weights=rewards)
    dense, targets = generalised_advantages(
        gathered, values[mask], np.ones(mask.sum()), discount=discount, decay=decay, bootstrap=0.3
    )
    found, found_targets = generalised_advantages(rewards, values, mask, discount=discount, decay=decay, bootstrap=0.3)
    np.testing.assert_allclose(found[mask], dense)
    np.testing.assert_allclose(found_targets[mask], targets)
    assert not found[~mask].any()


def test_reward_to_go_crosses_tool_tokens():
    np.testing.assert_allclose(reward_to_go([0, 0, 0, 1], [1, 0, 0, 1], discount=0.5), [0.5, 0, 0, 1])


def test_gae_refuses_lengths_that_differ():
    with pytest.raises(ValueError, match="one number a token"):
        generalised_advantages([0.0, 1.0], [0.0], [1, 1])


def test_dynamic_sampling_looks_at_the_scored_alone():
    assert has_variance([0.0, 1.0, None])
    assert not has_variance([1.0, None, 1.0])
    assert not has_variance([None, None])


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (400, -1.0)]
)
def test_overlong_penalty_before_in_and_after_its_window(tokens, penalty):
    assert overlong_penalty(tokens, max_tokens=100, window=20) == pytest.approx(penalty)


@pytest.mark.parametrize("window", [0, 101])
def test_overlong_window_must_fit(window):
    with pytest.raises(ValueError, match="window"):
        overlong_penalty(5, max_tokens=100, window=window)
