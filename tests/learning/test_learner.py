"""The learner: gradients of plain transformers, whatever the split, the sharing of prefixes and the path taken."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
import torch

from strop import kernels
from strop.errors import BatchError
from strop.learning import Batch, Component, EmbeddedLearner, Learner, Loss, make_loss

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
@pytest.mark.parametrize("in_c", [True, False])
def test_gradients_are_those_of_plain_transformers(family, turns, in_c, monkeypatch):
    if not in_c:
        if family not in tiny.FUSED:
            pytest.skip("goes through PyTorch alone either way")
        monkeypatch.setattr(kernels, "LIBRARY", Path("nowhere"))
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


SPECS = {
    "ppo": [{"name": "ppo_clip", "dual_clip": 3.0}],
    "sequence means": [{"name": "ppo_clip", "aggregation": "sequence_mean"}],
    "dr grpo": [{"name": "ppo_clip", "aggregation": "constant", "constant": 14}],
    "gspo": [{"name": "gspo", "clip_low": 0.5, "clip_high": 0.5}],
    "sums": [{"name": "reinforce", "aggregation": "sequence_sum"}],
    "two parts": [
        {"name": "cispo", "corrections": [{"name": "sequence_mask", "low": 0.2, "high": 5.0}]},
        {"name": "kl", "weight": 0.3, "aggregation": "sequence_mean"},
    ],
    "cross entropy": [{"name": "cross_entropy"}],
}


@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_no_split_into_micro_batches_changes_the_gradient_or_a_metric(family, specs):
    batch = tiny.batch(groups=4, turns=2)
    batch = batch.with_extras(reference_logprobs=np.full(len(batch.tokens), -2.0, np.float32))
    loss, results = make_loss(specs), []
    for budget in (4096, 200, 110, 60):  # from everything at once to a sequence or two at a time
        learner = EmbeddedLearner(tiny.policy(family), None, tokens_per_micro_batch=budget)
        metrics = learner.forward_backward(batch, loss)
        results.append((gradients(learner), metrics))
    whole, expected = results[0]
    for found, metrics in results[1:]:
        assert_same(found, whole)
        for name in set(expected) - {"learner_seconds", "tokens_computed"}:
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@dataclass(frozen=True, kw_only=True)
class Spread(Component):
    """Pulls the mean log-probabilities of a group's sequences together: no sequence can be computed alone."""

    compares_sequences = True

    def __call__(self, tokens):
        means = tokens.sequence_mean(tokens.logprobs)
        same = (tokens.groups[:, None] == tokens.groups).to(means.dtype)
        return tokens.spread((means - same @ means / same.sum(1)).square()), {}


@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_a_loss_that_compares_sequences_gets_whole_groups(family):
    batch, loss = tiny.batch(groups=4), Loss((("spread", 1.0, Spread()),))
    found = []
    for budget in (4096, 130, 100):
        learner = EmbeddedLearner(tiny.policy(family), None, tokens_per_micro_batch=budget)
        learner.forward_backward(batch, loss)
        found.append(gradients(learner))
    for split in found[1:]:
        assert_same(split, found[0], tolerance=2e-5)  # differences of means lose digits
    with pytest.raises(BatchError, match="group 0"):
        EmbeddedLearner(tiny.policy(family), None, tokens_per_micro_batch=30).forward_backward(batch, loss)


def test_two_batches_before_a_step_add_up():
    first, second = tiny.batch(seed=1), tiny.batch(seed=2)
    learner = EmbeddedLearner(tiny.policy(), None)
    alone = []
    for batch in (first, second):
        learner.begin_stage()
        learner.forward_backward(batch, make_loss(REINFORCE))
        alone.append(gradients(learner))
    learner.begin_stage()
    for batch in (first, second):
        learner.forward_backward(batch, make_loss(REINFORCE))
    assert_same(gradients(learner), {name: alone[0][name] + alone[1][name] for name in alone[0]})


