"""The learner: gradients of plain transformers, whatever the split, the sharing of prefixes and the path taken."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from strop.learning import Batch, EmbeddedLearner, make_loss

REINFORCE = [{"name": "reinforce"}]


def gradients(learner: EmbeddedLearner) -> dict[str, torch.Tensor]:
    named = {}
    for weight in learner.masters.weights:
        named.update(weight.split(learner.masters.gradient_of(weight.tensor).clone()))
    return named


def plain_gradients(family: str, batch: Batch, temperature: float, per_token) -> dict[str, torch.Tensor]:
    """By transformers' own forward and `loss.backward()`; `per_token(logprobs, sequence)` is summed."""
    model = tiny.model(family)
    found = tiny.plain_logprobs(model, batch, temperature)
    loss = sum(per_token(logprobs, number).sum() for number, logprobs in enumerate(found))
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= tolerance * scale, name


@pytest.mark.parametrize("turns", [1, 3])
@pytest.mark.parametrize("family", [*tiny.FUSED, *tiny.OTHERS])
def test_gradients_are_those_of_plain_transformers(family, turns):
    batch = tiny.batch(turns=turns)
    learner = EmbeddedLearner(tiny.policy(family), None)
    assert (learner.policy.decoder is not None) == (family in tiny.FUSED)
    metrics = learner.forward_backward(batch, make_loss(REINFORCE), temperature=0.7)
    total = batch.mask.sum()
    advantage = [float(batch.advantages[batch.span(n)][-1]) for n in range(len(batch.lengths))]
    expected = plain_gradients(family, batch, 0.7, lambda logprobs, n: -advantage[n] * logprobs / total)
    assert_same(gradients(learner), expected)
    assert metrics["tokens_trained"] == total


@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
@pytest.mark.parametrize("prompt", [70, 200])
def test_long_shared_prompts_span_several_pieces(family, prompt):
    batch = tiny.batch(groups=2, members=5, prompt=prompt, longest=90, turns=2)
    learner = EmbeddedLearner(tiny.policy(family), None)
    found = learner.logprobs(batch, 0.9)
    expected = torch.cat(tiny.plain_logprobs(tiny.model(family), batch, 0.9)).detach().numpy()
    np.testing.assert_allclose(found[batch.mask], expected, atol=2e-5)
    assert not found[~batch.mask].any()
    learner.forward_backward(batch, make_loss(REINFORCE), 0.9)
    total = batch.mask.sum()
    advantage = [float(batch.advantages[batch.span(n)][-1]) for n in range(len(batch.lengths))]
    assert_same(
        gradients(learner), plain_gradients(family, batch, 0.9, lambda logprobs, n: -advantage[n] * logprobs / total)
    )
