"""Sampling within a grammar: what comes out fits, its log-probabilities are the restricted distribution's, and whoever
did not ask for one is sampled as before.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_model, make_tokenizer

from strop.errors import StropError
from strop.models.load import load_model
from strop.models.policy import Policy
from strop.rollouts import FinishReason
from strop.sampling.constraints import Constraints
from strop.sampling.embedded import EmbeddedSampler
from strop.sampling.grammars import call_rules, grammar
from strop.sampling.sampler import ConstrainedSampler, SamplingParams, StreamingSampler

pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}
PROMPT = [5, 9, 3, 14, 2, 8]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(str(make_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
async def sampler(loaded: Any) -> AsyncIterator[EmbeddedSampler]:
    made = EmbeddedSampler(Policy(loaded.model), loaded.tokenizer, slots=8, max_context=256)
    yield made
    await made.close()


def follows(rule: str, text: str) -> bool:
    """Whether a grammar takes a text, whole, and then nothing but its end."""
    tokenizer = make_tokenizer()
    constraint, complete = Constraints(tokenizer).begin(rule), False
    for token in tokenizer.encode(text, add_special_tokens=False):
        if complete or not constraint.allowed(len(tokenizer))[token]:
            return False
        complete = constraint.take(token)
    return complete or bool(constraint.allowed(len(tokenizer))[tokenizer.eos_token_id])


async def test_whatever_is_sampled_fits_the_schema(sampler: EmbeddedSampler, loaded: Any) -> None:
    """A model of random weights writes nothing like JSON by itself."""
    rule = grammar(answer=SCHEMA)
    params = [SamplingParams(max_tokens=120, temperature=2.0, seed=seed, grammar=rule) for seed in range(24)]
    samples = await asyncio.gather(*(sampler.sample(PROMPT, each) for each in params))
    texts = [loaded.tokenizer.decode(sample.tokens, skip_special_tokens=True) for sample in samples]
    found = [json.loads(text) for text in texts]
    assert all(set(each) == {"size", "ok"} and each["size"] in ("small", "large") for each in found)
    assert all(sample.finish_reason is FinishReason.STOP for sample in samples)
    assert {(each["size"], each["ok"]) for each in found} == {
        (size, ok) for size in ("small", "large") for ok in (True, False)
    }


async def test_log_probabilities_are_those_of_the_restricted_distribution(
    sampler: EmbeddedSampler, loaded: Any
) -> None:
    rule, temperature = grammar(answer=SCHEMA), 1.3
    sample = await sampler.sample(PROMPT, SamplingParams(max_tokens=120, temperature=temperature, seed=3, grammar=rule))
    with torch.no_grad():
        logits = loaded.model(torch.tensor([[*PROMPT, *sample.tokens]])).logits[0].double().numpy() / temperature
    constraint, width = Constraints(loaded.tokenizer).begin(rule), logits.shape[1]
    forced = 0
    for at, token in enumerate(sample.tokens):
        allowed = constraint.allowed(width).numpy()
        row = logits[len(PROMPT) - 1 + at][allowed]
        total = np.log(np.exp(row - row.max()).sum()) + row.max()
        expected = logits[len(PROMPT) - 1 + at][token] - total
        assert sample.logprobs[at] == pytest.approx(expected, abs=2e-3)
        forced += allowed.sum() == 1 and abs(sample.logprobs[at]) < 1e-9
        constraint.take(token)
    assert forced > 10  # most of this JSON leaves no choice, and a token without a choice has probability 1


async def test_a_neighbour_without_a_grammar_is_sampled_as_alone(sampler: EmbeddedSampler) -> None:
    free = SamplingParams(max_tokens=20, seed=11)
    alone = await sampler.sample(PROMPT, free)
    bound = SamplingParams(max_tokens=60, seed=12, grammar=grammar(answer=SCHEMA))
    beside, _ = await asyncio.gather(sampler.sample(PROMPT, free), sampler.sample(PROMPT, bound))
    assert (alone.tokens, alone.logprobs) == (beside.tokens, beside.logprobs)


async def test_tokens_are_told_as_they_are_sampled(sampler: EmbeddedSampler) -> None:
    assert isinstance(sampler, StreamingSampler) and isinstance(sampler, ConstrainedSampler)
    params, told = SamplingParams(max_tokens=30, seed=5), []
    whole = await sampler.sample(PROMPT, params)
    streamed = await sampler.sample_streaming(PROMPT, params, told.append)
    assert streamed.tokens == whole.tokens and len(told) > 1
    assert [token for tokens in told for token in tokens] == whole.tokens


async def test_a_cancelled_stream_tells_nothing_more(sampler: EmbeddedSampler) -> None:
    told: list[list[int]] = []
    begun = asyncio.Event()

    def hear(tokens: list[int]) -> None:
        told.append(tokens)
        begun.set()

    params = SamplingParams(max_tokens=200, seed=5)
    running = asyncio.create_task(sampler.sample_streaming(PROMPT, params, hear))
    await begun.wait()
    running.cancel()
    await asyncio.wait([running])
    heard = len(told)
    await sampler.sample(PROMPT, SamplingParams(max_tokens=10, seed=6))
    assert running.cancelled() and len(told) == heard < 200


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ('{"size": "small", "ok": true}', True),
        ('<tool_call>{"name": "pick", "arguments": {"size": "large", "ok": false}}</tool_call>', True),
        ('{"size": "medium", "ok": true}', False),
        ('{"size": "small", "ok": true, "more": 1}', False),
        ('<tool_call>{"name": "pack", "arguments": {}}</tool_call>', False),
        ('{"size": "small",\n\n\n"ok": true}', False),  # white space without end is no way to go on
        ("small", False),
    ],
)
def test_an_answer_or_a_call(text: str, fits: bool) -> None:
    calls = list(call_rules([TOOL], "<tool_call>", "</tool_call>"))
    assert follows(grammar(answer=SCHEMA, calls=calls), text) is fits


def test_one_call_or_several() -> None:
    calls = list(call_rules([TOOL], "<tool_call>", "</tool_call>"))
    call = '<tool_call>{"name": "pick", "arguments": {"size": "large", "ok": false}}</tool_call>'
    assert follows(grammar(calls=calls), f"{call}\n{call}")
    assert not follows(grammar(calls=calls, several=False), f"{call}\n{call}")


@pytest.mark.parametrize("schema", [{"type": "strange"}, {"not": {"type": "string"}}, {"$ref": "#/nowhere"}])
async def test_a_schema_that_cannot_be_kept_is_refused(sampler: EmbeddedSampler, schema: dict[str, Any]) -> None:
    with pytest.raises(StropError):
        await sampler.check_grammar(grammar(answer=schema))
