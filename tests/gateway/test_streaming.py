"""Streams begin before the reply is complete, end as the reply that is not streamed, and stop with their client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.errors import AttemptError
from strop.gateway import Engine, Gateway, running
from strop.gateway.streaming import ReplyText
from strop.rollouts import FailureKind, FinishReason, Rollout
from strop.sampling.rendering import ChatMLRenderer, renderer_for
from strop.sampling.sampler import Sample, SamplingParams

CALL = '<tool_call>{"name": "lookup", "arguments": {"item": "pear"}}</tool_call>'
ASK = [{"role": "user", "content": "What is a pear?"}]
PIECES = ["Péar. ", "日本", "👩‍👧", "  \n", "<", "<tool", "_call>", "ST", "STOP", "�", CALL, "<tool_call>{]"]


class Tap:
    """Gives the tokens of a text, each when it is let go on."""

    version, max_context = 0, 8192

    def __init__(self, tokenizer: Any, text: str) -> None:
        self.tokens = tokenizer.encode(text, add_special_tokens=False)
        self.open = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()
        self.error: Exception | None = None

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        return await self.sample_streaming(prompt, params, lambda tokens: None, deadline=deadline)

    async def sample_streaming(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[list[int]], None],
        *,
        deadline: float | None = None,
    ) -> Sample:
        try:
            for token in self.tokens:
                await self.open.acquire()
                if self.error is not None:
                    raise self.error
                on_tokens([token])
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        count = len(self.tokens)
        return Sample(list(self.tokens), [-0.5] * count, [0] * count, FinishReason.STOP)

    def let(self, count: int = 10_000) -> None:
        for _ in range(count):
            self.open.release()

    async def close(self) -> None:
        return None


@pytest.fixture
async def serve(chat_tokenizer: Any) -> AsyncIterator[Callable[..., Any]]:
    """Serves a tap over a real socket: (tap, engine, client)."""
    opened = []

    async def start(text: str) -> tuple[Tap, Engine, httpx.AsyncClient]:
        tap = Tap(chat_tokenizer, text)
        engine = Engine(tap, renderer_for(chat_tokenizer, "some/folder"), chat_tokenizer, call_seconds=120)
        server = running(Gateway(engine, "tiny"))
        client = httpx.AsyncClient(base_url=await server.__aenter__(), timeout=120)
        opened.append((server, client))
        return tap, engine, client

    yield start
    for server, client in opened:
        await client.aclose()
        await server.__aexit__(None, None, None)


def said(data: dict[str, Any]) -> str:
    """The content that one event of any API adds."""
    if "choices" in data:
        choices = data["choices"] or [{}]
        return (choices[0].get("text") or choices[0].get("delta", {}).get("content")) or ""
    if data.get("type") == "response.output_text.delta":
        return str(data["delta"])
    delta = data.get("delta")
    return str(delta.get("text") or "") if isinstance(delta, dict) else ""


async def data_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


BODIES = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/messages": {"messages": ASK, "max_tokens": 90},
    "/v1/responses": {"input": "What is a pear?"},
    "/v1/completions": {"prompt": "A pear is", "max_tokens": 90},
}


@pytest.mark.parametrize("path", list(BODIES))
async def test_text_leaves_before_the_reply_is_complete(serve: Callable[..., Any], path: str) -> None:
    tap, engine, client = await serve("Péar!! A fruit.<|im_end|>")
    text, events = "", []
    tap.let(8)  # headers come with the first token
    async with client.stream("POST", path, json={"model": "tiny", "stream": True, **BODIES[path]}) as response:
        assert response.status_code == 200
        async for data in data_of(response):
            events.append(data)
            text += said(data)
            if text.rstrip() == "Péar!!":
                assert engine.in_flight == 1  # still being sampled
                tap.let()
    assert text == "Péar!! A fruit." and "�" not in text
    assert len([data for data in events if said(data)]) > 1


@pytest.mark.parametrize("path", list(BODIES))
async def test_sampling_ends_when_the_client_goes_away(serve: Callable[..., Any], path: str) -> None:
    tap, engine, client = await serve("A pear is a fruit.<|im_end|>")
    tap.let(9)
    async with client.stream("POST", path, json={"model": "tiny", "stream": True, **BODIES[path]}) as response:
        async for data in data_of(response):
            if said(data):
                break
    await asyncio.wait_for(tap.cancelled.wait(), 60)
    assert engine.in_flight == 0


@pytest.mark.parametrize("path", list(BODIES))
async def test_a_failure_after_the_first_token_is_an_event(serve: Callable[..., Any], path: str) -> None:
    tap, _, client = await serve("A pear is a fruit.<|im_end|>")
    tap.let(9)
    async with client.stream("POST", path, json={"model": "tiny", "stream": True, **BODIES[path]}) as response:
        events = []
        async for data in data_of(response):
            events.append(data)
            if said(data):
                tap.error = AttemptError(FailureKind.SAMPLER, "it burnt down")
                tap.let()
    assert "burnt down" in events[-1]["error"]["message"]


async def test_a_failure_before_it_is_a_status(serve: Callable[..., Any]) -> None:
    tap, _, client = await serve("A pear.<|im_end|>")
    tap.error = AttemptError(FailureKind.SAMPLER, "it burnt down")
    tap.let()
    response = await client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, "stream": True})
    assert response.status_code == 503 and response.headers["x-should-retry"] == "false"


async def test_a_tool_call_comes_whole_and_is_recorded_as_sampled(serve: Callable[..., Any]) -> None:
    tap, engine, client = await serve(" Wait. \n" + CALL + "<|im_end|>")
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
    attempt = engine.attempts.open(Rollout("g/0", "t", "e", 0, seed=1), engine.renderer)
    client.headers["authorization"] = f"Bearer {attempt.key}"
    tap.let()
    body = {"model": "tiny", "messages": ASK, "tools": [tool], "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = [chunk async for chunk in data_of(response)]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == " Wait."
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads(call["function"]["arguments"]) == {"item": "pear"}
    # What the client was told comes back, and the sampled tokens are extended.
    reply = {"role": "assistant", "content": " Wait.", "tool_calls": [{k: call[k] for k in ("id", "type", "function")}]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    tap.let()
    await client.post("/v1/chat/completions", json={**body, "messages": [*ASK, reply, result]})
    rollout = attempt.freeze()
    assert [made.parent for made in rollout.calls] == [None, 0] and rollout.forks == 0
    assert rollout.calls[0].tokens == tap.tokens


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(PIECES), max_size=8), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_what_is_told_early_is_how_the_reply_begins(chat_tokenizer: Any, parts: list[str], sizes: list[int]) -> None:
    """Whatever comes, in whatever pieces: nothing is told that the complete reply does not say at that place."""
    renderer = ChatMLRenderer(chat_tokenizer)
    tokens = chat_tokenizer.encode("".join(parts) + "<|im_end|>", add_special_tokens=False)
    told: list[str] = []
    reply = ReplyText(
        chat_tokenizer.backend_tokenizer.decode,
        renderer.get_stop_token_ids(),
        ("<tool_call>", "STOP"),
        True,
        told.append,
    )
    at = 0
    while at < len(tokens):
        size = sizes[at % len(sizes)]
        reply.add(tokens[at : at + size])
        at += size
    content = renderer.parse_response(tokens).content.split("STOP")[0]
    message = {"role": "assistant", "content": content}
    early = "".join(told)
    reply.finish(message)
    assert message["content"].startswith(early) and message["content"].strip() == content.strip()
    assert "<tool_call>" not in early and "STOP" not in early and not any(piece == "" for piece in told)
    plain = "".join(parts)
    if not any(mark in plain for mark in ("<", "ST", "�")):  # nothing could be held back but the last white space
        assert early == plain.rstrip()
