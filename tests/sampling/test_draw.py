"""Drawing tokens: against float64 NumPy, published test vectors, and itself in other company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.sampling.draw import draw, uniform
from strop.sampling.sampler import SamplingParams

MASK = (1 << 64) - 1


class SplitMix64:
    """The published generator (https://prng.di.unimi.it/splitmix64.c), written out in NumPy."""

    def __init__(self, state):
        self.state = np.uint64(state)

    def next(self):
        with np.errstate(over="ignore"):
            self.state += np.uint64(0x9E3779B97F4A7C15)
            z = self.state
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return int(z ^ (z >> np.uint64(31)))


def test_the_reference_generator_gives_the_published_vector():
    generator = SplitMix64(1234567)
    assert [generator.next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, MASK), st.integers(0, 50))
def test_uniforms_are_a_splitmix_stream_by_number(seed, number):
    start = SplitMix64((seed - 0x9E3779B97F4A7C15) & MASK).next()  # the seed, mixed
    generator = SplitMix64(start)
    values = [generator.next() for _ in range(number + 1)]
    assert uniform(seed, number) == (values[-1] >> 11) / 2**53


def test_uniforms_of_neighbouring_seeds_and_tokens_are_uniform_and_unrelated():
    table = np.array([[uniform(seed, number) for number in range(60)] for seed in range(60)])
    assert table.min() >= 0 and table.max() < 1
    assert np.histogram(table, bins=10, range=(0, 1))[0] == pytest.approx([360] * 10, abs=6 * np.sqrt(360))
    centred = table - 0.5
    for other in (np.roll(centred, 1, 0), np.roll(centred, 1, 1), centred.T):
        off = centred * other
        off = off[~np.eye(60, dtype=bool)]
        assert abs(off.mean()) < 6 / 12 / np.sqrt(off.size)


logits_rows = st.integers(1, 6).flatmap(
    lambda rows: st.tuples(st.just(rows), st.sampled_from([3, 61, 256, 257, 700]), st.integers(0, 10**6))
)


@settings(max_examples=60, deadline=None)
@given(logits_rows, st.sampled_from([0.3, 1.0, 2.5]), st.floats(0, 1, exclude_max=True))
def test_a_draw_inverts_the_distribution_function(shape, temperature, u):
    rows, vocab, seed = shape
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 4, (rows, vocab)).astype(np.float32))
    tokens, logprobs = draw(logits, [SamplingParams(1, temperature=temperature)] * rows, [u] * rows)
    for row, token, logprob in zip(logits.double().numpy() / temperature, tokens, logprobs, strict=True):
        log_p = row - np.logaddexp.reduce(row)
        ends = np.cumsum(np.exp(log_p))
        assert ends[token] >= u - 1e-6 and (token == 0 or ends[token - 1] <= u + 1e-6)
        assert logprob == pytest.approx(log_p[token], abs=2e-6 * max(1, abs(log_p[token])))


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_what_has_no_mass_is_never_drawn(u):
    logits = torch.full((2, 700), -1e9)
    logits[0, [300, 301]] = 0.0
    logits[1, 699] = 0.0
    tokens, logprobs = draw(logits, [SamplingParams(1)] * 2, [u, u])
    assert tokens[0] == (300 if u < 0.5 else 301) and tokens[1] == 699
    assert logprobs == pytest.approx([-np.log(2), 0.0])


def kept_tokens(row, params):
    """Top-k, then top-p, then min-p, by their definitions."""
    kept = np.ones(len(row), dtype=bool)
    if params.top_k:
        kept &= row >= np.sort(row)[-params.top_k]
    if params.top_p < 1:
        order = np.argsort(-np.where(kept, row, -np.inf), kind="stable")
        p = np.exp(row[order] - np.logaddexp.reduce(row[kept]))
        count = int(np.searchsorted(np.cumsum(p), params.top_p)) + 1
        kept &= np.isin(np.arange(len(row)), order[:count])
    if params.min_p:
        kept &= np.exp(row - row.max()) >= params.min_p
    return kept


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0, 1, 3, 40, 1000]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5]),
    st.floats(0, 1, exclude_max=True),
)
def test_truncation_keeps_what_its_definition_keeps(seed, top_k, top_p, min_p, u):
    params = SamplingParams(1, temperature=0.8, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (1, 300)).astype(np.float32))
    row = logits[0].double().numpy() / 0.8
    kept = kept_tokens(row, params) if top_k < 300 else kept_tokens(row, SamplingParams(1, top_p=top_p, min_p=min_p))
    (token,), (logprob,) = draw(logits, [params], [u])
    assert kept[token]
    assert logprob == pytest.approx(row[token] - np.logaddexp.reduce(row[kept]), abs=1e-5)


def test_greedy_rows_take_the_first_of_the_likeliest():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    tokens, logprobs = draw(logits, [SamplingParams(1, temperature=0.0, top_k=1)], [0.99])
    assert tokens == [1]
    assert logprobs == pytest.approx([2 - np.log(1 + 2 * np.exp(2) + np.exp(1))])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([61, 256, 1000]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_company_changes_no_bit(seed, vocab, dtype):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 40))
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab))).to(dtype)
    choices = (
        SamplingParams(1),
        SamplingParams(1, temperature=0.0),
        SamplingParams(1, temperature=0.7),
        SamplingParams(1, top_p=0.8, top_k=20),
    )
    params = [choices[number] for number in rng.integers(0, 4, rows)]
    uniforms = rng.random(rows).tolist()
    before = logits.clone()
    tokens, logprobs = draw(logits, params, uniforms)
    assert torch.equal(logits, before)
    for number in range(rows):
        alone = draw(logits[number : number + 1], params[number : number + 1], uniforms[number : number + 1])
        assert alone == ([tokens[number]], [logprobs[number]])
