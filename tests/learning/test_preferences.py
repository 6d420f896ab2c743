"""Preference losses: values by NumPy in float64 from the papers' equations, gradients by finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers

from strop.errors import BatchError, ConfigError
from strop.learning import EmbeddedLearner, Tokens, make_loss, pack_judged
from strop.models.policy import Policy

LENGTHS = (3, 2, 1, 4)  # chosen, rejected, rejected, chosen
SIGNS = (1.0, -1.0, -1.0, 1.0)
GROUPS = (5, 5, 2, 2)
PARTS = np.split(np.arange(sum(LENGTHS)), np.cumsum(LENGTHS)[:-1])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


@pytest.fixture
def numbers():
    rng = np.random.default_rng(3)
    return -rng.exponential(1.0, sum(LENGTHS)), -rng.exponential(1.0, sum(LENGTHS))


def tokens(logprobs, reference, signs=SIGNS, groups=GROUPS, **extras) -> Tokens:
    lengths = torch.tensor(LENGTHS)
    return Tokens(
        logprobs=torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        sampler_logprobs=torch.zeros(len(logprobs), dtype=torch.float64),
        advantages=torch.tensor(np.repeat(signs, LENGTHS)),
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths),
        groups=torch.tensor(groups),
        extras={"reference_logprobs": torch.tensor(reference), **extras},
    )


def loss_of(spec, made: Tokens) -> tuple[float, dict]:
    """The mean over sequences of token means, and the mean of each metric."""
    ((_, _, component),) = make_loss([spec]).components
    losses, metrics = component(made)
    return made.sequence_mean(losses).mean(), {name: float(values.mean()) for name, values in metrics.items()}


def pair(values):
    """(chosen, rejected) of both pairs."""
    return np.array([[values[0], values[1]], [values[3], values[2]]])


def sums(values):
    return np.array([values[part].sum() for part in PARTS])


def means(values):
    return np.array([values[part].mean() for part in PARTS])


def by_the_papers(name, policy, reference):
    ratio = pair(sums(policy - reference))
    h = ratio[:, 0] - ratio[:, 1]
    mean = pair(means(policy))
    match name:
        case "dpo":
            return -np.log(sigmoid(0.3 * h)).mean()
        case "cdpo":
            return (-0.8 * np.log(sigmoid(0.3 * h)) - 0.2 * np.log(sigmoid(-0.3 * h))).mean()
        case "ipo, the paper's sums":
            return ((h - 1 / 0.6) ** 2).mean()
        case "ipo":
            by_token = pair(means(policy - reference))
            return ((by_token[:, 0] - by_token[:, 1] - 1 / 0.6) ** 2).mean()
        case "simpo":
            return -np.log(sigmoid(2.5 * (mean[:, 0] - mean[:, 1]) - 0.7)).mean()
        case "orpo":
            odds = np.exp(mean) / (1 - np.exp(mean))
            return (-mean[:, 0] - 0.2 * np.log(sigmoid(np.log(odds[:, 0] / odds[:, 1])))).mean()
        case "kto":
            z, good, bad = 0.25, ratio[:, 0], ratio[:, 1]
            lost = [1.5 * (1 - sigmoid(0.3 * (good - z))), 0.5 * (1 - sigmoid(0.3 * (z - bad)))]
            return np.mean(lost)
        case "bradley_terry":
            r = pair(sums(policy))
            return (-np.log(sigmoid(r[:, 0] - r[:, 1])) + 0.01 * (r[:, 0] + r[:, 1]) ** 2).mean()
    raise AssertionError(name)


SPECS = {
    "dpo": {"name": "dpo", "beta": 0.3},
    "cdpo": {"name": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    "ipo, the paper's sums": {"name": "ipo", "beta": 0.3, "by_token": False},
    "ipo": {"name": "ipo", "beta": 0.3},
    "simpo": {"name": "simpo", "beta": 2.5, "gamma": 0.7},
    "orpo": {"name": "orpo", "ratio_weight": 0.2},
    "kto": {"name": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    "bradley_terry": {"name": "bradley_terry", "centre": 0.01},
}


@pytest.mark.parametrize("name", SPECS)
def test_values_are_those_of_the_papers(name, numbers):
    policy, reference = numbers
    made = tokens(policy, reference, kl_baseline=torch.full((len(policy),), 0.25, dtype=torch.float64))
    loss, _ = loss_of(SPECS[name], made)
    assert loss.item() == pytest.approx(by_the_papers(name, policy, reference), rel=1e-12)


@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_the_values_slopes(name, numbers):
    policy, reference = numbers
    made = tokens(policy, reference, kl_baseline=torch.full((len(policy),), 0.25, dtype=torch.float64))
    loss, _ = loss_of(SPECS[name], made)
    (gradient,) = torch.autograd.grad(loss, made.logprobs)
    for place in range(len(policy)):
        ends = []
        for step in (1e-6, -1e-6):
            moved = policy.copy()
            moved[place] += step
            ends.append(by_the_papers(name, moved, reference))
        assert float(gradient[place]) == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)


def test_metrics_are_means_over_pairs(numbers):
    policy, reference = numbers
    _, metrics = loss_of(SPECS["dpo"], tokens(policy, reference))
    ratio = 0.3 * pair(sums(policy - reference))
    assert metrics["margin"] == pytest.approx((ratio[:, 0] - ratio[:, 1]).mean())
    assert metrics["accuracy"] == pytest.approx((ratio[:, 0] > ratio[:, 1]).mean())
    assert metrics["score_rejected"] == pytest.approx(ratio[:, 1].mean())


def test_a_certain_answer_has_finite_odds():
    loss, _ = loss_of({"name": "orpo"}, made := tokens(np.zeros(10), np.zeros(10)))
    loss.backward()
    assert math.isfinite(loss.item()) and made.logprobs.grad.isfinite().all()


@pytest.mark.parametrize(
    "groups, signs", [((0, 0, 0, 1), SIGNS), ((0, 1, 1, 2), SIGNS), (GROUPS, (1.0, 1.0, -1.0, 1.0))]
)
def test_what_is_no_pair_is_refused(groups, signs, numbers):
    with pytest.raises(BatchError, match="needs pairs"):
        loss_of({"name": "dpo"}, tokens(*numbers, groups=groups, signs=signs))


@pytest.mark.parametrize(
    "spec",
    [{"name": "dpo", "beta": 0}, {"name": "dpo", "label_smoothing": 0.5}, {"name": "simpo", "gamma": -1.0},
     {"name": "kto", "desirable_weight": 0.0}, {"name": "ipo", "aggregation": "token_mean"}],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(spec):
    with pytest.raises(ConfigError):
        make_loss([spec])


def judged(pairs: int = 4, seed: int = 0):
    rng = np.random.default_rng(seed)
    examples = []
    for number in range(pairs):
        prompt = rng.integers(0, 61, 5).tolist()
        for sign in (1.0, -1.0):
            answer = rng.integers(0, 61, rng.integers(1, 9)).tolist()
            examples.append((([*prompt, *answer], [False] * 5 + [True] * len(answer)), sign, number))
    return pack_judged(examples)


@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_dpo_begins_at_ln_2_whatever_dropout_says(family):
    learner = EmbeddedLearner(tiny.policy(family), None)
    metrics = learner.forward_backward(judged(), make_loss([{"name": "dpo"}]))
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    learner.step(1e-3)
    after = learner.measure(judged(), make_loss([{"name": "dpo"}]))
    assert after["loss"] < metrics["loss"] and after["accuracy"] > 0.5


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_a_split_changes_nothing(name, family):
    batch, loss, found = judged(), make_loss([{"name": name}]), []
    for budget in (4096, 40):
        learner = EmbeddedLearner(tiny.policy(family), None, tokens_per_micro_batch=budget)
        metrics = learner.forward_backward(batch, loss)
        found.append((metrics["loss"], metrics["margin"], learner.masters.gradient.clone()))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-5)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-6)


def test_measuring_leaves_no_trace():
    learner, loss = EmbeddedLearner(tiny.policy(), None), make_loss([{"name": "simpo"}])
    measured = learner.measure(judged(), loss)
    assert learner.step(1e-2) == {"skipped": 1.0}
    assert measured["loss"] == pytest.approx(learner.forward_backward(judged(), loss)["loss"])


# -- reward models --------------------------------------------------------------------------------------------------


def reward_model(family: str):
    torch.manual_seed(0)
    config = {**tiny.FUSED, **tiny.OTHERS}[family]()
    config.num_labels, config.pad_token_id = 1, 0
    return transformers.AutoModelForSequenceClassification.from_config(config).eval()


def ended(pairs: int = 3):
    """Pairs whose value is read at the last token: a token nobody reads follows it."""
    rng = np.random.default_rng(1)
    rows = [rng.integers(1, 61, rng.integers(3, 12)).tolist() for _ in range(2 * pairs)]
    examples = [(([*row, 0], [False] * len(row) + [True]), (1.0, -1.0)[n % 2], n // 2) for n, row in enumerate(rows)]
    return rows, pack_judged(examples)


@pytest.mark.parametrize("family", ["llama, tied", "qwen3", "gpt2", "mistral with a window"])
def test_a_reward_model_learns_as_transformers_says(family):
    rows, batch = ended()
    plain = reward_model(family)
    rewards = torch.stack([plain(torch.tensor([row])).logits[0, 0] for row in rows])
    loss = -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).mean()
    loss.backward()
    learner = EmbeddedLearner(Policy(reward_model(family), dtype=torch.float32), None)
    assert (learner.policy.decoder is not None) == (family in tiny.FUSED)
    metrics = learner.forward_backward(batch, make_loss([{"name": "bradley_terry"}]))
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for weight in learner.masters.weights:
        for name, gradient in weight.split(learner.masters.gradient_of(weight.tensor)):
            wanted = expected[name] if expected[name] is not None else torch.zeros_like(gradient)
            torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_the_head_must_fit_the_loss():
    with pytest.raises(BatchError, match="reads values"):
        EmbeddedLearner(tiny.policy(), None).forward_backward(judged(), make_loss([{"name": "bradley_terry"}]))