def test_logprobs_are_of_each_token_given_what_is_before_it():
    """A table model: the logits after token a are row a of a table, whatever came earlier."""
    learner = EmbeddedLearner(tiny.policy(), None)
    decoder = learner.policy.decoder
    with torch.no_grad():
        for layer in decoder.layers:
            layer.out.zero_()
            layer.down.zero_()
    batch = tiny.batch()
    embedded = torch.nn.functional.rms_norm(
        decoder.embedding.detach(), (32,), decoder.final_norm.detach(), decoder.norm_eps
    )
    table = (embedded @ decoder.head.detach().T / 0.8).double().log_softmax(-1).numpy()
    previous, token = batch.tokens[np.flatnonzero(batch.mask) - 1], batch.tokens[batch.mask]
    np.testing.assert_allclose(learner.logprobs(batch, 0.8)[batch.mask], table[previous, token], atol=1e-5)


def test_temperature_divides_the_logits_before_the_softmax():
    learner = EmbeddedLearner(tiny.policy(), None)
    batch = tiny.batch(groups=1, members=1)
    logits = tiny.model("llama, tied")(torch.from_numpy(batch.tokens.astype(np.int64))[None]).logits[0, :-1].double()
    for temperature in (0.5, 1.0, 2.0):
        table = (logits / temperature).log_softmax(-1)
        expected = table.gather(1, torch.from_numpy(batch.tokens[1:].astype(np.int64))[:, None])[:, 0].detach().numpy()
        np.testing.assert_allclose(
            learner.logprobs(batch, temperature)[1:][batch.mask[1:]], expected[batch.mask[1:]], atol=1e-5
        )


def test_what_other_sequences_hold_does_not_matter():
    """Packed with others or alone, in a group or each in its own: the same log-probabilities."""
    batch = tiny.batch(groups=2, turns=2)
    learner = EmbeddedLearner(tiny.policy(), None)
    together = learner.logprobs(batch)
    apart = Batch(**{**vars(batch), "groups": np.arange(len(batch.lengths))})
    np.testing.assert_allclose(learner.logprobs(apart), together, atol=1e-5)


def test_shared_prompts_and_equal_replies_are_computed_once():
    tokens = np.array([[7, 8, 9, 20, 21, 22], [7, 8, 9, 20, 21, 22], [7, 8, 9, 20, 30, 31]], dtype=np.int32)
    mask = np.tile([False, False, False, True, True, True], 3)
    batch = Batch(
        tokens=tokens.reshape(-1),
        mask=mask,
        advantages=np.repeat([1.0, -2.0, 0.5], 6).astype(np.float32) * mask,
        sampler_logprobs=np.zeros(18, np.float32),
        versions=np.zeros(18, np.int32),
        lengths=np.array([6, 6, 6]),
        groups=np.zeros(3, np.int64),
        rollouts=("a", "b", "c"),
    )
    learner = EmbeddedLearner(tiny.policy(), None)
    metrics = learner.forward_backward(batch, make_loss(REINFORCE))
    assert metrics["tokens_computed"] == 3 + 2 + 1  # the last token of a sequence predicts nothing
    advantage = [1.0, -2.0, 0.5]
    expected = plain_gradients("llama, tied", batch, 1.0, lambda logprobs, n: -advantage[n] * logprobs / 9)
    assert_same(gradients(learner), expected)


def test_a_batch_without_variance_does_no_backward_and_says_so():
    learner = EmbeddedLearner(tiny.policy(), None)
    batch = tiny.batch()
    flat = Batch(**{**vars(batch), "advantages": np.zeros_like(batch.advantages)})
    before = learner.policy.fingerprint()
    assert learner.forward_backward(flat, make_loss([{"name": "ppo_clip"}]))["skipped"] == 1.0
    assert learner.step(1e-3) == {"skipped": 1.0}
    assert learner.policy.fingerprint() == before
    assert learner.version == 0
    assert not flat.teaches
    # A loss that doesn't scale with the advantage has work to do all the same.
    assert "skipped" not in learner.forward_backward(flat, make_loss([{"name": "cross_entropy"}]))


