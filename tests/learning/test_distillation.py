"""Reverse KL to a teacher: its gradient is that of the exact divergence, and every token is scored by its own teacher."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import batch, model, policy

from strop.errors import BatchError
from strop.learning import Tokens, apart, make_advantage, make_loss, taught
from strop.learning.outputs import frozen_logprobs


def tokens(logprobs: torch.Tensor, sampler: torch.Tensor, teacher: torch.Tensor) -> Tokens:
    count = len(logprobs)
    return Tokens(
        logprobs=logprobs,
        sampler_logprobs=sampler,
        advantages=torch.zeros(count, dtype=torch.float64),
        sequence=torch.zeros(count, dtype=torch.int64),
        groups=torch.zeros(1, dtype=torch.int64),
        extras={"teacher_logprobs": teacher},
    )


def component(**options):
    ((_, _, made),) = make_loss([{"name": "reverse_kl", **options}]).components
    return made


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("anchor", ["sampler", "current"])
def test_its_gradient_is_that_of_the_exact_divergence(anchor, off_policy):
    """Every token of a small vocabulary, weighted by how often it is sampled, against autograd through the KL itself."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher, other = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    sampler = (other if off_policy else logits.detach()).log_softmax(0)
    losses, metrics = component(anchor=anchor)(tokens(logits.log_softmax(0), sampler, teacher.log_softmax(0)))
    (estimated,) = torch.autograd.grad((sampler.exp() * losses).sum(), logits)

    pi, rho = np.exp(logits.detach() - logits.detach().logsumexp(0)), np.exp(teacher - teacher.logsumexp(0))
    pi, rho = pi.numpy(), rho.numpy()
    divergence = float((pi * np.log(pi / rho)).sum())
    exact = pi * (np.log(pi / rho) - divergence)  # d KL / d logits, by hand
    if anchor == "sampler" or not off_policy:
        np.testing.assert_allclose(estimated.numpy(), exact, atol=1e-12)
    else:  # without the ratio, what another policy sampled gives another gradient
        assert np.abs(estimated.numpy() - exact).max() > 1e-2
    if not off_policy:
        assert float((sampler.exp() * metrics["reverse_kl"]).sum()) == pytest.approx(divergence, rel=1e-12)
        assert float((sampler.exp() * losses.detach()).sum()) == pytest.approx(divergence, rel=1e-12)


def test_a_teacher_that_agrees_teaches_nothing():
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    losses, _ = component()(tokens(logprobs, logprobs.detach(), logprobs.detach()))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert losses.tolist() == [0.0, 0.0] and gradient.tolist() == [0.0, 0.0]


def test_rewards_play_no_part_and_no_sequence_is_passed_over():
    made = make_loss([{"name": "reverse_kl"}])
    assert made.needs == {"teacher_logprobs"} and not made.scales_with_advantage
    assert make_loss([{"name": "reverse_kl", "anchor": "proximal"}]).needs == {"teacher_logprobs", "proximal_logprobs"}


def test_a_batch_without_a_teacher_is_refused():
    from strop.learning import EmbeddedLearner

    with pytest.raises(BatchError, match="teacher_logprobs"):
        EmbeddedLearner(policy(), None).forward_backward(batch(), make_loss([{"name": "reverse_kl"}]))


@pytest.mark.parametrize("family", ["llama, tied", "qwen3", "gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_teachers_logprobs_are_those_of_its_own_forward(family, temperature):
    made = batch()
    found = frozen_logprobs(policy(family, seed=3), made, temperature, budget=64)
    plain, expected = model(family, seed=3), np.zeros(len(made.tokens), dtype=np.float32)
    for number in range(len(made.lengths)):
        span = made.span(number)
        ids = torch.from_numpy(made.tokens[span].astype(np.int64))
        with torch.no_grad():
            logprobs = (plain(ids[None]).logits[0].double() / temperature).log_softmax(-1)
        expected[span][1:] = logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
    np.testing.assert_allclose(found, np.where(made.mask, expected, 0.0), atol=2e-4)
    assert (found[made.mask] < 0).all()


def test_every_sequence_is_scored_by_its_own_teacher():
    made = batch(groups=3)
    asked: dict[int, int] = {}

    def teacher(number: int):
        def ask(part):
            asked[number] = int(part.mask.sum())
            return np.where(part.mask, np.float32(-1.0 - number), np.float32(0.0))

        return ask

    numbers = [int(group % 2) for group in made.groups]
    found = taught(made, numbers, {0: teacher(0), 1: teacher(1)}).extras["teacher_logprobs"]
    expected = np.where(made.mask, -1.0 - np.array(numbers)[made.sequence], 0.0)
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert sum(asked.values()) == made.mask.sum()


def test_baselines_do_not_mix_kinds():
    """Standardised over the batch, two environments with rewards of different size would drown one another."""
    rewards = [[0.0, 1.0], [100.0, 300.0], [1.0, 1.0]]
    advantage = make_advantage({"name": "reinforce_plus_plus", "epsilon": 0.0})
    found = apart(advantage, ["small", "large", "small"])(rewards)
    small = np.array([0.0, 1.0, 1.0, 1.0])
    centred = (small - small.mean()) / small.std(ddof=1)
    np.testing.assert_allclose(np.concatenate([found[0], found[2]]), centred)
    np.testing.assert_allclose(found[1], [-1 / np.sqrt(2), 1 / np.sqrt(2)])
    one = apart(advantage, ["same"] * 3)(rewards)
    assert all((a == b).all() for a, b in zip(one, advantage(rewards), strict=True))


@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_a_learner_that_begins_anew_is_as_if_nothing_had_been(family):
    """Other weights, a version of their own, no moments left: what follows is what a new learner does."""
    from strop.learning import EmbeddedLearner

    def train(learner: EmbeddedLearner) -> None:
        for seed in range(2):
            learner.forward_backward(batch(seed=seed), make_loss([{"name": "ppo_clip"}]))
            learner.step(1e-2)

    used, new = EmbeddedLearner(policy(family), None), EmbeddedLearner(policy(family, seed=9), None)
    train(used)
    used.forward_backward(batch(seed=5), make_loss([{"name": "ppo_clip"}]))  # a gradient that must not survive
    before = used.version
    used.restart({name: part.detach().clone() for name, part in model(family, seed=9).named_parameters()})
    assert used.version == before + 1
    np.testing.assert_array_equal(used.logprobs(batch()), new.logprobs(batch()))
    train(used)
    train(new)
    np.testing.assert_array_equal(used.logprobs(batch()), new.logprobs(batch()))
