"""The policy keeps one copy of the weights, and no update is lost, torn, stale or empty without an error."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import transformers

from strop.errors import ModelError, StallError, WeightsError
from strop.models.policy import Policy, WeightsLock

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
}
OTHERS = {
    "mistral with a window": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


def build(make, seed=0):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(make())


def nudge(policy):
    def write():
        policy.weights[0].tensor.detach()[0, 0] += 1.0

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_fusing_leaves_the_module_as_it_was(family):
    tokens = torch.arange(7)[None]
    model = build(FAMILIES[family])
    before, logits = {n: t.clone() for n, t in model.state_dict().items()}, model(tokens).logits
    policy = Policy(model, dtype=torch.float32)
    assert policy.decoder is not None
    assert torch.equal(policy.model(tokens).logits, logits)
    after = policy.model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert sum(w.tensor.numel() for w in policy.weights) == sum(p.numel() for p in model.parameters())
    layer = policy.decoder.layers[1]
    assert torch.equal(layer.gate_up[48:], before["model.layers.1.mlp.up_proj.weight"])
    assert layer.qkv.is_contiguous() and layer.qkv.shape == (policy.decoder.head_dim * 8, 32)
    assert (layer.q_norm is not None) == (family == "qwen3")


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_keep_their_own_forward(family):
    policy = Policy(build(OTHERS[family]), dtype=torch.float32)
    assert policy.decoder is None
    assert policy.named_weights().keys() == dict(policy.model.named_parameters()).keys()


def test_weights_are_shared_in_both_directions(tmp_path):
    policy = Policy(build(FAMILIES["qwen2"]), dtype=torch.float32)
    state = {name: torch.randn_like(tensor) for name, tensor in policy.model.state_dict().items()}
    policy.publish(lambda: policy.model.load_state_dict(state) and None)
    assert torch.equal(policy.decoder.layers[0].qkv[32:48], state["model.layers.0.self_attn.k_proj.weight"])
    with torch.no_grad():
        policy.decoder.layers[0].qkv[32:48] = 3.0
    assert (policy.model.model.layers[0].self_attn.k_proj.weight == 3.0).all()
    policy.model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(t, policy.model.state_dict()[n]) for n, t in loaded.state_dict().items())


def test_named_weights_splits_stand_ins():
    policy = Policy(build(FAMILIES["llama"]))
    masters = {w.name: w.tensor.detach().double() for w in policy.weights}
    named = policy.named_weights(masters)
    parameters = dict(policy.model.named_parameters())
    assert named.keys() == parameters.keys()
    assert all(torch.equal(named[name], parameters[name].double()) for name in named)


def test_publishing_counts_on():
    policy = Policy(build(FAMILIES["llama"]), version=4)
    content = policy.content
    assert policy.publish(nudge(policy), base=4) == 5 == policy.version
    assert policy.content != content
    assert policy.publish(nudge(policy), version=9) == 9


def test_an_empty_update_is_an_error():
    policy = Policy(build(FAMILIES["llama"]))
    with pytest.raises(WeightsError, match="empty update"):
        policy.publish(lambda: None)
    assert policy.version == 0
    assert policy.publish(lambda: None, allow_unchanged=True) == 1


def test_every_single_weight_counts():
    policy = Policy(build(FAMILIES["qwen3"]), dtype=torch.bfloat16)
    for weight in policy.weights:
        flat = weight.tensor.detach().view(-1)
        policy.publish(lambda flat=flat: flat[-1].add_(1.0) and None)  # raises where nothing seems to have changed
    assert policy.version == len(policy.weights) > 0


def test_stale_and_falling_versions_are_errors():
    policy = Policy(build(FAMILIES["llama"]))
    policy.publish(nudge(policy))
    with pytest.raises(WeightsError, match="stale update"):
        policy.publish(nudge(policy), base=0)
    with pytest.raises(WeightsError, match="only rise"):
        policy.publish(nudge(policy), version=1)


def test_an_update_that_would_be_dropped_is_an_error():
    policy = Policy(build(FAMILIES["llama"]), dtype=torch.float32)
    policy.model.to(torch.bfloat16)
    with pytest.raises(WeightsError, match="no longer shares"):
        policy.publish(nudge(policy))


def test_a_torn_write_stops_every_step():
    policy = Policy(build(FAMILIES["llama"]))

    def fail():
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        policy.publish(fail)
    with pytest.raises(WeightsError, match="broke off"), policy.step("decoding"):
        pass
    policy.publish(nudge(policy))  # a whole write mends it
    with policy.step("decoding") as version:
        assert version == 1


def test_a_quantised_model_is_refused():
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match="quantised"):
        Policy(model)


def test_the_lock_serves_in_order_even_against_a_greedy_loop():
    lock, done = WeightsLock(), threading.Event()
    turns = 0

    def decode():
        nonlocal turns
        while not done.is_set():
            with lock.hold("decoding"):
                turns += 1
                time.sleep(0.005)

    thread = threading.Thread(target=decode)
    thread.start()
    for _ in range(5):
        before = turns
        with lock.hold("publishing"):
            served_after = turns - before
        assert served_after <= 2
    done.set()
    thread.join()


def test_waiting_for_the_weights_has_a_deadline():
    lock = WeightsLock()
    with lock.hold("a step that hangs"):
        thread_error = []

        def publish():
            try:
                with lock.hold("publishing", timeout=0.05):
                    pass
            except StallError as error:
                thread_error.append(str(error))

        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()
    assert "a step that hangs" in thread_error[0]
    with lock.hold("the next"):
        pass
