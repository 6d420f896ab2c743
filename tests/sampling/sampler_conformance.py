"""What every sampler must do. An implementation's test module subclasses `SamplerConformance` and provides a fixture
`bench`, which makes the sampler and knows independently what its model's probabilities are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import pytest

from strop.errors import AttemptError, BatchError
from strop.rollouts import FailureKind, FinishReason
from strop.sampling.sampler import Sampler, SamplingParams

PROMPT = [5, 9, 3, 14, 2, 8]


class Bench(Protocol):
    """Makes a sampler for the suite.

    Attributes:
        vocab: number of tokens.
        tolerance: by how much log-probabilities may differ from `reference`.
        bitwise: whether samples are the same, bit for bit, whatever is sampled beside them.
        reuses_prefixes: whether a later turn reuses its history.
    """

    vocab: int
    tolerance: float
    bitwise: bool
    reuses_prefixes: bool

    def make(self, *, max_context: int = 64, queue_limit: int = 4096, slots: int = 4) -> Sampler: ...

    def reference(self, tokens: Sequence[int], temperature: float) -> np.ndarray:
        """(len(tokens), vocab) log-probabilities of what follows each token, by an independent forward pass."""
        ...

    def update(self) -> int:
        """Publish other weights; gives their version."""
        ...


def reference_logprobs(bench: Bench, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> np.ndarray:
    table = bench.reference([*prompt, *tokens], temperature)
    return table[np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1), list(tokens)]


def same(bench: Bench, one, other) -> bool:
    """Whether two samples are the same as far as the implementation promises."""
    if bench.bitwise:
        return one.tokens == other.tokens and one.logprobs == other.logprobs
    return one.tokens == other.tokens and np.allclose(one.logprobs, other.logprobs, atol=bench.tolerance)


class SamplerConformance:
    """The suite."""

    async def test_it_is_a_sampler(self, bench):
        sampler = bench.make(max_context=48)
        assert isinstance(sampler, Sampler)
        assert sampler.max_context == 48
        await sampler.close()

    async def test_max_tokens_and_one_of_each_per_token(self, bench):
        sampler = bench.make()
        sample = await sampler.sample(PROMPT, SamplingParams(max_tokens=7, seed=1))
        assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions) == 7
        assert sample.finish_reason is FinishReason.LENGTH
        assert set(sample.versions) == {sampler.version}
        assert all(0 <= token < bench.vocab for token in sample.tokens)
        assert sample.seconds > 0 and sample.queued >= 0
        await sampler.close()

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
    async def test_logprobs_are_those_of_the_distribution_sampled_from(self, bench, temperature):
        sampler = bench.make()
        params = SamplingParams(max_tokens=20, temperature=temperature, seed=3)
        sample = await sampler.sample(PROMPT, params)
        expected = reference_logprobs(bench, PROMPT, sample.tokens, temperature)
        np.testing.assert_allclose(sample.logprobs, expected, atol=bench.tolerance)
        await sampler.close()

    async def test_greedy_takes_the_likeliest_and_says_its_logprob_at_temperature_one(self, bench):
        sampler = bench.make()
        sample = await sampler.sample(PROMPT, SamplingParams(max_tokens=12, temperature=0.0))
        table = bench.reference([*PROMPT, *sample.tokens], 1.0)[len(PROMPT) - 1 : -1]
        chosen = table[np.arange(12), sample.tokens]
        assert (chosen >= table.max(axis=1) - 2 * bench.tolerance).all()
        np.testing.assert_allclose(sample.logprobs, chosen, atol=bench.tolerance)
        await sampler.close()

    async def test_samples_follow_the_distribution(self, bench):
        sampler = bench.make(slots=32)
        params = [SamplingParams(max_tokens=1, seed=seed) for seed in range(1500)]
        samples = await asyncio.gather(*(sampler.sample(PROMPT, each) for each in params))
        counts = np.bincount([sample.tokens[0] for sample in samples], minlength=bench.vocab)
        expected = np.exp(bench.reference(PROMPT, 1.0)[-1]) * len(samples)
        likely = expected > 5
        pooled = np.append(expected[likely], expected[~likely].sum())
        seen = np.append(counts[likely], counts[~likely].sum())
        chi = ((seen - pooled) ** 2 / np.maximum(pooled, 1)).sum()
        freedom = len(pooled) - 1
        assert chi < freedom + 5 * np.sqrt(2 * freedom)  # five standard deviations of chi-square
        await sampler.close()

    async def test_a_seed_is_a_sample(self, bench):
        sampler = bench.make()
        params = SamplingParams(max_tokens=16, seed=11)
        first = await sampler.sample(PROMPT, params)
        assert same(bench, first, await sampler.sample(PROMPT, params))
        assert (await sampler.sample(PROMPT, replace(params, seed=12))).tokens != first.tokens
        shorter = await sampler.sample(PROMPT, replace(params, max_tokens=5))
        assert shorter.tokens == first.tokens[:5]
        unseeded = [await sampler.sample(PROMPT, replace(params, seed=None)) for _ in range(2)]
        assert unseeded[0].tokens != unseeded[1].tokens
        await sampler.close()

    async def test_a_stop_token_ends_and_is_kept(self, bench):
        sampler = bench.make()
        params = SamplingParams(max_tokens=16, seed=5)
        free = await sampler.sample(PROMPT, params)
        stop = free.tokens[6]
        stopped = await sampler.sample(PROMPT, replace(params, stop_token_ids=(bench.vocab - 1, stop)))
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
        await sampler.close()

    async def test_truncation_renormalises(self, bench):
        sampler = bench.make()
        top = await sampler.sample(PROMPT, SamplingParams(max_tokens=10, top_k=1, seed=2))
        np.testing.assert_allclose(top.logprobs, 0.0, atol=1e-6)
        params = SamplingParams(max_tokens=10, top_p=0.5, temperature=0.7, seed=2)
        nucleus = await sampler.sample(PROMPT, params)
        table = bench.reference([*PROMPT, *nucleus.tokens], 0.7)[len(PROMPT) - 1 : -1]
        for row, token, logprob in zip(table, nucleus.tokens, nucleus.logprobs, strict=True):
            mass = np.cumsum(np.sort(np.exp(row))[::-1])
            least, most = (mass[np.searchsorted(mass, 0.5 + shift)] for shift in (-bench.tolerance, bench.tolerance))
            assert np.exp(row[row > row[token]]).sum() < 0.5 + bench.tolerance
            assert row[token] - np.log(most) - bench.tolerance <= logprob
            assert logprob <= row[token] - np.log(least) + bench.tolerance
        await sampler.close()

    async def test_the_context_ends_a_sample(self, bench):
        sampler = bench.make(max_context=16)
        sample = await sampler.sample(PROMPT, SamplingParams(max_tokens=100, seed=1))
        assert len(sample.tokens) == 16 - len(PROMPT)
        assert sample.finish_reason is FinishReason.LENGTH
        await sampler.close()

    @pytest.mark.parametrize("length", [0, 16, 17])
    async def test_a_prompt_that_cannot_fit_is_refused_at_once(self, bench, length):
        sampler = bench.make(max_context=16)
        with pytest.raises(BatchError, match=str(length)):
            await sampler.sample([1] * length, SamplingParams(max_tokens=1))
        await sampler.close()

    async def test_neither_company_nor_order_matters(self, bench):
        requests = [
            ([*PROMPT, number % 7], SamplingParams(max_tokens=4 + number % 9, seed=number)) for number in range(24)
        ]
        sampler = bench.make(slots=4)
        alone = [await sampler.sample(*request) for request in requests]
        await sampler.close()
        sampler = bench.make(slots=5)
        together = await asyncio.gather(*(sampler.sample(*request) for request in reversed(requests)))
        assert all(same(bench, one, other) for one, other in zip(alone, reversed(together), strict=True))
        await sampler.close()

    async def test_a_later_turn_goes_on_from_its_history(self, bench):
        sampler = bench.make()
        first = await sampler.sample(PROMPT, SamplingParams(max_tokens=8, seed=1))
        history = [*PROMPT, *first.tokens, 4, 2]
        params = SamplingParams(max_tokens=8, seed=2)
        second = await sampler.sample(history, params)
        assert second.cached <= len(history)
        if bench.reuses_prefixes:
            assert second.cached == len(PROMPT) + 7  # all but the last sampled token, which was never fed back
        fresh = bench.make()
        afresh = await fresh.sample(history, params)
        assert afresh.cached == 0
        assert same(bench, second, afresh)
        await sampler.close()
        await fresh.close()

    async def test_more_callers_than_places_wait_and_none_fails(self, bench):
        sampler = bench.make(queue_limit=3, slots=2)
        params = [SamplingParams(max_tokens=3, seed=seed) for seed in range(40)]
        samples = await asyncio.gather(*(sampler.sample(PROMPT, each) for each in params))
        assert all(len(sample.tokens) == 3 for sample in samples)
        await sampler.close()

    async def test_a_passed_deadline_is_a_failure_and_leaves_no_trace(self, bench):
        sampler = bench.make(slots=2)
        for left in (-1.0, 0.0):
            with pytest.raises(AttemptError) as error:
                await sampler.sample(PROMPT, SamplingParams(max_tokens=5), deadline=time.monotonic() + left)
            assert error.value.kind is FailureKind.TIMEOUT
        params = SamplingParams(max_tokens=5, seed=1)
        assert len((await sampler.sample(PROMPT, params, deadline=time.monotonic() + 60)).tokens) == 5
        await sampler.close()

    async def test_cancelling_frees_the_place(self, bench):
        sampler = bench.make(slots=2, queue_limit=2, max_context=64)
        long = [asyncio.ensure_future(sampler.sample(PROMPT, SamplingParams(max_tokens=58))) for _ in range(8)]
        await asyncio.sleep(0.01)
        for task in long:
            task.cancel()
        assert all(
            isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*long, return_exceptions=True)
        )
        params = [SamplingParams(max_tokens=3, seed=seed) for seed in range(8)]
        samples = await asyncio.gather(*(sampler.sample(PROMPT, each) for each in params))
        assert all(len(sample.tokens) == 3 for sample in samples)
        await sampler.close()

    async def test_closing_fails_what_is_in_flight(self, bench):
        sampler = bench.make(slots=2, queue_limit=3)
        flights = [asyncio.ensure_future(sampler.sample(PROMPT, SamplingParams(max_tokens=58))) for _ in range(9)]
        await asyncio.sleep(0)
        await sampler.close()
        ends = await asyncio.wait_for(asyncio.gather(*flights, return_exceptions=True), 30)
        assert all(isinstance(end, AttemptError) and end.kind is FailureKind.SAMPLER for end in ends)
        await sampler.close()
        with pytest.raises(AttemptError):
            await sampler.sample(PROMPT, SamplingParams(max_tokens=1))

    async def test_an_update_is_sampled_from_and_serves_no_older_keys(self, bench):
        sampler = bench.make()
        params = SamplingParams(max_tokens=8, temperature=0.0)
        before = await sampler.sample(PROMPT, params)
        version = bench.update()
        assert sampler.version == version
        after = await sampler.sample(PROMPT, params)
        assert after.cached == 0
        assert set(after.versions) == {version}
        assert after.logprobs != before.logprobs  # the canary of a dropped update
        expected = reference_logprobs(bench, PROMPT, after.tokens, 1.0)
        np.testing.assert_allclose(after.logprobs, expected, atol=bench.tolerance)
        await sampler.close()

    async def test_an_update_in_flight_marks_every_token(self, bench):
        sampler = bench.make(slots=2, max_context=512)
        old = sampler.version
        flight = asyncio.ensure_future(sampler.sample(PROMPT, SamplingParams(max_tokens=400, seed=1)))
        await sampler.sample(PROMPT, SamplingParams(max_tokens=4, seed=2))  # by now the other one is on its way
        new = await asyncio.to_thread(bench.update)
        sample = await flight
        assert sample.versions == sorted(sample.versions)
        assert set(sample.versions) == {old, new}
        assert len(sample.tokens) == 400
        history = [*PROMPT, *sample.tokens[:5]]
        assert (await sampler.sample(history, SamplingParams(max_tokens=1))).cached == 0
        await sampler.close()
