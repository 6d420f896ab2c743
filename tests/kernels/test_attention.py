"""Attention in C against float64 NumPy, and against itself in other company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strop import kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels are not built")


def random_case(seed, dtype, kv_heads=2, group=3, width=64, context=192, rows=5, tokens=9):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn((tokens, kv_heads * group, width), generator=generator).to(dtype) * 3
    keys, values = (torch.randn((rows, kv_heads, context, width), generator=generator).to(dtype) for _ in range(2))
    places = (torch.randint(0, most, (tokens,), generator=generator) for most in (rows, context))
    return queries, keys, values, *places


def in_c(queries, keys, values, rows, positions, scale=0.125):
    out = torch.empty_like(queries, memory_format=torch.contiguous_format)
    kernels.cached_attention(queries, keys, values, rows, positions, scale, out)
    return out


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(
    ("kv_heads", "group", "width"), [(3, 3, 64), (1, 1, 64), (2, 2, 128), (1, 5, 32), (2, 16, 16), (1, 2, 256)]
)
def test_it_is_attention(dtype, bound, kv_heads, group, width):
    case = random_case(1, dtype, kv_heads, group, width)
    out = in_c(*case, scale=width**-0.5)
    queries, keys, values, rows, positions = (part.double().numpy() for part in case)
    for token in range(len(queries)):
        seen = int(positions[token]) + 1
        for head in range(kv_heads * group):
            place = int(rows[token]), head // group, slice(0, seen)
            scores = keys[place] @ queries[token, head] * width**-0.5
            weights = np.exp(scores - scores.max())
            expected = weights @ values[place] / weights.sum()
            np.testing.assert_allclose(out[token, head].double(), expected, atol=bound, rtol=bound)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 2))
def test_company_rows_and_threads_change_no_bit(seed, dtype, threads):
    queries, keys, values, rows, positions = random_case(seed, dtype)
    together = in_c(queries, keys, values, rows, positions)
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for token in range(len(queries)):
            one = slice(token, token + 1)
            moved = torch.argsort(order)[rows[one]]
            longer = (torch.cat([x[order], torch.full_like(x, 7.0)], dim=2) for x in (keys, values))
            assert torch.equal(in_c(queries[one], *longer, moved, positions[one]), together[one])
    finally:
        torch.set_num_threads(before)


def test_queries_may_lie_apart():
    queries, keys, values, rows, positions = random_case(3, torch.bfloat16)
    apart = torch.cat([queries, queries], dim=1)[:, : queries.shape[1]]
    assert torch.equal(in_c(apart, keys, values, rows, positions), in_c(queries, keys, values, rows, positions))


def test_sizes_that_it_does_not_take_are_said():
    assert kernels.supports(9, 3, 64, 64)
    assert not kernels.supports(9, 3, 24, 64)
    assert not kernels.supports(9, 3, 64, 72)
    assert not kernels.supports(34, 2, 64, 64)
    assert not kernels.supports(2, 2, 272, 64)
