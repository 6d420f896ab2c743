"""AdamW over fp32 masters, clipping, publication, checkpoints and adapters."""

from __future__ import annotations

import copy
import json

import learner_conformance as conformance
import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers

from strop.errors import ModelError
from strop.learning import EmbeddedLearner, make_loss
from strop.models.policy import Policy

LOSS = make_loss([{"name": "reinforce"}])
KINDS = {
    "fused fp32": lambda: tiny.policy(),
    "fused bf16": lambda: tiny.policy("qwen3", dtype=torch.bfloat16),
    "module": lambda: tiny.policy("gpt2"),
    "adapter": lambda: adapter_policy(),
}


def adapter_policy() -> Policy:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.3)
    return Policy(peft.get_peft_model(tiny.model("llama, tied"), config), dtype=torch.float32)


@pytest.fixture(params=KINDS)
def make(request, chat_tokenizer):
    return lambda: EmbeddedLearner(KINDS[request.param](), chat_tokenizer)


def test_it_learns(make):
    conformance.check_learning(make)


def test_it_is_deterministic(make):
    conformance.check_determinism(make)


def test_it_resumes_exactly(make, tmp_path):
    conformance.check_resume(make, tmp_path)


def test_it_refuses(make):
    conformance.check_refusals(make)


def reference_adamw(value, gradient, moments, step, rate, decay, max_norm=None):
    """Loshchilov & Hutter's algorithm 2 in float64, with the decay scaled by the rate as in torch."""
    value, gradient = value.astype(np.float64), gradient.astype(np.float64)
    first, second = moments
    first = 0.9 * first + 0.1 * gradient
    second = 0.999 * second + 0.001 * gradient**2
    corrected = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return value - rate * corrected - rate * decay * value, (first, second)


@pytest.mark.parametrize("max_norm", [1e9, 0.01])
def test_steps_are_those_of_adamw_with_decoupled_decay_of_matrices(max_norm):
    learner = EmbeddedLearner(tiny.policy(), None, weight_decay=0.1, max_grad_norm=max_norm)
    moments = {}
    for step in (1, 2, 3):
        learner.forward_backward(tiny.batch(seed=step), LOSS)
        weights = learner.masters.weights
        before = {w.name: w.tensor.detach().numpy().copy() for w in weights}
        gradient = {w.name: learner.masters.gradient_of(w.tensor).numpy().copy() for w in weights}
        norm = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in gradient.values()))
        metrics = learner.step(1e-2)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert metrics["grad_clipped"] == float(norm > max_norm)
        for weight in weights:
            decay = 0.1 if weight.tensor.dim() > 1 else 0.0
            scaled = gradient[weight.name] * min(1.0, max_norm / norm)
            old = moments.get(weight.name, (0.0, 0.0))
            expected, moments[weight.name] = reference_adamw(before[weight.name], scaled, old, step, 1e-2, decay)
            np.testing.assert_allclose(weight.tensor.detach().numpy(), expected, atol=2e-5)


def test_masters_keep_what_bf16_would_lose():
    """Updates far below bf16's resolution add up in the masters and show in the weights in the end."""
    model = tiny.model("llama, tied")
    masters = {name: parameter.data for name, parameter in model.named_parameters()}
    exact = copy.deepcopy(masters)
    learner = EmbeddedLearner(Policy(model, dtype=torch.bfloat16), None, masters=masters)
    for name, value in learner.masters.named_values().items():
        assert torch.equal(value, exact[name]), name
    for _ in range(60):
        learner.forward_backward(tiny.batch(), LOSS)
        learner.step(1e-5)
    moved = [(value - exact[name]).abs().max().item() for name, value in learner.masters.named_values().items()]
    assert min(moved) > 1e-4
    for name, view in learner.policy.named_weights().items():
        assert torch.equal(view, learner.masters.named_values()[name].bfloat16())


def test_masters_of_another_model_are_refused():
    with pytest.raises(ModelError, match="embed_tokens"):
        EmbeddedLearner(tiny.policy(), None, masters={"lm_head.weight": torch.zeros(2)})


