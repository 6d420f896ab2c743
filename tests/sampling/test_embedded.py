"""The embedded sampler passes the suite, on fused decoders and on any other model, and keeps its own promises:
batch invariance, prefixes shared within a group, and a typed failure when its thread dies.
"""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampler_conformance import PROMPT, SamplerConformance, same

from strop import kernels
from strop.costs.ledger import Ledger
from strop.errors import AttemptError, ConfigError
from strop.models.policy import Policy
from strop.rollouts import FailureKind, FinishReason
from strop.sampling.embedded import EmbeddedSampler
from strop.sampling.sampler import SamplingParams

SIZES = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=301, n_embd=48, n_layer=2, n_head=4, n_positions=2048, initializer_range=0.2
    ),
}


class EmbeddedBench:
    """A small random model. The reference is the HF module's own forward, in fp32."""

    vocab, bitwise = 301, True

    def __init__(self, family: str, dtype: torch.dtype, in_c: bool = True) -> None:
        self.in_c = in_c
        torch.manual_seed(7)
        self.model = transformers.AutoModelForCausalLM.from_config(MODELS[family]())
        for name, parameter in self.model.named_parameters():
            if "bias" in name or "norm" in name:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
        self.policy = Policy(self.model, dtype=dtype)
        self.reuses_prefixes = self.policy.decoder is not None
        self.tolerance = 1e-4 if dtype == torch.float32 else 0.25

    def make(self, *, max_context: int = 64, queue_limit: int = 4096, slots: int = 4, **more) -> EmbeddedSampler:
        with patch.object(kernels, "LIBRARY", kernels.LIBRARY if self.in_c else Path("nowhere")):
            return EmbeddedSampler(
                self.policy, None, max_context=max_context, queue_limit=queue_limit, slots=slots, **more
            )

    def reference(self, tokens, temperature):
        model = transformers.AutoModelForCausalLM.from_config(self.model.config).eval()
        model.load_state_dict({name: tensor.float() for name, tensor in self.model.state_dict().items()})
        with torch.no_grad():
            logits = model(torch.tensor([list(tokens)])).logits[0].double() / temperature
        return logits.log_softmax(-1).numpy()

    def update(self) -> int:
        def write() -> None:
            for weight in self.policy.weights:
                weight.tensor.mul_(1.03)

        return self.policy.publish(write)


@pytest.fixture(params=["llama", "qwen3", "gpt2"])
def bench(request):
    return EmbeddedBench(request.param, torch.float32)


class TestEmbedded(SamplerConformance):
    """The suite, in fp32."""


class TestEmbeddedInBfloat16(SamplerConformance):
    """The suite, in bf16."""

    @pytest.fixture
    def bench(self):
        return EmbeddedBench("qwen2", torch.bfloat16)


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110 - the sampler's thread has no event to give
        await asyncio.sleep(0.001)


# -- batch invariance -----------------------------------------------------------------------------------------------


@st.composite
def schedules(draw):
    """Requests of several groups with shared prefixes and later turns, their order, and a sampler to put them to."""
    groups = draw(st.integers(1, 3))
    system = draw(st.lists(st.integers(0, 300), max_size=70))
    prompts = [system + draw(st.lists(st.integers(0, 300), min_size=1, max_size=30)) for _ in range(groups)]
    requests = [
        (number % groups, draw(st.integers(1, 12)), draw(st.integers(1, 8)))
        for number in range(draw(st.integers(1, 9)))
    ]
    return prompts, requests, draw(st.integers(1, 5)), draw(st.integers(0, 3)), draw(st.integers(0, 2**32))


async def converse(sampler, prompt, seed, lengths, wait=None):
    """Two turns with something said between them."""
    samples = []
    for turn, length in enumerate(lengths):
        if wait:
            await wait()
        params = SamplingParams(max_tokens=length, seed=seed * 10 + turn, temperature=0.9)
        samples.append(await sampler.sample(prompt, params))
        prompt = [*prompt, *samples[-1].tokens, seed % 300, 7]
    return samples


#: A sampler with a single slot for each model of `INVARIANT`.
LONE: dict[str, EmbeddedSampler] = {}
INVARIANT = {
    f"{family} {str(dtype)[6:]}{'' if in_c else ' through PyTorch'}": EmbeddedBench(family, dtype, in_c)
    for family, dtype, in_c in [
        ("llama", torch.bfloat16, True),
        ("llama", torch.bfloat16, False),
        ("qwen3", torch.float32, True),
        ("qwen2", torch.float32, False),
        ("gpt2", torch.float32, True),
    ]
}


