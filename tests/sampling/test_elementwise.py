"""The kernels in C against float64, and the pass that uses them against the same pass through PyTorch alone: both give
the same logits up to rounding, and each gives a token the same bits whatever it is computed beside.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_embedded import EmbeddedBench

from strop import kernels
from strop.sampling.embedded_pass import FusedPass, Piece
from strop.sampling.kv_cache import KeyValueCache

EPSILON = 1e-5
DTYPES = [torch.bfloat16, torch.float32]
needs_library = pytest.mark.skipif(not kernels.built(), reason="the kernels aren't built")


def close(result: torch.Tensor, expected: np.ndarray) -> None:
    """Within one rounding of bf16 (two where a sum of rounded terms is rounded), or a few of fp32."""
    step = 2.0**-7 if result.dtype == torch.bfloat16 else 2.0**-20
    np.testing.assert_allclose(result.double().numpy(), expected, rtol=step, atol=step)


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * weight


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(3, 48), (5, 37), (200, 576)])
def test_norm_after_an_addition(dtype, tokens, width):
    x, added, weight = (
        normal(tokens, width, dtype=dtype),
        normal(width, tokens, dtype=dtype).T.contiguous(),
        normal(width, dtype=dtype),
    )
    before, total = x.clone(), x + added
    close(kernels.residual_norm(x, None, weight, EPSILON), normed(x.double().numpy(), weight.double().numpy()))
    assert torch.equal(x, before)
    close(kernels.residual_norm(x, added, weight, EPSILON), normed(total.double().numpy(), weight.double().numpy()))
    assert torch.equal(x, total)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(3, 80), (5, 21), (100, 1536)])
def test_gate(dtype, tokens, width):
    gate_up = 10 * normal(tokens, 2 * width, dtype=dtype)
    gate_up[0, :4] = torch.tensor([0.0, -1e4, 1e4, -90.0])
    gate, up = np.split(gate_up.double().numpy(), 2, axis=1)
    close(kernels.gated(gate_up), gate * np.exp(-np.logaddexp(0, -gate)) * up)


@needs_library
def test_a_gate_passes_on_what_is_not_finite():
    gate_up = torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]])
    assert kernels.gated(gate_up).isfinite().tolist() == [[False, False]]


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(7, 16), (7, 80), (100, 128)])
def test_queries_are_rotated_and_keys_and_values_placed(dtype, with_norms, tokens, width):
    heads, kv_heads, context, rows = 4, 2, 48, 5
    qkv = normal(tokens, (heads + 2 * kv_heads) * width, dtype=dtype)
    angles = torch.arange(context)[:, None] * 10.0 ** -torch.linspace(0, 3, width // 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    norms = (normal(width, dtype=dtype), normal(width, dtype=dtype) + 1) if with_norms else (None, None)
    places = torch.randperm(rows * context, generator=torch.Generator().manual_seed(1))[:tokens]
    row, position = places // context, places % context
    keys, values = (torch.full((rows, kv_heads, context, width), 7.0, dtype=dtype) for _ in range(2))
    queries = kernels.place(qkv, norms, EPSILON, cos, sin, row, position, keys, values)

    q, k, v = np.split(qkv.double().numpy().reshape(tokens, -1, width), [heads, heads + kv_heads], axis=1)
    if with_norms:
        q, k = (normed(x, norm.double().numpy()) for x, norm in zip((q, k), norms, strict=True))
    turn = (cos.double() + 1j * sin.double()).numpy()[position][:, None]
    for result, x in ((queries, q), (keys[row, :, position], k)):
        turned = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turn
        step = 2.0**-6 if dtype == torch.bfloat16 else 2.0**-20
        expected = np.concatenate([turned.real, turned.imag], axis=-1)
        np.testing.assert_allclose(result.double().numpy(), expected, rtol=step, atol=step * np.abs(expected).max())
    assert np.array_equal(values[row, :, position].double().numpy(), v)
    for cache in (keys, values):
        cache[row, :, position] = 7.0
        assert (cache == 7.0).all()


# -- the pass -------------------------------------------------------------------------------------------------------

TOKENS = [(number * number * 13 + 5) % 301 for number in range(90)]


def run(bench: EmbeddedBench, native: bool, steps) -> torch.Tensor:
    """The last step's logits."""
    run = FusedPass(bench.policy.decoder, KeyValueCache(bench.policy.decoder, 9, 128), native=native)
    assert run.native is native
    run.pack()
    return [run(decoding, prefill) for decoding, prefill in steps][-1]


def alone():
    return [([], [Piece(0, 0, TOKENS, wanted=True)])]


def in_pieces_beside_others():
    """The same tokens in row 4: a stretch, one token, and a stretch, while other rows decode and fill."""
    others = [Piece(row, 0, TOKENS[row : row + 8 * row + 1], wanted=True) for row in (0, 1, 2, 3, 5, 6, 7, 8)]
    more = [Piece(each.row, len(each.tokens), [each.row], wanted=True) for each in others]
    return [
        ([], [*others[:3], Piece(4, 0, TOKENS[:50], wanted=False), *others[3:]]),
        ([*more, Piece(4, 50, TOKENS[50:51], wanted=True)], []),
        ([], [Piece(4, 51, TOKENS[51:], wanted=True)]),
    ]


@pytest.fixture(params=[("llama", torch.bfloat16), ("qwen3", torch.bfloat16), ("llama", torch.float32)], ids=str)
def bench(request):
    return EmbeddedBench(*request.param)


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_gets_the_same_bits_whatever_is_beside_it(bench, native, threads):
    before = torch.get_num_threads()
    try:
        expected = run(bench, native, alone())
        torch.set_num_threads(threads)
        assert torch.equal(run(bench, native, in_pieces_beside_others()), expected)
    finally:
        torch.set_num_threads(before)


@needs_library
def test_the_pass_in_c_and_the_pass_through_pytorch_agree(bench):
    native, plain = (run(bench, native, alone()).double().log_softmax(-1) for native in (True, False))
    assert (native - plain).abs().max() < bench.tolerance
