"""Mixture-of-experts models: what transformers' own forward gives, routers that are recorded, replayed, balanced or
frozen, and what the load on the experts is."""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import tiny_models as tiny
import torch
import transformers
from test_learner import assert_same, gradients, plain_gradients
from torch import nn

from strop.errors import ModelError
from strop.learning import Batch, EmbeddedLearner, make_loss, pack
from strop.models.carried import check_carried
from strop.models.experts import find_experts
from strop.models.policy import Policy
from strop.rollouts import ExpertChoices, FinishReason, Group, ModelCall, Rollout, Scored, Task
from strop.runs.store import read_groups, rollout_dict, rollout_from_dict, write_groups
from strop.sampling.embedded import EmbeddedSampler
from strop.sampling.sampler import Sample, SamplingParams

REINFORCE = make_loss([{"name": "reinforce"}])
PROMPT = list(range(5, 15))


@pytest.fixture(params=tiny.EXPERTS)
def family(request) -> str:
    return request.param


def plain(family: str) -> transformers.PreTrainedModel:
    """The model with transformers' own loop over experts."""
    model = tiny.model(family)
    model.set_experts_implementation("eager")
    return model


def sampled(policy: Policy, count: int = 2) -> list[Sample]:
    async def ask() -> list[Sample]:
        sampler = EmbeddedSampler(policy, slots=4)
        found = await asyncio.gather(*(sampler.sample(PROMPT, SamplingParams(8, seed=n)) for n in range(count)))
        await sampler.close()
        return list(found)

    return asyncio.run(ask())


def chosen(sample: Sample) -> np.ndarray:
    experts = sample.experts
    return np.frombuffer(experts.ids, dtype="<i2").reshape(-1, experts.layers, experts.per_token).copy()


