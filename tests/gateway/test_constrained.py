"""Schemas that clients ask for, over a real sampler of random weights, which writes no JSON by itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tiny import make_model

from strop.gateway import Engine, Gateway
from strop.models.load import load_model
from strop.models.policy import Policy
from strop.rollouts import Rollout
from strop.runs.store import rollout_dict, rollout_from_dict
from strop.sampling.embedded import EmbeddedSampler
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

pytest.importorskip("llguidance")
ASK = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("pick", "drop")]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_model(str(make_model(tmp_path_factory.mktemp("model"))))


@pytest.fixture
async def place(loaded: Any) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    sampler = EmbeddedSampler(Policy(loaded.model), loaded.tokenizer, slots=4)
    engine = Engine(sampler, renderer_for(loaded.tokenizer, "some/folder"), loaded.tokenizer)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(Gateway(engine, "tiny")), base_url="http://gateway")
    yield engine, client
    await client.aclose()
    await sampler.close()


def texts(path: str, answer: dict[str, Any]) -> str:
    """What the reply says, in any API."""
    if path == "/v1/chat/completions":
        return str(answer["choices"][0]["message"]["content"])
    if path == "/v1/messages":
        return "".join(block["text"] for block in answer["content"])
    if path == "/v1/responses":
        return str(answer["output"][0]["content"][0]["text"])
    return str(answer["choices"][0]["text"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "response_format": FORMAT}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 99, "output_config": {"format": FORMAT["json_schema"]}}),
        ("/v1/responses", {"input": "Hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 99, "response_format": FORMAT}),
    ],
)
async def test_every_api_gives_what_the_schema_asks_for(place: Any, path: str, body: dict[str, Any]) -> None:
    engine, client = place
    if path == "/v1/messages":
        body["output_config"]["format"] = {"type": "json_schema", "schema": SCHEMA}
    attempt = engine.attempts.open(Rollout("g/0", "t", "e", 0, seed=1), engine.renderer)
    response = await client.post(
        path, json={"model": "tiny", **body}, headers={"authorization": f"Bearer {attempt.key}"}
    )
    assert response.status_code == 200, response.text
    assert json.loads(texts(path, response.json()))["size"] in ("small", "large")
    rollout = attempt.freeze()
    assert [call.constrained for call in rollout.calls] == [True]  # and it is kept
    assert rollout_from_dict(json.loads(json.dumps(rollout_dict(rollout)))).calls[0].constrained


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}])
async def test_a_forced_call_is_made_and_fits_its_tool(place: Any, choice: Any) -> None:
    _, client = place
    body = {"model": "tiny", "messages": ASK, "tools": TOOLS, "tool_choice": choice, "temperature": 2.0}
    answer = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls" and not answer["message"]["content"]
    assert call["function"]["name"] in (("pick", "drop") if choice == "required" else ("drop",))
    assert json.loads(call["function"]["arguments"])["size"] in ("small", "large")


async def test_in_training_it_has_to_be_meant(place: Any) -> None:
    engine, client = place
    params = SamplingParams(max_tokens=80)
    body = {"model": "tiny", "messages": ASK, "response_format": FORMAT}
    for number, allowed in enumerate((False, True)):
        attempt = engine.attempts.open(
            Rollout(f"g/{number}", "t", "e", 0, seed=1), engine.renderer, params=params, allow_constrained=allowed
        )
        headers = {"authorization": f"Bearer {attempt.key}"}
        response = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == (200 if allowed else 400)
        if not allowed:
            error = response.json()["error"]
            assert error["param"] == "response_format" and "allow_constrained_sampling" in error["message"]
        assert len(attempt.rollout.calls) == allowed


@pytest.mark.parametrize("schema", [{"type": "strange"}, {"not": {"type": "string"}}])
async def test_a_schema_that_cannot_be_kept_is_refused_by_name(place: Any, schema: dict[str, Any]) -> None:
    _, client = place
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    response = await client.post(
        "/v1/chat/completions", json={"model": "tiny", "messages": ASK, "response_format": form}
    )
    assert response.status_code == 400 and response.json()["error"]["param"] == "response_format"


async def test_without_the_library_it_is_refused_and_says_what_to_install(
    place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = place
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    body = {"model": "tiny", "messages": ASK, "response_format": FORMAT}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and "strop[constrained]" in response.json()["error"]["message"]