def test_a_new_stage_forgets_moments_and_keeps_weights():
    learner = EmbeddedLearner(tiny.policy(), None)
    conformance.train(learner, range(2))
    weights = learner.masters.values.clone()
    learner.begin_stage()
    assert torch.equal(learner.masters.values, weights)
    assert not learner.masters.state()


@pytest.mark.parametrize("family", ["llama, tied", "qwen2", "gpt2"])
def test_a_checkpoint_is_what_was_trained_and_loads_in_plain_transformers(family, tmp_path, chat_tokenizer):
    learner = EmbeddedLearner(tiny.policy(family, dtype=torch.bfloat16), chat_tokenizer)
    conformance.train(learner, range(2), rate=1e-3)
    learner.save(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    parameters = dict(loaded.named_parameters())
    for name, value in learner.masters.named_values().items():
        assert torch.equal(parameters[name], value), name
    text = "Two words."
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == chat_tokenizer(text)["input_ids"]


def test_an_adapter_is_saved_in_peft_format_and_the_base_is_left_alone(tmp_path, chat_tokenizer):
    peft = pytest.importorskip("peft")
    learner = EmbeddedLearner(adapter_policy(), chat_tokenizer)
    assert all("lora_" in weight.name for weight in learner.masters.weights)
    conformance.train(learner, range(2))
    learner.save(tmp_path)
    base = tiny.model("llama, tied")
    original = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    batch = tiny.batch()
    expected = torch.cat(tiny.plain_logprobs(loaded, batch)).detach().numpy()
    np.testing.assert_allclose(learner.logprobs(batch)[batch.mask], expected, atol=1e-5)
    for name, tensor in original.items():
        inner = name.replace("_proj.weight", "_proj.base_layer.weight")
        trained = dict(learner.policy.model.base_model.model.state_dict())
        assert torch.equal(trained[name] if name in trained else trained[inner], tensor)
    assert not list(tmp_path.glob("model*.safetensors"))


def test_a_damaged_checkpoint_is_refused(tmp_path, chat_tokenizer):
    learner = EmbeddedLearner(tiny.policy(), chat_tokenizer)
    conformance.train(learner, range(1))
    learner.save(tmp_path)
    other = EmbeddedLearner(tiny.policy("qwen3"), chat_tokenizer)
    with pytest.raises(ModelError):
        other.load(tmp_path)
    state = tmp_path / "learner.safetensors"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    with pytest.raises(ModelError, match="earlier"):
        EmbeddedLearner(tiny.policy(), chat_tokenizer).load(tmp_path)
    state.unlink()
    with pytest.raises(ModelError, match="earlier"):
        EmbeddedLearner(tiny.policy(), chat_tokenizer).load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


def test_the_reference_is_the_policy_at_the_stages_beginning(make, tmp_path):
    """Kept when a loss first needs it, in checkpoints too, until another stage begins."""
    batch = tiny.batch()
    spec = [{"name": "reinforce"}, {"name": "kl", "weight": 0.5, "estimator": "k3"}]
    both, learner = make_loss(spec), make()
    before = learner.logprobs(batch)
    for step in range(3):
        metrics = learner.forward_backward(batch, both)
        reference = learner._with_extras(batch, both, 1.0).extras["reference_logprobs"]
        np.testing.assert_array_equal(reference, before)
        log_ratio = (before - learner.logprobs(batch))[batch.mask].astype(np.float64)
        assert metrics["loss_kl"] == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-3, abs=1e-7)
        assert (metrics["loss_kl"] > 1e-4) == (step > 0)
        learner.step(1e-2)
    learner.save(tmp_path)
    resumed = make()
    resumed.load(tmp_path, version=3)
    np.testing.assert_array_equal(resumed._with_extras(batch, both, 1.0).extras["reference_logprobs"], before)
    learner.begin_stage()
    now = learner.logprobs(batch)
    np.testing.assert_array_equal(learner._with_extras(batch, both, 1.0).extras["reference_logprobs"], now)


def test_the_proximal_policy_is_the_present_one(make):
    batch = tiny.batch()
    spec = [{"name": "ppo_clip", "anchor": "proximal", "corrections": [{"name": "truncated_tokens"}]}]
    metrics = make().forward_backward(batch, make_loss(spec))
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert 0 < metrics["effective_share"] <= 1
