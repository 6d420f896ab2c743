"""Sampler and learner give a token the same log-probability: in bf16, where any other order of a sum would show, they
run the same arithmetic, in C or through PyTorch, so that only the fp32 log-softmax is left to differ."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from test_embedded import EmbeddedBench

from strop import kernels
from strop.learning import Batch
from strop.learning.embedded import EmbeddedLearner
from strop.sampling.sampler import SamplingParams


async def two_turns(sampler, prompt, seed):
    """A whole conversation: its tokens, which of them were sampled, and with which log-probabilities."""
    tokens, sampled, logprobs = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
    for turn in range(2):
        params = SamplingParams(max_tokens=9 + 7 * (seed % 3), seed=10 * seed + turn)
        sample = await sampler.sample(tokens, params)
        said = [seed % 300, 1, 2]
        tokens += sample.tokens + said
        sampled += [True] * len(sample.tokens) + [False] * len(said)
        logprobs += sample.logprobs + [0.0] * len(said)
    return tokens, sampled, logprobs


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2e-6), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("family", "in_c"), [("llama", True), ("qwen3", True), ("qwen2", False), ("llama", False)])
async def test_they_agree(family, in_c, dtype, bound, monkeypatch):
    if in_c and not kernels.built():
        pytest.skip("attention in C is not built")
    if not in_c:
        monkeypatch.setattr(kernels, "LIBRARY", Path("nowhere"))
    bench = EmbeddedBench(family, dtype)
    sampler = bench.make(slots=5, max_context=256)
    prompts = [[(7 * number + group * 31) % 301 for number in range(20 + 37 * group)] for group in range(4)]
    asked = [(group, member) for group in range(4) for member in range(3)]
    turns = await asyncio.gather(*(two_turns(sampler, prompts[group], 3 * group + member) for group, member in asked))
    await sampler.close()
    tokens, mask, logprobs = (np.concatenate([turn[part] for turn in turns]) for part in range(3))
    batch = Batch(
        tokens=tokens.astype(np.int32),
        mask=mask,
        advantages=np.zeros(len(tokens), np.float32),
        sampler_logprobs=logprobs.astype(np.float32),
        versions=np.zeros(len(tokens), np.int32),
        lengths=np.array([len(turn[0]) for turn in turns]),
        groups=np.array([group for group, _ in asked]),
        rollouts=tuple(f"{group}/{member}" for group, member in asked),
    )
    for budget in (4096, 300):
        learnt = EmbeddedLearner(bench.policy, None, tokens_per_micro_batch=budget).logprobs(batch)
        difference = np.abs(learnt - logprobs)[mask]
        assert difference.max() <= bound * max(1.0, np.abs(logprobs).max())
