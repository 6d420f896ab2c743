"""Saving memory changes no number: recomputed layers, batches that are split when memory runs out, 8-bit moments."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny
import torch

from strop.errors import BatchError, ModelError
from strop.learning import EmbeddedLearner, make_loss

LOSS = make_loss([{"name": "ppo_clip"}])


def starve(learner: EmbeddedLearner, most: int, error: type[BaseException] = RuntimeError) -> list[int]:
    """Memory that holds `most` tokens: a larger micro-batch fails as the allocator does; gives what was tried."""
    own, tried = learner._part_logprobs, []

    def part_logprobs(part, *arguments):
        tried.append(len(part.tree.tokens))
        found = own(part, *arguments)
        if len(part.tree.tokens) > most:
            raise error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123456 bytes")
        return found

    learner._part_logprobs = part_logprobs
    return tried


@pytest.mark.parametrize("family", ["llama, tied", "gpt2", "qwen3"])
def test_recomputed_layers_give_the_same_gradient(family):
    kept, again = (EmbeddedLearner(tiny.policy(family), None, recompute=flag) for flag in (False, True))
    for learner in (kept, again):
        learner.forward_backward(tiny.batch(), LOSS)
    assert torch.equal(kept.masters.gradient, again.masters.gradient)


@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_recomputing_keeps_less_for_the_backward_pass(family):
    def kept(recompute: bool) -> int:
        learner, sizes = EmbeddedLearner(tiny.policy(family), None, recompute=recompute), {}

        def note(tensor):
            sizes[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            learner.forward_backward(tiny.batch(groups=1, longest=60), LOSS)
        return sum(sizes.values())

    assert kept(True) < 0.6 * kept(False)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, torch.OutOfMemoryError])
def test_a_batch_that_does_not_fit_is_split_and_the_run_goes_on(error):
    batch, learner = tiny.batch(), EmbeddedLearner(tiny.policy(), None, tokens_per_micro_batch=200)
    tried = starve(learner, 60, error)
    metrics = learner.forward_backward(batch, LOSS)
    assert (metrics["memory_splits"], metrics["tokens_per_micro_batch"]) == (2, 50)
    assert tried[0] > 100 and all(size <= 60 for size in tried[2:])
    small = EmbeddedLearner(tiny.policy(), None, tokens_per_micro_batch=50)
    expected = small.forward_backward(batch, LOSS)
    assert torch.equal(learner.masters.gradient, small.masters.gradient)
    assert metrics["loss"] == expected["loss"] and metrics["tokens_trained"] == expected["tokens_trained"]
    again = learner.forward_backward(batch, LOSS)  # it stays with small parts, and says so once
    assert "memory_splits" not in again and max(tried[-3:]) <= 60


def test_an_earlier_batchs_gradient_survives_the_split():
    first, second = tiny.batch(seed=1), tiny.batch(seed=2)
    learner, whole = (EmbeddedLearner(tiny.policy(), None, tokens_per_micro_batch=200) for _ in range(2))
    for one in (learner, whole):
        one.forward_backward(first, LOSS)
    starve(learner, 60)
    learner.forward_backward(second, LOSS)
    whole.forward_backward(second, LOSS)
    torch.testing.assert_close(learner.masters.gradient, whole.masters.gradient, atol=1e-7, rtol=1e-5)


def test_reference_logprobs_are_split_too():
    batch, learner = tiny.batch(), EmbeddedLearner(tiny.policy("gpt2"), None, tokens_per_micro_batch=400)
    expected = EmbeddedLearner(tiny.policy("gpt2"), None).logprobs(batch)
    starve(learner, 60)
    np.testing.assert_allclose(learner.logprobs(batch), expected, atol=1e-6)
    assert learner.budget < 400


def test_what_can_not_be_split_further_ends_with_a_word_of_what_to_do():
    learner = EmbeddedLearner(tiny.policy(), None, tokens_per_micro_batch=200)
    starve(learner, 10)
    with pytest.raises(BatchError, match="activation_checkpointing"):
        learner.forward_backward(tiny.batch(), LOSS)
    assert not learner.masters.gradient.any()


def test_other_errors_are_not_taken_for_a_lack_of_memory():
    learner = EmbeddedLearner(tiny.policy(), None)

    def broken(part, *arguments):
        raise RuntimeError("shapes do not match")

    learner._part_logprobs = broken
    with pytest.raises(RuntimeError, match="shapes do not match"):
        learner.forward_backward(tiny.batch(), LOSS)


def test_eight_bit_moments_step_almost_as_far_and_resume_exactly(tmp_path, chat_tokenizer):
    pytest.importorskip("bitsandbytes")

    def trained(learner: EmbeddedLearner, seeds: range) -> EmbeddedLearner:
        for seed in seeds:
            learner.forward_backward(tiny.batch(seed=seed), LOSS)
            learner.step(1e-3)
        return learner

    start = EmbeddedLearner(tiny.policy(), None).masters.values
    exact, small = (
        trained(EmbeddedLearner(tiny.policy(), chat_tokenizer, moments=kind), range(4)) for kind in ("float32", "8bit")
    )
    moved = (exact.masters.values - start).norm()
    assert 0 < (exact.masters.values - small.masters.values).norm() < 0.05 * moved
    state = small.masters.state()
    assert (
        state["state1.0"].dtype == torch.uint8
        and state["state1.0"].numel() == exact.masters.state()["exp_avg.0"].numel()
    )
    small.save(tmp_path)
    resumed = EmbeddedLearner(tiny.policy(), chat_tokenizer, moments="8bit")
    resumed.load(tmp_path)
    assert torch.equal(*(trained(one, range(7, 9)).masters.values for one in (small, resumed)))
    with pytest.raises(ModelError, match="moments kept as float32"):
        EmbeddedLearner(tiny.policy(), chat_tokenizer).load(tmp_path)