def test_members_without_advantage_change_neither_gradient_nor_normaliser():
    batch = tiny.batch()
    quiet = np.isin(batch.sequence, [1, 4, 5, 6, 7])
    half = Batch(**{**vars(batch), "advantages": np.where(quiet, np.float32(0), batch.advantages)})
    learner = EmbeddedLearner(tiny.policy(), None)
    learner.forward_backward(half, make_loss(REINFORCE))
    advantage = [float(half.advantages[half.span(n)][-1]) for n in range(len(half.lengths))]
    total = batch.mask.sum()
    assert_same(
        gradients(learner),
        plain_gradients("llama, tied", half, 1.0, lambda logprobs, n: -advantage[n] * logprobs / total),
    )


def test_mismatch_is_measured_against_what_the_sampler_recorded():
    learner = EmbeddedLearner(tiny.policy(), None)
    batch = tiny.batch()
    own = learner.logprobs(batch)
    same = Batch(**{**vars(batch), "sampler_logprobs": own})
    metrics = learner.forward_backward(same, make_loss([{"name": "ppo_clip"}]))
    assert metrics["mismatch_max"] < 1e-5
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(-own[batch.mask].mean(), rel=1e-5)
    shift = np.where(np.arange(len(own)) % 2, np.float32(0.9), np.float32(-0.1)) * batch.mask
    other = Batch(**{**vars(batch), "sampler_logprobs": own + shift})
    metrics = learner.forward_backward(other, make_loss([{"name": "ppo_clip"}]))
    difference = -shift[batch.mask].astype(np.float64)
    assert metrics["mismatch_max"] == pytest.approx(0.9, abs=1e-4)
    assert metrics["mismatch_mean"] == pytest.approx(np.abs(difference).mean(), abs=1e-4)
    assert metrics["mismatch_kl1"] == pytest.approx(-difference.mean(), abs=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx((np.exp(difference) - 1 - difference).mean(), abs=1e-4)
    assert metrics["mismatch_outside"] == pytest.approx((np.exp(difference) < 0.5).mean(), abs=1e-6)


def test_effective_share_of_importance_weights():
    learner = EmbeddedLearner(tiny.policy(), None)
    batch = tiny.batch()
    own = learner.logprobs(batch)
    shift = np.linspace(-1, 1, len(own), dtype=np.float32) * batch.mask
    off = Batch(**{**vars(batch), "sampler_logprobs": own - shift})
    spec = {"name": "ppo_clip", "anchor": "current", "corrections": [{"name": "truncated_tokens", "cap": 2.0}]}
    weights = np.minimum(np.exp(shift[batch.mask].astype(np.float64)), 2.0)
    found = learner.forward_backward(off, make_loss([spec]))["effective_share"]
    assert found == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / len(weights), rel=1e-4)


def test_running_out_of_memory_for_good_says_so_and_leaves_no_gradient(monkeypatch):
    learner = EmbeddedLearner(tiny.policy(), None, tokens_per_micro_batch=60)
    parts = []

    def allocate(part, *rest):
        parts.append(part)
        if len(parts) >= 2:
            torch.empty(1 << 60)
        return original(part, *rest)

    original = learner._part_logprobs
    monkeypatch.setattr(learner, "_part_logprobs", allocate)
    with pytest.raises(BatchError, match=r"ran out of memory with micro-batches of \d+ tokens"):
        learner.forward_backward(tiny.batch(), make_loss(REINFORCE))
    assert not learner.masters.gradient.any()
    assert learner.step(1e-3) == {"skipped": 1.0}


def test_a_gradient_that_is_not_finite_changes_nothing():
    learner = EmbeddedLearner(tiny.policy(), None)
    batch = tiny.batch()
    broken = Batch(**{**vars(batch), "advantages": np.where(batch.mask, np.float32(np.inf), np.float32(0))})
    learner.forward_backward(broken, make_loss(REINFORCE))
    before = learner.policy.fingerprint()
    with pytest.raises(BatchError, match="not finite"):
        learner.step(1e-3)
    assert learner.policy.fingerprint() == before


def test_it_is_a_learner():
    assert isinstance(EmbeddedLearner(tiny.policy(), None), Learner)
