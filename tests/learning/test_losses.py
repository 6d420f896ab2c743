"""Losses, corrections, KL and aggregation: values and gradients, by hand or in float64 NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import BatchError, ConfigError
from strop.learning import LOSSES, Tokens, make_loss
from strop.learning.aggregation import AGGREGATIONS, token_weights
from strop.learning.corrections import effective_sample_size, make_correction
from strop.learning.kl import kl_estimate


def tokens(ratios, advantages, lengths=None, **extras) -> Tokens:
    """Trained tokens whose log-probability is log(ratio) above the sampler's."""
    sampler = torch.linspace(-2.0, -1.0, len(ratios), dtype=torch.float64)
    lengths = lengths or [len(ratios)]
    return Tokens(
        logprobs=(sampler + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        sampler_logprobs=sampler,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        groups=torch.zeros(len(lengths), dtype=torch.int64),
        extras={name: torch.tensor(value, dtype=torch.float64) for name, value in extras.items()},
    )


def run(spec, made: Tokens):
    """Losses, their gradient with respect to each log-probability, metrics."""
    ((_, _, component),) = make_loss([spec]).components
    losses, metrics = component(made)
    (gradient,) = torch.autograd.grad(losses.sum(), made.logprobs)
    return losses.detach().numpy(), gradient.numpy(), metrics


# Both signs of the advantage, both sides of the clip: (ratio, advantage, loss, whether a gradient flows).
CLIPPED = [
    (1.0, 2.0, -2.0, True),
    (1.5, 2.0, -2.4, False),  # too high, good: clipped at 1.2
    (0.5, 2.0, -1.0, True),  # too low, good: not clipped
    (1.5, -2.0, 3.0, True),  # too high, bad: not clipped
    (0.5, -2.0, 1.6, False),  # too low, bad: clipped at 0.8
    (5.0, -2.0, 10.0, True),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "flows"), CLIPPED)
def test_ppo_clip_on_every_side(ratio, advantage, loss, flows):
    losses, gradient, _ = run({"name": "ppo_clip"}, tokens([ratio], [advantage]))
    np.testing.assert_allclose(losses, [loss])
    np.testing.assert_allclose(gradient, [-ratio * advantage if flows else 0.0])


@pytest.mark.parametrize(("ratio", "advantage", "loss", "flows"), CLIPPED)
def test_dual_clip_bounds_the_loss_of_bad_tokens_alone(ratio, advantage, loss, flows):
    losses, gradient, metrics = run({"name": "ppo_clip", "dual_clip": 3.0}, tokens([ratio], [advantage]))
    bounded = advantage < 0 and loss > 3.0 * abs(advantage)
    np.testing.assert_allclose(losses, [6.0 if bounded else loss])
    np.testing.assert_allclose(gradient, [-ratio * advantage if flows and not bounded else 0.0])
    assert metrics["clip_dual"].tolist() == [float(bounded)]


def test_asymmetric_clip_and_its_fractions():
    made = tokens([1.25, 1.29, 0.79, 0.81], [1.0, 1.0, -1.0, -1.0])
    losses, gradient, metrics = run({"name": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28}, made)
    np.testing.assert_allclose(losses, [-1.25, -1.28, 0.8, 0.81])
    np.testing.assert_allclose(gradient, [-1.25, 0, 0, 0.81])
    assert metrics["clip_high"].tolist() == [0, 1, 0, 0]
    assert metrics["clip_low"].tolist() == [0, 0, 1, 0]


def test_reinforce_is_the_score_times_the_advantage():
    made = tokens([1.7, 0.3], [2.0, -1.0])
    losses, gradient, _ = run({"name": "reinforce"}, made)
    np.testing.assert_allclose(losses, [-2.0 * made.logprobs[0].item(), made.logprobs[1].item()])
    np.testing.assert_allclose(gradient, [-2.0, 1.0])


def test_cispo_clips_the_weight_and_keeps_every_gradient():
    made = tokens([1.7, 0.3, 9.0], [2.0, -1.0, 1.0])
    losses, gradient, metrics = run({"name": "cispo", "clip_high": 4.0}, made)
    logprobs = made.logprobs.detach().numpy()
    np.testing.assert_allclose(losses, -np.array([1.7, 0.3, 5.0]) * [2.0, -1.0, 1.0] * logprobs)
    np.testing.assert_allclose(gradient, [-3.4, 0.3, -5.0])
    assert metrics["clip_high"].tolist() == [0, 0, 1]


def test_gspo_uses_one_geometric_mean_a_sequence():
    made = tokens([1.1, 0.9, 1.3, 2.0, 0.5], [1.0, 1.0, 1.0, -1.0, -1.0], lengths=[3, 2])
    losses, gradient, _ = run({"name": "gspo", "clip_low": 0.5, "clip_high": 0.5}, made)
    mean = (1.1 * 0.9 * 1.3) ** (1 / 3)
    np.testing.assert_allclose(losses, [-mean] * 3 + [1.0] * 2)
    # Each of n tokens of a sequence contributes A · s to the sum, and s = exp(mean) has the slope s / n in each.
    np.testing.assert_allclose(gradient, [-mean] * 3 + [1.0] * 2)
    losses, gradient, metrics = run({"name": "gspo"}, made)
    np.testing.assert_allclose(losses[:3], [-1.0004] * 3)
    assert not gradient[:3].any()
    assert metrics["clip_high"].tolist() == [1, 1, 1, 0, 0]


