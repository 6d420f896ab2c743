"""The sampler over a server: the server's own tokens where it gives them; else text, and only if that is enough."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from strop.errors import AttemptError, BatchError, StropError
from strop.gateway import Access, Engine, Gateway, running
from strop.rollouts import FailureKind, FinishReason
from strop.sampling.remote import RemoteSampler
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import Sampler, SamplingParams

Serve = Callable[..., Any]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves an ASGI application: its API's URL."""
    opened = []

    async def start(app: Any) -> str:
        context = running(app)
        opened.append(context)
        return f"{await context.__aenter__()}/v1"

    yield start
    for context in opened:
        await context.__aexit__(None, None, None)


class TextServer:
    """A server of the plain kind: text in, text out, nothing about tokens, and no parameter that it does not know."""

    KNOWN = frozenset({"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop"})

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.app = Starlette(routes=[Mount("/v1", routes=[Route("/completions", self.complete, methods=["POST"])])])

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if set(body) - self.KNOWN or not isinstance(body["prompt"], str):
            return JSONResponse({"error": {"message": "unknown parameter"}}, 400)
        if self.answers:
            status, answer = self.answers.pop(0)
            return JSONResponse(answer, status)
        return JSONResponse({"choices": [{"text": "Péar.", "finish_reason": "stop"}]})


async def test_tokens_of_a_server_that_gives_them_are_its_own(
    serve: Serve, scripted_sampler: Callable[..., Any]
) -> None:
    behind = scripted_sampler(lambda number, prompt: "Péar.<|im_end|>")
    tokenizer = behind.tokenizer
    engine = Engine(behind, renderer_for(tokenizer, "some/folder"), tokenizer)
    url = await serve(Gateway(engine, "tiny", Access(api_key="secret")))
    sampler = await RemoteSampler.open(url, "tiny", tokenizer, key="secret", max_context=64)
    assert isinstance(sampler, Sampler) and sampler.exact
    prompt = tokenizer.encode("Ask <|im_end|> ", add_special_tokens=False)
    params = SamplingParams(max_tokens=30, temperature=0.7, top_k=5, stop_token_ids=(2,), seed=2**62)
    sample = await sampler.sample(prompt, params)
    assert behind.prompts[-1] == prompt  # ids go there as they are
    assert sample.tokens == tokenizer.encode("Péar.<|im_end|>", add_special_tokens=False)
    assert sample.logprobs == [-0.5] * len(sample.tokens) and sample.finish_reason is FinishReason.STOP
    used = behind.params[-1]
    assert (used.temperature, used.top_k, used.max_tokens) == (0.7, 5, 30) and 2 in used.stop_token_ids
    cut = await sampler.sample(prompt, SamplingParams(max_tokens=3))
    assert cut.finish_reason is FinishReason.LENGTH and len(cut.tokens) == 3
    with pytest.raises(BatchError):
        await sampler.sample([1] * 64, params)
    await sampler.close()
    with pytest.raises(AttemptError):
        await sampler.sample(prompt, params)


async def test_a_server_without_ids_is_for_scores_alone(serve: Serve, chat_tokenizer: Any) -> None:
    server = TextServer()
    url = await serve(server.app)
    with pytest.raises(StropError, match="never trained on"):
        await RemoteSampler.open(url, "m", chat_tokenizer)
    sampler = await RemoteSampler.open(url, "m", chat_tokenizer, text_is_enough=True)
    assert not sampler.exact
    prompt = chat_tokenizer.encode("<|im_start|>user\nAsk<|im_end|>\n", add_special_tokens=False)
    sample = await sampler.sample(prompt, SamplingParams(max_tokens=9, temperature=0.0, stop_token_ids=(2,)))
    assert server.asked[-1]["prompt"] == "<|im_start|>user\nAsk<|im_end|>\n" and server.asked[-1]["stop"] == [
        "<|im_end|>"
    ]
    assert chat_tokenizer.decode(sample.tokens) == "Péar.<|im_end|>"
    assert all(math.isnan(logprob) for logprob in sample.logprobs)  # nobody knows them, so nothing can be trained
    await sampler.close()


async def test_a_busy_server_is_asked_again_and_a_broken_one_is_a_failure(serve: Serve, chat_tokenizer: Any) -> None:
    server = TextServer()
    sampler = await RemoteSampler.open(await serve(server.app), "m", chat_tokenizer, text_is_enough=True)
    server.answers = [(503, {}), (200, {"choices": [{"text": "Yes", "finish_reason": "length"}]})]
    sample = await sampler.sample([5, 6], SamplingParams(max_tokens=9))
    assert chat_tokenizer.decode(sample.tokens) == "Yes" and sample.finish_reason is FinishReason.LENGTH
    for answer in ((500, {}), (200, {"nothing": 1})):
        server.answers = [answer]
        with pytest.raises(AttemptError) as raised:
            await sampler.sample([5, 6], SamplingParams(max_tokens=9))
        assert raised.value.kind is FailureKind.SAMPLER
    server.answers = [(503, {})] * 5
    with pytest.raises(AttemptError) as late:
        await sampler.sample([5, 6], SamplingParams(max_tokens=9), deadline=time.monotonic() + 0.3)
    assert late.value.kind is FailureKind.TIMEOUT
    await sampler.close()


async def test_a_server_that_is_not_there_is_named(chat_tokenizer: Any) -> None:
    with pytest.raises(StropError, match=r"127\.0\.0\.1:9/v1"):
        await asyncio.wait_for(
            RemoteSampler.open("http://127.0.0.1:9/v1", "m", chat_tokenizer, text_is_enough=True), 60
        )