@pytest.mark.parametrize("model", INVARIANT)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedules())
def test_any_schedule_gives_what_each_request_gets_alone(model, schedule):
    bench = INVARIANT[model]
    prompts, requests, slots, parked, shuffle = schedule

    lone = LONE.setdefault(model, bench.make(max_context=160, slots=1, parked=0))

    async def alone(number, group, *lengths):
        bench.policy.publish(lambda: None, allow_unchanged=True)  # nothing is reused from the one before
        return await converse(lone, prompts[group], number, lengths)

    async def together():
        rng = random.Random(shuffle)
        sampler = bench.make(max_context=160, slots=slots, parked=parked)

        async def wait():
            await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004)))

        jobs = [converse(sampler, prompts[g], n, lengths, wait) for n, (g, *lengths) in enumerate(requests)]
        nuisance = asyncio.ensure_future(sampler.sample(prompts[0], SamplingParams(max_tokens=40, temperature=0.0)))
        turns = await asyncio.gather(*jobs)
        nuisance.cancel()
        await asyncio.gather(nuisance, return_exceptions=True)
        await sampler.close()
        return turns

    expected = [asyncio.run(alone(number, *request)) for number, request in enumerate(requests)]
    for one, other in zip(expected, asyncio.run(together()), strict=True):
        assert all(a.tokens == b.tokens and a.logprobs == b.logprobs for a, b in zip(one, other, strict=True))


async def test_packing_the_weights_changes_no_bit():
    bench = EmbeddedBench("llama", torch.bfloat16)
    samples = []
    for packed in (False, True):
        sampler = bench.make(packed=packed)
        params = [SamplingParams(max_tokens=20, seed=seed) for seed in range(6)]
        samples.append(await asyncio.gather(*(sampler.sample(PROMPT, each) for each in params)))
        await sampler.close()
    assert all(same(bench, one, other) for one, other in zip(*samples, strict=True))


# -- prefixes -------------------------------------------------------------------------------------------------------


async def test_a_group_is_prefilled_once():
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make(slots=8)
    prompt = list(range(40))
    params = [SamplingParams(max_tokens=2, seed=seed) for seed in range(8)]
    samples = await asyncio.gather(*(sampler.sample(prompt, each) for each in params))
    assert sorted(sample.cached for sample in samples) == [0] + [39] * 7
    assert sampler.statistics().prefilled == 40 + 7
    await sampler.close()


async def test_the_row_that_a_group_waits_for_may_be_lost():
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make(slots=4, max_context=1600)
    prompt = [number % 300 for number in range(1500)]  # longer than one step's prefill
    params = SamplingParams(max_tokens=2, seed=1)
    first, *others = [asyncio.ensure_future(sampler.sample(prompt, params)) for _ in range(4)]
    await until(lambda: sampler.statistics().prefilled)
    first.cancel()
    samples = await asyncio.gather(*others)
    assert len({(tuple(sample.tokens), tuple(sample.logprobs)) for sample in samples}) == 1
    assert sampler.statistics().prefilled < 3 * 1500
    await sampler.close()


async def test_the_conversation_longest_unused_gives_way():
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make(slots=1, parked=1)
    turn = SamplingParams(max_tokens=3, seed=1)
    histories = []
    for first in (10, 20, 30):
        prompt = [first, first + 1, first + 2]
        histories.append([*prompt, *(await sampler.sample(prompt, turn)).tokens, 1])
    cached = [(await sampler.sample(history, turn)).cached for history in reversed(histories)]
    assert cached == [5, 5, 0]
    await sampler.close()


async def test_more_conversations_than_rows_compute_no_token_twice():
    """A next turn goes before conversations that have not begun, whose rows would cost it its own."""
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make(slots=2, parked=2)

    async def converse(number: int) -> int:
        """Three turns; gives how many tokens had to be computed for them."""
        history, new = [number] * 5, 5
        for turn in range(3):
            sample = await sampler.sample(history, SamplingParams(max_tokens=3, seed=turn))
            history = [*history, *sample.tokens, 1, 2]
        return new + 2 * (1 + 2)  # a turn's last sampled token is never fed back

    needed = await asyncio.gather(*(converse(number) for number in range(3, 27)))
    assert sampler.statistics().prefilled == sum(needed)
    await sampler.close()


# -- stop strings ---------------------------------------------------------------------------------------------------