def test_decoupled_ppo_takes_three_sets_of_logprobs():
    made = tokens([1.5, 1.5], [1.0, 1.0])
    proximal = made.logprobs.detach() - math.log(1.1)  # π / proximal = 1.1, proximal / sampler = 1.5 / 1.1
    made = tokens([1.5, 1.5], [1.0, 1.0], proximal_logprobs=proximal.tolist())
    spec = {"name": "ppo_clip", "anchor": "proximal", "corrections": [{"name": "truncated_tokens", "cap": 1.2}]}
    losses, gradient, metrics = run(spec, made)
    np.testing.assert_allclose(losses, [-1.1 * 1.2] * 2)  # 1.5 / 1.1 = 1.36 is cut to 1.2; 1.1 is not clipped
    np.testing.assert_allclose(gradient, [-1.1 * 1.2] * 2)
    np.testing.assert_allclose(metrics["correction"], [1.2] * 2)
    assert make_loss([spec]).needs == {"proximal_logprobs"}


def test_the_current_anchor_has_ratio_one_and_a_gradient():
    losses, gradient, _ = run({"name": "ppo_clip", "anchor": "current"}, tokens([1.9], [2.0]))
    np.testing.assert_allclose(losses, [-2.0])
    np.testing.assert_allclose(gradient, [-2.0])


RATIOS = [1.4, 0.9, 3.0, 1.0, 0.25]
LENGTHS = [2, 3]
# Products 1.26 and 0.75, geometric means 1.12 and 0.91.


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"name": "truncated_tokens", "cap": 1.3}, [1.3, 0.9, 1.3, 1.0, 0.25]),
        ({"name": "truncated_sequences", "cap": 1.0}, [1.0, 1.0, 0.75, 0.75, 0.75]),
        ({"name": "icepop", "low": 0.5, "high": 2.0}, [1.4, 0.9, 0, 1.0, 0]),
        ({"name": "masked_sequences", "low": 0.8, "high": 1.3}, [1.26, 1.26, 0, 0, 0]),
        ({"name": "token_mask", "low": 0.95, "high": 1.4000001}, [1, 0, 0, 1, 0]),
        ({"name": "sequence_mask", "low": 0.8, "high": 1.3}, [1, 1, 0, 0, 0]),
        ({"name": "geometric_mask", "low": 0.9, "high": 1.1}, [0, 0, 1, 1, 1]),
    ],
)
def test_corrections(spec, expected):
    made = tokens(RATIOS, [1.0] * 5, LENGTHS)
    factors = make_correction(spec, "corrections")(made.logprobs.detach() - made.sampler_logprobs, made)
    np.testing.assert_allclose(factors, expected, rtol=1e-12)


def test_corrections_multiply_and_carry_no_gradient():
    spec = {
        "name": "reinforce",
        "corrections": [{"name": "truncated_tokens", "cap": 1.3}, {"name": "geometric_mask", "low": 0.9, "high": 1.1}],
    }
    _, gradient, metrics = run(spec, tokens(RATIOS, [1.0] * 5, LENGTHS))
    np.testing.assert_allclose(gradient, [0, 0, -1.3, -1.0, -0.25])
    assert metrics["corrected_away"].tolist() == [1, 1, 0, 0, 0]


def test_effective_sample_size():
    assert effective_sample_size(torch.tensor([1.0, 1.0, 1.0])).item() == pytest.approx(3)
    assert effective_sample_size(torch.tensor([2.0, 0.0, 1.0])).item() == pytest.approx(9 / 5)
    assert effective_sample_size(torch.zeros(3)).item() == 0


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        # π = 0.5, ρ = 0.2: log ρ/π = -0.916291, r = 0.4
        ("k1", 0.9162907, 1.0),
        ("k2", 0.4197943, 0.9162907),
        ("k3", 0.4 - 1 + 0.9162907, 1 - 0.4),
    ],
)
def test_kl_estimators_as_metric_and_as_loss(estimator, value, slope):
    logprobs = torch.tensor([0.5], dtype=torch.float64).log().requires_grad_()
    estimate = kl_estimate(logprobs, torch.tensor([0.2], dtype=torch.float64).log(), estimator)
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(value, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(slope, abs=1e-6)


def test_kl_estimators_on_average():
    """Over all tokens of a distribution: k1 and k3 give the KL, k2's slope is the KL's, k1's slope vanishes."""
    scores = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64)
    policy = scores.softmax(0)
    exact = (policy * (policy / reference).log()).sum()
    (exact_slope,) = torch.autograd.grad(exact, scores, retain_graph=True)
    for estimator, unbiased in (("k1", True), ("k2", False), ("k3", True)):
        estimates = kl_estimate(scores.log_softmax(0), reference.log(), estimator)
        if unbiased:
            assert (policy * estimates).sum().item() == pytest.approx(exact.item(), abs=1e-12)
        (slope,) = torch.autograd.grad((policy.detach() * estimates).sum(), scores)
        if estimator == "k2":
            torch.testing.assert_close(slope, exact_slope)
        if estimator == "k1":
            torch.testing.assert_close(slope, torch.zeros_like(slope))


