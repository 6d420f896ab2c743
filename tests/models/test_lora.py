"""Adapters: checked targets, several on one base at once, plain peft's own numbers, merging."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from strop.errors import ConfigError, ModelError
from strop.learning import EmbeddedLearner, make_loss
from strop.models.lora import add_adapter, load_adapter, merge, write_adapter
from strop.models.policy import Policy
from strop.sampling.embedded import EmbeddedSampler
from strop.sampling.sampler import Sample, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "learning"))
import tiny_models as tiny

peft = pytest.importorskip("peft")

LOSS = make_loss([{"name": "reinforce"}])
ADAPTERS = {"one": ["q_proj", "v_proj", "down_proj"], "two": "all-linear"}
PROMPT = list(range(5, 15))


def adapted(family: str = "qwen3"):
    """A model with two adapters whose updates are large."""
    model = tiny.model(family)
    for name, targets in ADAPTERS.items():
        model = add_adapter(model, rank=3, alpha=6.0, targets=targets, name=name)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["fused", "own forward"])
def policy(request) -> Policy:
    return Policy(adapted(), dtype=torch.float32, fused=request.param == "fused")


def in_plain_peft(policy: Policy, name: str, folder: Path):
    """The adapter, saved and loaded by peft on a base of its own."""
    folder.mkdir()
    write_adapter(folder, policy.model, name)
    return peft.PeftModel.from_pretrained(tiny.model("qwen3"), folder).eval()


def sampled(policy: Policy, adapters: list[str | None]) -> list[Sample]:
    async def ask() -> list[Sample]:
        sampler = EmbeddedSampler(policy, slots=8)
        asked = (sampler.sample(PROMPT, SamplingParams(6, seed=1, adapter=name)) for name in adapters)
        found = await asyncio.gather(*asked)
        await sampler.close()
        return list(found)

    return asyncio.run(ask())


def test_the_fused_pass_is_taken():
    assert Policy(adapted(), dtype=torch.float32).decoder is not None


def test_each_request_names_its_adapter(policy, tmp_path):
    """All prompts are the same, so that a key or value of another adapter would show."""
    names = ["one", "two", "", "one", None]
    samples = sampled(policy, names)
    models = {name: in_plain_peft(policy, name, tmp_path / name) for name in ADAPTERS} | {"": tiny.model("qwen3")}
    models[None] = models["one"]
    for name, sample in zip(names, samples, strict=True):
        tokens = torch.tensor([[*PROMPT, *sample.tokens]])
        expected = models[name](tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[9:, 0]
        np.testing.assert_allclose(sample.logprobs, expected.detach().numpy(), atol=1e-5)
    alone = [sampled(policy, [name])[0] for name in names]
    assert [s.logprobs for s in alone] == [s.logprobs for s in samples]  # bit for bit, whatever is beside it


def test_an_unknown_adapter_is_refused(policy):
    with pytest.raises(ConfigError, match=r"no adapter 'three'\. There are: one, two"):
        sampled(policy, ["three"])


@pytest.mark.parametrize("name", ADAPTERS)
def test_each_learner_trains_its_adapter_alone(policy, name, tmp_path):
    """The gradient is plain peft's; after a step the base and the other adapter are what they were."""
    batch, learner = tiny.batch(), EmbeddedLearner(policy, None, adapter=name)
    before = {key: tensor.clone() for key, tensor in policy.model.state_dict().items()}
    model = in_plain_peft(policy, name, tmp_path / "adapter")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in key)
    advantages = torch.from_numpy(batch.advantages[batch.mask])
    logprobs = torch.cat(tiny.plain_logprobs(model, batch))
    (-(logprobs * advantages).sum() / batch.mask.sum()).backward()
    # Two computations in fp32, of which plain peft's was seen to be the one further from float64.
    np.testing.assert_allclose(learner.logprobs(batch)[batch.mask], logprobs.detach().numpy(), atol=3e-5)
    learner.forward_backward(batch, LOSS)
    expected = {key.replace(".default.", f".{name}."): p.grad for key, p in model.named_parameters() if p.requires_grad}
    found = {}
    for weight in learner.masters.weights:
        found |= dict(weight.split(learner.masters.gradient_of(weight.tensor)))
    assert found.keys() == expected.keys()
    scale = max(float(gradient.abs().max()) for gradient in expected.values())
    for key, gradient in expected.items():
        assert float((found[key] - gradient).abs().max()) <= 3e-5 * scale, key
    learner.step(1e-2)
    for key, tensor in policy.model.state_dict().items():
        assert torch.equal(tensor, before[key]) == (f".{name}." not in key), key


def test_a_learner_must_know_which_adapter_it_trains(policy):
    with pytest.raises(ModelError, match=r"none was named: the policy's are one, two"):
        EmbeddedLearner(policy, None)
    with pytest.raises(ModelError, match="no adapter 'three'"):
        EmbeddedLearner(policy, None, adapter="three")


