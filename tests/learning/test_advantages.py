"""Advantages against values worked out by hand, and against the formulas of TRL and verl in torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import ConfigError
from strop.learning import ADVANTAGES, make_advantage

REWARDS = [1.0, 0.0, 0.0, 3.0]  # mean 1, squared deviations 0 + 1 + 1 + 4 = 6

rewards_of_a_group = st.lists(st.one_of(st.none(), st.floats(-5, 5, width=32)), min_size=1, max_size=9)
names = st.sampled_from(sorted(ADVANTAGES.classes))


def one(name, rewards, **options):
    return make_advantage({"name": name, **options})([rewards])[0]


def test_grpo_uses_the_sample_deviation_unless_told_otherwise():
    np.testing.assert_allclose(one("grpo", REWARDS, epsilon=0.0), np.array([0, -1, -1, 2]) / math.sqrt(6 / 3))
    np.testing.assert_allclose(one("grpo", REWARDS, ddof=0, epsilon=0.0), np.array([0, -1, -1, 2]) / math.sqrt(6 / 4))


def test_grpo_gives_what_trl_and_verl_give_with_their_epsilons():
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    deviation = rewards - rewards.mean()
    for epsilon in (1e-4, 1e-6):  # TRL: rewards / (std + 1e-4); verl: / (std + 1e-6); torch's std is over n - 1
        expected = deviation / (rewards.std() + epsilon)
        np.testing.assert_allclose(one("grpo", REWARDS, epsilon=epsilon), expected.numpy(), rtol=1e-12)


def test_dr_grpo_does_not_divide():
    np.testing.assert_array_equal(one("grpo", REWARDS, divide_by_std=False), [0, -1, -1, 2])


def test_rloo_compares_with_the_others():
    expected = [1 - (0 + 0 + 3) / 3, 0 - (1 + 0 + 3) / 3, 0 - (1 + 0 + 3) / 3, 3 - (1 + 0 + 0) / 3]
    np.testing.assert_allclose(one("rloo", REWARDS), expected)


def test_rloo_leaves_the_unscorable_out_of_every_baseline():
    found = one("rloo", [1.0, None, 0.0, 3.0, None])
    np.testing.assert_allclose(found, [1 - 1.5, 0, 0 - 2.0, 3 - 0.5, 0])


def test_reinforce_plus_plus_baseline_standardises_over_the_batch():
    first, second = make_advantage({"name": "reinforce_plus_plus_baseline", "epsilon": 0.0})(
        [[1.0, 0.0], [5.0, 1.0, None]]
    )
    centred = np.array([0.5, -0.5, 2.0, -2.0])  # of the group means 0.5 and 3
    scale = math.sqrt((0.25 + 0.25 + 4 + 4) / 3)
    np.testing.assert_allclose(first, centred[:2] / scale)
    np.testing.assert_allclose(second, [*(centred[2:] / scale), 0])


def test_reinforce_plus_plus_has_no_group_baseline():
    first, second = make_advantage({"name": "reinforce_plus_plus", "epsilon": 0.0})([[1.0, 0.0], [5.0, 2.0]])
    scale = math.sqrt((1 + 4 + 9 + 0) / 3)  # mean 2
    np.testing.assert_allclose(np.concatenate([first, second]), np.array([-1, -2, 3, 0]) / scale)


def test_plain_reward_subtracts_its_constant():
    np.testing.assert_array_equal(one("reward", [1.0, None, 0.0], baseline=0.25), [0.75, 0, -0.25])


@given(names, st.floats(-3, 3, width=32), st.integers(1, 9), st.integers(0, 3))
def test_equal_rewards_give_exactly_nothing(name, reward, scored, failed):
    if name == "reward":
        return
    assert not one(name, [reward] * scored + [None] * failed).any()


def test_rewards_that_round_do_not_become_noise():
    rewards = [0.1, 0.1, 0.1]  # their mean in floating point is not 0.1
    assert np.mean(rewards) != 0.1
    assert not one("grpo", rewards).any()


@given(names, st.lists(rewards_of_a_group, min_size=1, max_size=4))
def test_every_advantage_is_finite_and_the_unscored_get_none(name, groups):
    found = make_advantage({"name": name})(groups)
    for rewards, advantages in zip(groups, found, strict=True):
        assert advantages.dtype == np.float64
        assert np.isfinite(advantages).all()
        assert not advantages[[reward is None for reward in rewards]].any()


@given(st.sampled_from(["grpo", "rloo"]), rewards_of_a_group, st.lists(st.integers(0, 9), max_size=3))
def test_unscored_members_change_nothing_for_the_others(name, rewards, places):
    with_failures = list(rewards)
    for place in places:
        with_failures.insert(min(place, len(with_failures)), None)
    kept = [
        advantage
        for advantage, reward in zip(one(name, with_failures), with_failures, strict=True)
        if reward is not None
    ]
    expected = [advantage for advantage, reward in zip(one(name, rewards), rewards, strict=True) if reward is not None]
    np.testing.assert_allclose(kept, expected, atol=1e-12)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"name": "grop"}, "Did you mean 'grpo'"),
        ({"name": "grpo", "divide": True}, "divide_by_std, ddof, epsilon"),
        ({"name": "grpo", "ddof": 2}, "one of 0, 1"),
        ({"name": "grpo", "epsilon": -1.0}, "negative"),
        ({"name": "grpo", "divide_by_std": "yes"}, "true or false"),
        ({"name": "rloo", "epsilon": 0.1}, "It takes none"),
    ],
)
def test_bad_names_and_options_are_refused(spec, says):
    with pytest.raises(ConfigError, match=r"^stages\.rl\.advantage") as caught:
        make_advantage(spec, "stages.rl.advantage")
    assert says in str(caught.value)