class Letters:
    """Token n is the letter n; a character outside ASCII takes two tokens, as in byte-level vocabularies."""

    def decode(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


async def test_a_stop_string_ends_at_its_last_token():
    bench = EmbeddedBench("llama", torch.float32)
    sampler = EmbeddedSampler(bench.policy, Letters(), max_context=64, slots=2)
    params = SamplingParams(max_tokens=30, seed=4)
    free = await sampler.sample(PROMPT, params)
    text = Letters().decode(free.tokens)
    stop = text[9:12]
    stopped = await sampler.sample(PROMPT, SamplingParams(max_tokens=30, seed=4, stop=("zzzzzz", stop)))
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.tokens == free.tokens[: text.index(stop) + 3]
    await sampler.close()
    with pytest.raises(ConfigError, match="tokenizer"):
        await bench.make().sample(PROMPT, SamplingParams(max_tokens=3, stop=("a",)))


# -- trouble --------------------------------------------------------------------------------------------------------


async def test_when_the_thread_dies_every_caller_hears_why(monkeypatch):
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make(slots=2, queue_limit=3)
    steps = 0
    compute = sampler._engine.step

    def step():
        nonlocal steps
        steps += 1
        if steps == 3:
            raise MemoryError("no room for the scores")
        return compute()

    monkeypatch.setattr(sampler._engine, "step", step)
    flights = [sampler.sample(PROMPT, SamplingParams(max_tokens=20, seed=seed)) for seed in range(9)]
    ends = await asyncio.wait_for(asyncio.gather(*flights, return_exceptions=True), 30)
    assert all(isinstance(end, AttemptError) and end.kind is FailureKind.SAMPLER for end in ends)
    assert all("no room for the scores" in str(end) for end in ends)
    assert isinstance(ends[0].__cause__, MemoryError)
    await sampler.close()


async def test_a_broken_write_of_the_weights_ends_sampling():
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make()

    def write():
        raise OSError("the disk is gone")

    with pytest.raises(OSError):
        bench.policy.publish(write)
    with pytest.raises(AttemptError, match="broke off"):
        await sampler.sample(PROMPT, SamplingParams(max_tokens=1))
    await sampler.close()


async def test_the_event_loop_is_called_once_a_step(monkeypatch):
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make(slots=16)
    loop, calls = asyncio.get_running_loop(), 0
    schedule = loop.call_soon_threadsafe

    def counted(*arguments, **more):
        nonlocal calls
        calls += threading.current_thread().name == "strop-sampler"
        return schedule(*arguments, **more)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    params = [SamplingParams(max_tokens=20, seed=seed) for seed in range(16)]
    await asyncio.gather(*(sampler.sample(PROMPT, each) for each in params))
    assert calls <= 4  # joining, and all sixteen at the end
    await sampler.close()


def test_a_sampler_serves_one_event_loop_after_another():
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make()
    params = SamplingParams(max_tokens=4, seed=1)
    first, second = (asyncio.run(sampler.sample(PROMPT, params)) for _ in range(2))
    assert same(bench, first, second)
    asyncio.run(sampler.close())


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("slots", {"slots": 0}),
        ("queue_limit", {"queue_limit": 0}),
        ("parked", {"parked": -1}),
        ("max_context", {"max_context": 1}),
        ("max_context", {"max_context": 4096}),
    ],
)
def test_settings_out_of_range_are_refused(key, settings):
    with pytest.raises(ConfigError, match=f"sampler.{key}"):
        EmbeddedBench("llama", torch.float32).make(**settings)


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.5}]
)
async def test_parameters_out_of_range_are_refused(wrong):
    sampler = EmbeddedBench("llama", torch.float32).make()
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        await sampler.sample(PROMPT, SamplingParams(**{"max_tokens": 1, **wrong}))


async def test_statistics_and_ledger_count_every_token():
    bench = EmbeddedBench("llama", torch.float32)
    ledger = Ledger(phase="rl")
    sampler = bench.make(slots=4, ledger=ledger)
    params = [SamplingParams(max_tokens=5, seed=seed) for seed in range(6)]
    samples = await asyncio.gather(*(sampler.sample(PROMPT, each) for each in params))
    done = sampler.statistics()
    assert done.sampled == 30 and done.finished == 6 and done.active == done.queued == 0
    assert done.cached == sum(sample.cached for sample in samples)
    assert done.prefilled + done.cached == 6 * len(PROMPT)
    assert done.busy_seconds > 0
    tokens = ledger.snapshot()["tokens"]["rl"]
    assert (tokens["prompt"], tokens["cached"], tokens["sampled"]) == (done.prefilled, done.cached, 30)
    assert ledger.snapshot()["accounts"]["rl"]["sampler"] > 0
    await sampler.close()


async def test_what_is_waited_for_is_told():
    bench = EmbeddedBench("llama", torch.float32)
    sampler = bench.make(slots=1)
    assert sampler.waiting() == []
    flights = [asyncio.ensure_future(sampler.sample(PROMPT, SamplingParams(max_tokens=58))) for _ in range(3)]
    await until(lambda: sampler.statistics().active)
    waits = sampler.waiting()
    assert [since for _, since in waits] == sorted(since for _, since in waits)
    assert sum("waits for a slot" in what for what, _ in waits) == 2
    await asyncio.gather(*flights)
    await sampler.close()


async def test_memory_of_masked_positions_is_harmless():
    """A row whose last sequence left garbage behind gives what a fresh one gives."""
    bench = EmbeddedBench("llama", torch.bfloat16)
    sampler = bench.make(slots=1, parked=0)
    params = SamplingParams(max_tokens=6, seed=3)
    first = await sampler.sample(PROMPT, params)
    for layer in (*sampler._engine.cache.keys, *sampler._engine.cache.values):
        layer.fill_(float(np.finfo(np.float32).max) / 1e4)
    sampler._engine.rows.weights_changed()
    assert same(bench, first, await sampler.sample(PROMPT, params))
    await sampler.close()