def test_what_is_trained_loads_in_plain_peft_with_the_same_logits(tmp_path, chat_tokenizer):
    policy = Policy(adapted(), dtype=torch.float32)
    learner = EmbeddedLearner(policy, chat_tokenizer, adapter="two")
    learner.forward_backward(tiny.batch(), LOSS)
    learner.step(1e-2)
    learner.save(tmp_path)
    plain = peft.PeftModel.from_pretrained(tiny.model("qwen3"), tmp_path).eval()
    policy.model.set_adapter("two")
    tokens = torch.tensor([PROMPT])
    torch.testing.assert_close(policy.model(tokens).logits, plain(tokens).logits, atol=1e-5, rtol=0)
    batch = tiny.batch(seed=3)
    expected = torch.cat(tiny.plain_logprobs(plain, batch)).detach().numpy()
    np.testing.assert_allclose(learner.logprobs(batch)[batch.mask], expected, atol=1e-5)


def test_a_checkpoint_of_one_adapter_comes_back(tmp_path, chat_tokenizer):
    first, second = (
        EmbeddedLearner(Policy(adapted(), dtype=torch.float32), chat_tokenizer, adapter="one") for _ in "ab"
    )
    first.forward_backward(tiny.batch(), LOSS)
    first.step(1e-2)
    first.save(tmp_path)
    second.load(tmp_path)
    for learner in (first, second):
        learner.forward_backward(tiny.batch(seed=1), LOSS)
        learner.step(1e-2)
    assert torch.equal(first.masters.values, second.masters.values)


def test_a_stored_adapter_joins_others(tmp_path):
    write_adapter(tmp_path, adapted(), "two")
    model = add_adapter(tiny.model("qwen3"), rank=2, alpha=2.0, name="fresh")
    policy = Policy(load_adapter(model, tmp_path, "stored"), dtype=torch.float32)
    assert policy.adapters == ("fresh", "stored")
    expected = sampled(Policy(adapted(), dtype=torch.float32), ["two"])
    assert [s.logprobs for s in sampled(policy, ["stored"])] == [s.logprobs for s in expected]
    EmbeddedLearner(policy, None, adapter="stored").forward_backward(tiny.batch(), LOSS)
    with pytest.raises(ModelError, match="does not fit the model"):
        load_adapter(tiny.model("llama, tied"), tmp_path / "nowhere")


def test_a_merged_model_is_base_plus_adapter():
    """In float64: W + alpha / rank · B A, for every module that has an update, and nothing else."""
    model, base = adapted(), dict(tiny.model("qwen3").named_parameters())
    state = {key: tensor.double() for key, tensor in model.state_dict().items()}
    merged = dict(merge(adapted(), "one").named_parameters())
    assert merged.keys() == base.keys()
    for name, tensor in merged.items():
        inside = f"base_model.model.{name.removesuffix('.weight')}"
        expected = base[name].double()
        if f"{inside}.lora_A.one.weight" in state:
            expected = expected + 6.0 / 3 * state[f"{inside}.lora_B.one.weight"] @ state[f"{inside}.lora_A.one.weight"]
        torch.testing.assert_close(tensor.double(), expected, atol=1e-6, rtol=1e-6)
    tokens = torch.tensor([PROMPT])
    unmerged = adapted()
    unmerged.set_adapter("one")
    logits = merge(adapted(), "one").eval()(tokens).logits
    torch.testing.assert_close(logits, unmerged.eval()(tokens).logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(ConfigError, match="There are: one, two"):
        merge(adapted())


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["q_proj", "v_porj"], r"'v_porj' is not in the model\. Did you mean 'v_proj'\?"),
        (["input_layernorm"], "'input_layernorm' is no linear layer"),
        ([], "names nothing"),
        ("q_proj", "names nothing"),
    ],
)
def test_a_target_must_be_a_linear_layer_of_the_model(targets, says):
    with pytest.raises(ConfigError, match=says):
        add_adapter(tiny.model("llama, tied"), rank=2, alpha=2.0, targets=targets)


def test_experts_carry_no_adapter():
    with pytest.raises(ConfigError, match=r"'experts\.gate_up_proj' is no linear layer"):
        add_adapter(tiny.model("qwen3 moe"), rank=2, alpha=2.0, targets=["experts.gate_up_proj"])
    with pytest.raises(ConfigError, match=r"\['down_proj'\] are taken for layers of the experts"):
        add_adapter(tiny.model("deepseek v3"), rank=2, alpha=2.0, targets=["o_proj", "down_proj"])


@pytest.mark.parametrize("name", ["one", "a.b", ""])
def test_a_name_must_be_free_and_plain(name):
    with pytest.raises(ConfigError, match="adapter"):
        add_adapter(adapted(), rank=2, alpha=2.0, name=name)


@pytest.mark.parametrize("family", tiny.EXPERTS)
def test_models_with_experts_carry_adapters_on_their_linear_layers(family):
    model = add_adapter(tiny.model(family), rank=2, alpha=2.0)
    learner = EmbeddedLearner(Policy(model, dtype=torch.float32), None)
    before = learner.masters.values.clone()
    metrics = learner.forward_backward(tiny.batch(), LOSS)
    learner.step(1e-2)
    assert not torch.equal(before, learner.masters.values)
    assert metrics["experts_load_max"] >= 1
