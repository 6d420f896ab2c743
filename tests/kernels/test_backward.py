"""The learner's kernels in C against PyTorch's autograd in float64, and against themselves with other threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from strop import kernels

pytestmark = pytest.mark.skipif(not kernels.built(), reason="the kernels are not built")
DTYPES = [torch.bfloat16, torch.float32]
EPSILON = 1e-5


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(result: Tensor, expected: Tensor, steps: int = 1) -> None:
    """Within one rounding of bf16, or a few of fp32."""
    step = steps * (2.0**-8 if result.dtype == torch.bfloat16 else 2.0**-19)
    torch.testing.assert_close(result.double(), expected, rtol=step, atol=step)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (5, 37), (300, 576)])
def test_norm(dtype, tokens, width):
    x, upstream = (normal(tokens, width, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, gradient = normal(width, dtype=dtype, seed=3), normal(width, dtype=torch.float32, seed=4)
    exact, exact_weight = x.double().requires_grad_(), weight.double().requires_grad_()
    functional.rms_norm(exact, (width,), exact_weight, EPSILON).backward(upstream.double())
    before = gradient.clone()
    result = kernels.norm_backward(x, upstream, weight, EPSILON, gradient)
    close(result, exact.grad)
    close(gradient, before.double() + exact_weight.grad, steps=4)
    assert torch.equal(kernels.norm_backward(x, upstream, weight, EPSILON, None), result)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit_of_a_norms_gradient(dtype):
    x, upstream, weight = normal(999, 576, dtype=dtype), normal(999, 576, dtype=dtype, seed=1), normal(576, dtype=dtype)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            gradient = torch.zeros(576)
            found.append((kernels.norm_backward(x, upstream, weight, EPSILON, gradient), gradient))
    finally:
        torch.set_num_threads(before)
    for slope, gradient in found[1:]:
        assert torch.equal(slope, found[0][0]) and torch.equal(gradient, found[0][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(3, 80), (5, 21), (100, 1536)])
def test_gate(dtype, tokens, width):
    gate_up, upstream = 5 * normal(tokens, 2 * width, dtype=dtype), normal(tokens, width, dtype=dtype, seed=1)
    gate_up[0, :4] = torch.tensor([0.0, -1e4, 1e4, -90.0])
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, dim=-1)
    (functional.silu(gate) * up).backward(upstream.double())
    slopes, product = kernels.gated_backward(gate_up, upstream)
    close(slopes, exact.grad, steps=2)
    assert torch.equal(product, kernels.gated(gate_up))


def test_a_gates_slopes_pass_on_what_is_not_finite():
    gate_up = torch.tensor([[float("nan"), 1.0, 1.0, 1.0]])
    slopes, _ = kernels.gated_backward(gate_up, torch.ones(1, 2))
    assert slopes.isfinite().tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 20, 64])
def test_rotation(dtype, width):
    qkv = normal(50, 5 * width, dtype=dtype)
    x = qkv.view(50, 5, width)[:, 1:4]  # tokens further apart
    angles = normal(50, width // 2, dtype=torch.float32, seed=1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = x.double().chunk(2, dim=-1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    close(kernels.rotate(x, cos, sin), torch.cat([first * c - second * s, second * c + first * s], -1), steps=2)
    close(
        kernels.rotate(x, cos, sin, back=True), torch.cat([first * c + second * s, second * c - first * s], -1), steps=2
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [16, 64, 1024])
def test_weights_of_attention(dtype, length):
    scores = 9 * normal(3, 2, 4 * 5, length, dtype=dtype)  # pieces, heads, group · queries
    seen = torch.randint(1, length + 1, (3, 5), generator=torch.Generator().manual_seed(0))
    hidden = torch.arange(length) >= seen[:, None, None, :, None]
    exact = (0.3 * scores.double()).view(3, 2, 4, 5, length).masked_fill(hidden, -torch.inf).softmax(-1)
    kernels.attention_weights_(scores, seen, 5, 0.3)
    close(scores, exact.view(scores.shape))
    assert scores.view(exact.shape)[hidden.expand(exact.shape)].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "vocab", "temperature"), [(1, 5, 1.0), (7, 1003, 0.7), (3, 49152, 1.3)])
def test_logsumexp(dtype, rows, vocab, temperature):
    logits = 20 * normal(rows, vocab, dtype=dtype)
    expected = (logits.double() / temperature).logsumexp(-1)
    torch.testing.assert_close(kernels.logsumexp(logits, temperature).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("place", [0, 17, 1002])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_hidden_by_a_softmax(place, value):
    logits = normal(2, 1003, dtype=torch.float32)
    logits[1, place] = value
    normaliser = kernels.logsumexp(logits, 1.0)
    assert normaliser.isfinite().tolist() == [True, False]
    none = torch.zeros(0)
    starts, chosen = torch.zeros(3, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    kernels.softmax_slope_(logits, normaliser, torch.ones(2), starts, chosen, none, 1.0)
    assert logits.isfinite().all(-1).tolist() == [True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_slope_of_chosen_tokens(dtype, temperature):
    """Against autograd: several tokens of a row, the same one twice, and a row with none."""
    logits = 4 * normal(4, 1003, dtype=dtype)
    rows = torch.tensor([0, 0, 0, 1, 3])
    chosen = torch.tensor([5, 1002, 5, 0, 7])
    upstream = normal(5, dtype=torch.float32, seed=1)
    exact = logits.double().requires_grad_()
    (exact / temperature).log_softmax(-1)[rows, chosen].backward(upstream.double())
    normaliser = kernels.logsumexp(logits, temperature)
    slopes = upstream / temperature
    factors = -torch.zeros(4).index_add_(0, rows, slopes)
    starts = torch.tensor([0, 3, 4, 4, 5])
    kernels.softmax_slope_(logits, normaliser, factors, starts, chosen, slopes, temperature)
    close(logits, exact.grad, steps=2)


def test_minus_infinity_is_a_probability_of_0():
    logits = torch.tensor([[0.0, -torch.inf, 1.0] + [-torch.inf] * 30])
    normaliser = kernels.logsumexp(logits, 0.5)
    torch.testing.assert_close(normaliser, (logits / 0.5).logsumexp(-1))
    none = torch.zeros(0)
    starts, chosen = torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    exact = (logits / 0.5).softmax(-1)
    kernels.softmax_slope_(logits, normaliser, torch.ones(1), starts, chosen, none, 0.5)
    torch.testing.assert_close(logits, exact)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("nan")])
def test_what_is_not_finite_is_not_hidden_by_attention(value):
    scores = normal(1, 1, 2, 64, dtype=torch.float32)
    scores[0, 0, 1, 20] = value
    seen = torch.tensor([[64, 32]])
    kernels.attention_weights_(scores, seen, 2, 1.0)
    assert scores.isfinite().all(-1).flatten().tolist() == [True, False]
    queries, keys = normal(2, 1, 16, dtype=torch.float32), normal(1, 1, 16, 16, dtype=torch.float32)
    keys[0, 0, 3] = value
    out, rows = torch.empty(2, 1, 16), torch.zeros(2, dtype=torch.int64)
    kernels.cached_attention(queries, keys, keys, rows, torch.tensor([2, 3]), 1.0, out)
    assert out.isfinite().all(-1).flatten().tolist() == [True, False]


def test_what_the_kernels_cannot_read_is_refused():
    with pytest.raises(TypeError, match="float16"):
        kernels.gated(torch.zeros(2, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="contiguous"):
        kernels.residual_norm(torch.zeros(2, 16), torch.zeros(16, 2).T, torch.zeros(16), 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.gated(torch.zeros(4, 2).T)
    with pytest.raises(ValueError, match="keys"):
        kernels.attention_weights_(torch.zeros(1, 1, kernels.MOST_KEYS + 16), torch.ones(1, 1).long(), 1, 1.0)