def test_kl_component_reads_the_reference_and_nothing_else():
    made = tokens([1.0, 1.0], [9.0, 9.0], reference_logprobs=[-1.0, -3.0])
    losses, _, _ = run({"name": "kl", "estimator": "k2"}, made)
    np.testing.assert_allclose(losses, [(-1.0 + 2.0) ** 2 / 2, (-3.0 + 1.0) ** 2 / 2])
    with pytest.raises(BatchError, match="reference_logprobs"):
        run({"name": "kl"}, tokens([1.0], [1.0]))


def test_cross_entropy_ignores_advantages():
    losses, gradient, _ = run({"name": "cross_entropy"}, tokens([1.0, 1.0], [0.0, -3.0]))
    np.testing.assert_allclose(losses, [2.0, 1.0])
    np.testing.assert_allclose(gradient, [-1.0, -1.0])


def test_lengths_that_differ_are_an_error_and_never_cut():
    with pytest.raises(BatchError, match="advantages"):
        tokens([1.0, 1.0, 1.0], [1.0, 1.0])


# -- aggregation ---------------------------------------------------------------------------------------------------------

LOSS_ROWS = [[1.0, 2.0, 3.0], [10.0], [4.0, 6.0]]


@pytest.mark.parametrize(
    ("kind", "constant", "expected"),
    [
        ("token_mean", None, 26 / 6),
        ("sequence_mean", None, (2 + 10 + 5) / 3),
        ("sequence_sum", None, (6 + 10 + 10) / 3),
        ("constant", 8, 26 / (3 * 8)),
    ],
)
def test_aggregations(kind, constant, expected):
    counts = np.array([len(row) for row in LOSS_ROWS])
    weights = token_weights(counts, kind, constant)
    assert sum(w * sum(row) for w, row in zip(weights, LOSS_ROWS, strict=True)) == pytest.approx(expected)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.sampled_from(AGGREGATIONS))
def test_a_sequence_without_trained_tokens_is_in_no_denominator(counts, kind):
    constant = 7 if kind == "constant" else None
    weights = token_weights(np.array(counts), kind, constant)
    kept = token_weights(np.array([count for count in counts if count]), kind, constant)
    np.testing.assert_allclose(weights[np.array(counts) > 0], kept)
    assert not weights[np.array(counts) == 0].any()
    if kind in ("token_mean", "sequence_mean") and any(counts):
        assert (weights * counts).sum() == pytest.approx(1)


# -- names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([], "no components"),
        ([{"name": "ppo"}], "ppo_clip"),
        ([{"name": "ppo_clip", "clip": 0.2}], "clip_low, clip_high"),
        ([{"name": "ppo_clip", "clip_low": 1.5}], "between 0 and 1"),
        ([{"name": "ppo_clip", "clip_low": True}], "a number"),
        ([{"name": "ppo_clip", "dual_clip": 0.5}], "above 1"),
        ([{"name": "ppo_clip", "anchor": "old"}], "'sampler', 'proximal', 'current'"),
        ([{"name": "ppo_clip", "aggregation": "mean"}], "token_mean"),
        ([{"name": "ppo_clip", "aggregation": "constant"}], "constant = <tokens>"),
        ([{"name": "ppo_clip", "constant": 32}], "constant = <tokens>"),
        ([{"name": "ppo_clip", "corrections": [{"name": "truncated_tokens"}]}], "count it twice"),
        ([{"name": "ppo_clip", "corrections": [{"name": "tis"}]}], "truncated_tokens"),
        ([{"name": "ppo_clip", "corrections": [{"name": "token_mask", "low": 1.5}]}], "enclose 1"),
        ([{"name": "reinforce", "corrections": [{"name": "truncated_tokens", "cap": 0.0}]}], "above 0"),
        ([{"name": "reinforce", "corrections": "truncated_tokens"}], "a list of a table"),
        ([{"name": "cispo", "clip_high": -1.0}], "negative"),
        ([{"name": "kl", "estimator": "k1"}], "'k2' or 'k3'"),
        ([{"name": "kl", "weight": "big"}], "a number"),
        ([{"name": "kl"}, {"name": "kl"}], "twice"),
        ([{"weight": 1.0}], "no loss ''"),
    ],
)
def test_bad_losses_are_refused(specs, says):
    with pytest.raises(ConfigError, match=r"^(loss|corrections)") as caught:
        make_loss(specs)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", sorted(LOSSES.classes))
def test_every_loss_works_with_its_defaults(name):
    extras = {"reference_logprobs": [-1.0, -1.0], "kl_baseline": [0.0, 0.0], "teacher_logprobs": [-1.0, -1.2]}
    made = tokens([1.0, 1.1], [1.0, -1.0], [1, 1], **extras)
    losses, gradient, _ = run({"name": name}, made)
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()