def batch_of(sample: Sample, experts: np.ndarray | None) -> Batch:
    count = len(PROMPT) + len(sample.tokens)
    mask = np.arange(count) >= len(PROMPT)
    return Batch(
        tokens=np.array([*PROMPT, *sample.tokens], dtype=np.int32),
        mask=mask,
        advantages=mask.astype(np.float32),
        sampler_logprobs=np.array([0.0] * len(PROMPT) + sample.logprobs, dtype=np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        lengths=np.array([count]),
        groups=np.array([0]),
        rollouts=("one",),
        experts=experts,
    )


def test_logprobs_and_gradients_are_those_of_transformers(family):
    batch = tiny.batch()
    learner = EmbeddedLearner(tiny.policy(family), None)
    expected = torch.cat(tiny.plain_logprobs(plain(family), batch)).detach().numpy()
    np.testing.assert_allclose(learner.logprobs(batch)[batch.mask], expected, atol=1e-5)
    learner.forward_backward(batch, REINFORCE)
    advantage = [float(batch.advantages[batch.span(n)][-1]) for n in range(len(batch.lengths))]
    total = batch.mask.sum()
    wanted = plain_gradients(family, batch, 1.0, lambda logprobs, n: -advantage[n] * logprobs / total)
    assert_same(gradients(learner), wanted)


def test_the_samplers_logprobs_are_those_of_transformers(family):
    model = plain(family)
    for sample in sampled(tiny.policy(family)):
        tokens = torch.tensor([[*PROMPT, *sample.tokens]])
        expected = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[len(PROMPT) - 1 :, 0]
        np.testing.assert_allclose(sample.logprobs, expected.detach().numpy(), atol=1e-4)


def test_the_sampler_records_what_its_routers_chose(family):
    """Beside the choices of transformers' routers over the whole sequence, which a hook reads."""
    model, found = plain(family), []
    for router in find_experts(model).routers:
        router.register_forward_hook(lambda _, __, out: found.append(out[2].sort(-1).values))
    (sample,) = sampled(tiny.policy(family), 1)
    with torch.no_grad():
        model(torch.tensor([[*PROMPT, *sample.tokens]]))
    expected = torch.stack(found, dim=1)[:-1].numpy()  # nothing follows the last token
    recorded = chosen(sample)
    assert (recorded[0] == -1).all()  # and nothing led to the first
    np.testing.assert_array_equal(np.sort(recorded[1:], axis=-1), expected)


def test_the_learner_replays_the_samplers_choices(family):
    policy = tiny.policy(family)
    (sample,) = sampled(policy, 1)
    recorded, mask = chosen(sample), batch_of(sample, None).mask
    learner = EmbeddedLearner(policy, None)
    same = learner.logprobs(batch_of(sample, recorded))
    np.testing.assert_allclose(same[mask], sample.logprobs, atol=1e-5)
    assert learner.forward_backward(batch_of(sample, recorded), REINFORCE)["experts_replay_differs"] == 0
    others = np.where(recorded < 0, -1, (recorded + 1) % 8).astype(np.int16)
    replayed = learner.logprobs(batch_of(sample, others))
    assert np.abs(replayed - same).max() > 1e-3
    assert learner.forward_backward(batch_of(sample, others), REINFORCE)["experts_replay_differs"] > 0.5
    deaf = EmbeddedLearner(policy, None, replay_experts=False)
    np.testing.assert_array_equal(deaf.logprobs(batch_of(sample, others)), deaf.logprobs(batch_of(sample, None)))


def test_a_replayed_choice_gets_the_routers_own_weights():
    """By hand, for a softmax router whose weights are renormalised: another pair of experts, in float64."""
    policy = tiny.policy("qwen3 moe")
    block = policy.model.model.layers[0].mlp
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    given = torch.tensor([[0, 5], [7, 2], [3, 4]])
    from strop.models.experts import Routing
    from strop.models.passes import Pass, running

    with running(Pass(routing=Routing(given[:, None].expand(3, 2, 2)))), torch.no_grad():
        found = block(hidden[None])[0]
    x = hidden.double().numpy()
    logits = x @ block.gate.weight.detach().double().numpy().T
    scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    up, down = (w.detach().double().numpy() for w in (block.experts.gate_up_proj, block.experts.down_proj))
    expected = np.zeros_like(x)
    for token, pair in enumerate(given.tolist()):
        total = scores[token, pair].sum() if block.gate.norm_topk_prob else 1.0
        for expert in pair:
            gate, inner = np.split(up[expert] @ x[token], 2)
            expected[token] += scores[token, expert] / total * (down[expert] @ (gate / (1 + np.exp(-gate)) * inner))
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_the_balance_loss_is_the_papers_and_no_split_changes_it(family):
    """DeepSeek-V3's equations 17 to 20 in float64, from what hooks read of transformers' routers."""
    batch = tiny.batch(groups=2, members=2)
    learners = [EmbeddedLearner(tiny.policy(family), None, balance=0.5, tokens_per_micro_batch=b) for b in (4096, 30)]
    metrics = [learner.forward_backward(batch, REINFORCE) for learner in learners]
    assert_same(gradients(learners[0]), gradients(learners[1]))
    model, read = plain(family), []
    for router in find_experts(model).routers:
        router.register_forward_hook(lambda router, _, out: read.append((router, out[0], out[2])))
    losses = []
    for number in range(len(batch.lengths)):
        tokens = batch.tokens[batch.span(number)].astype(np.int64)
        read.clear()
        model(torch.from_numpy(tokens[None, :-1]))
        for router, logits, picked in read:
            scores = logits.detach().double().numpy()
            sigmoid = hasattr(router, "e_score_correction_bias")
            scores = 1 / (1 + np.exp(-scores)) if sigmoid else np.exp(scores)
            scores /= scores.sum(-1, keepdims=True)
            shares = np.bincount(picked.reshape(-1).numpy(), minlength=8) * 8 / (2 * len(scores))
            losses.append(float(shares @ scores.mean(0)))
    for found in metrics:
        assert found["experts_balance"] == pytest.approx(np.mean(losses), rel=1e-5)
    without = EmbeddedLearner(tiny.policy(family), None)
    without.forward_backward(batch, REINFORCE)
    assert not torch.equal(without.masters.gradient, learners[0].masters.gradient)


def test_recomputed_layers_give_the_same_gradient(family):
    batch = tiny.batch(groups=2, members=2)
    kept, again = (EmbeddedLearner(tiny.policy(family), None, balance=0.1, recompute=r) for r in (False, True))
    first, second = kept.forward_backward(batch, REINFORCE), again.forward_backward(batch, REINFORCE)
    assert torch.equal(kept.masters.gradient, again.masters.gradient)
    assert first["experts_load_max"] == second["experts_load_max"]


def test_a_frozen_router_stays(family):
    model = tiny.model(family)
    layout = find_experts(model)
    for parameter in layout.parameters():
        parameter.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in layout.parameters()]
    learner = EmbeddedLearner(Policy(model, dtype=torch.float32), None)
    learner.forward_backward(tiny.batch(), REINFORCE)
    learner.step(1e-2)
    assert all(torch.equal(old, new) for old, new in zip(before, layout.parameters(), strict=True))
    assert not torch.equal(next(model.parameters()), next(tiny.model(family).parameters()))


def test_the_load_on_the_experts_is_counted():
    """One token's two experts of eight: each has half the load, four times the mean; six are idle."""
    policy = tiny.policy("qwen3 moe")
    (sample,) = sampled(policy, 1)
    given = chosen(sample)
    given[1:] = np.array([3, 6])
    metrics = EmbeddedLearner(policy, None).forward_backward(batch_of(sample, given), REINFORCE)
    assert metrics["experts_load_max"] == pytest.approx(4) == metrics["experts_load_max_worst"]
    assert metrics["experts_idle"] == 6 / 8
    assert metrics["experts_load_entropy"] == pytest.approx(np.log(2) / np.log(8))


def test_choices_travel_with_the_rollout(tmp_path):
    """Over two turns, of which the second one's prompt is known in part; through the store and the journal."""
    first = ExpertChoices(1, 2, np.arange(8, dtype="<i2").tobytes())
    second = ExpertChoices(1, 2, np.arange(100, 116, dtype="<i2").tobytes()).last(3)
    calls = [
        ModelCall(None, [1, 2], [3, 4], [-0.5, -0.25], [0, 0], FinishReason.STOP, experts=first),
        ModelCall(0, [5], [6, 7], [-0.75, -1.5], [1, 1], FinishReason.STOP, experts=second),
    ]
    rollout = Rollout("g-0", "t", "e", 0, 0, calls=calls, ending=Scored(1.0))
    group = Group("g", Task("t", "e", ({"role": "user", "content": "?"},)), [rollout])
    write_groups(tmp_path / "batch.parquet", [(group, "trained")], {})
    ((stored, _),) = read_groups(tmp_path / "batch.parquet")
    assert stored.rollouts[0].calls == calls
    assert rollout_from_dict(rollout_dict(rollout)).calls == calls
    batch = pack([stored], lambda rewards: [[1.0]])
    expected = np.concatenate([np.arange(8), np.arange(110, 116)]).reshape(7, 1, 2)
    np.testing.assert_array_equal(batch.experts, expected)
    batch.save(tmp_path / "batch.npz")
    np.testing.assert_array_equal(Batch.load(tmp_path / "batch.npz").experts, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_that_can_be_carried_pass_the_trial(family, dtype):
    check_carried(Policy(tiny.model(family, scale=1.0), dtype=dtype))


def test_a_router_that_cannot_be_replayed_is_refused():
    model = tiny.model("qwen3 moe")
    router = model.model.layers[1].mlp.gate

    class ByThreshold(type(router)):
        """Chooses without a topk over all experts."""

        def forward(self, hidden):
            logits = nn.functional.linear(hidden, self.weight)
            picked = logits.argsort(-1, descending=True)[:, : self.top_k]
            return logits, logits.gather(-1, picked), picked

    router.__class__ = ByThreshold
    with pytest.raises(ModelError, match="ByThreshold can't be carried"):
        Policy(model, dtype=torch.float32)


def test_experts_of_another_kind_are_refused():
    model = tiny.model("qwen3 moe")
    model.model.layers[1].mlp.experts = nn.ModuleList([nn.Linear(32, 32)])
    with pytest.raises(ModelError, match=r"layers\.1\.mlp is a Qwen3MoeSparseMoeBlock"):
        Policy(model, dtype=torch.float32)


def test_experts_that_no_block_shows_are_refused():
    model = tiny.model("llama, tied")
    model.config.num_experts = 4
    with pytest.raises(ModelError, match="LlamaForCausalLM has experts in its configuration"):
        Policy(model, dtype=torch.float32)


def test_a_model_whose_cache_is_wrong_is_refused():
    model = tiny.model("qwen3 moe")
    attention = model.model.layers[0].self_attn

    class Forgetful(type(attention)):
        """Keeps nothing in its cache."""

        def forward(self, *arguments, **options):
            return super().forward(*arguments, **{**options, "cache": None, "past_key_values": None})

    attention.__class__ = Forgetful
    with pytest.raises(ModelError, match="can't be carried"):
        check_carried(Policy(model, dtype=torch.float32))


def test_a_copy_of_a_prepared_model_is_its_own():
    """What asks the pass must not lead back to the module that was copied."""
    policy = tiny.policy("qwen3 moe")
    twin = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(torch.tensor([PROMPT])).logits.any()
