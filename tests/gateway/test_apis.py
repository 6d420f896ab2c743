"""Each API in its own form: bodies, events, errors, keys, the admin scope."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from strop.errors import AttemptError, StropError
from strop.gateway import Gateway
from strop.rollouts import FailureKind
from strop.sampling.sampler import SamplingParams

Make = Callable[..., Any]
END = "<|im_end|>"
ASK = [{"role": "user", "content": "What is a pear?"}]
TOOL = {"name": "lookup", "description": "Look up.", "parameters": {"type": "object", "properties": {}}}
ADMIN = {"authorization": "Bearer admin-key"}
CALL = '<tool_call>{"name": "lookup", "arguments": {"item": "pear"}}</tool_call>'


def events(text: str) -> list[tuple[str | None, Any]]:
    """Server-sent events: (name, data)."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines["data"]
        found.append((lines.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


async def test_chat_gives_log_probabilities_ids_and_usage(make_place: Make) -> None:
    place = make_place(["Péar." + END])
    body = {"model": "tiny", "messages": ASK, "logprobs": True, "return_token_ids": True, "max_tokens": 30}
    answer = await place.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    ids = place.sampler.tokenizer.encode("Péar." + END, add_special_tokens=False)
    assert (choice["token_ids"], answer["prompt_token_ids"]) == (ids, place.sampler.prompts[0])
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "Péar." + END
    assert {entry["logprob"] for entry in entries} == {-0.5}
    assert answer["usage"]["prompt_tokens"] == len(place.sampler.prompts[0])
    assert answer["usage"]["completion_tokens"] == len(ids) and answer["weight_version"] == 0
    assert choice["message"] == {"role": "assistant", "content": "Péar.", "refusal": None}


async def test_chat_streams_chunks_that_add_up_to_the_reply(make_place: Make) -> None:
    place = make_place(["Wait." + CALL + END] * 2)
    body = {"model": "tiny", "messages": ASK, "tools": [{"type": "function", "function": TOOL}], "seed": 1}
    whole = (await place.post("/v1/chat/completions", body))["choices"][0]
    response = await place.client.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, (_, done) = events(response.text)
    assert done == "[DONE]" and chunks[-1][1]["choices"] == [] and chunks[-1][1]["usage"]["completion_tokens"] > 0
    deltas = [chunk["choices"][0]["delta"] for _, chunk in chunks[:-1]]
    assert deltas[0]["role"] == "assistant" and "".join(delta.get("content") or "" for delta in deltas) == "Wait."
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert call["function"] == whole["message"]["tool_calls"][0]["function"] and call["index"] == 0
    assert chunks[-2][1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_responses_send_the_events_that_their_clients_rely_on(make_place: Make) -> None:
    place = make_place(["Wait." + CALL + END])
    body = {"model": "tiny", "input": "What is a pear?", "tools": [{"type": "function", **TOOL}], "stream": True}
    response = await place.client.post("/v1/responses", json=body)
    found = events(response.text)
    assert [name for name, _ in found] == [data["type"] for _, data in found]
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert [name for name, _ in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    message, call = found[-1][1]["response"]["output"]
    assert message["content"][0]["text"] == "Wait."
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "lookup", {"item": "pear"})


async def test_responses_extend_by_items_and_by_the_id_of_the_response_before(make_place: Make) -> None:
    place = make_place(["Wait." + CALL + END, "Three." + END, "Four." + END])
    attempt = place.open()
    body = {"model": "tiny", "instructions": "Be brief.", "tools": [{"type": "function", **TOOL}]}
    body["return_token_ids"] = True
    first = await place.post("/v1/responses", {**body, "input": [{"role": "user", "content": "What is a pear?"}]})
    call = first["output"][-1]
    assert call["generation_token_ids"] == attempt.rollout.calls[0].tokens
    assert call["prompt_token_ids"] == place.sampler.prompts[0] and set(call["generation_log_probs"]) == {-0.5}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "What is a pear?"}]}, *first["output"], result]
    second = await place.post("/v1/responses", {**body, "input": items})
    more = {**body, "input": "And four?", "previous_response_id": second["id"]}
    third = await place.post("/v1/responses", more)
    assert third["output"][0]["content"][0]["text"] == "Four."
    assert [call.parent for call in attempt.rollout.calls] == [None, 0, 1] and attempt.rollout.forks == 0
    place.open("group/1")  # another attempt can't go on from it
    refused = await place.client.post("/v1/responses", json=more)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_a_cut_off_response_is_incomplete(make_place: Make) -> None:
    place = make_place(["So I think"])
    answer = await place.post("/v1/responses", {"model": "tiny", "input": "Hi", "max_output_tokens": 5})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_anthropic_messages_extend_and_stream(make_place: Make) -> None:
    place = make_place(["Wait." + CALL + END, "Three." + END])
    attempt = place.open()
    place.client.headers["x-api-key"] = attempt.key
    del place.client.headers["authorization"]
    tool = {"name": "lookup", "description": "Look up.", "input_schema": TOOL["parameters"]}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    body = {"model": "tiny", "max_tokens": 90, "system": system, "tools": [tool]}
    first = await place.post("/v1/messages", {**body, "messages": ASK})
    assert first["stop_reason"] == "tool_use"
    text, use = first["content"]
    assert text == {"type": "text", "text": "Wait."} and use["input"] == {"item": "pear"}
    counted = await place.post("/v1/messages/count_tokens", {**body, "messages": ASK})
    assert counted["input_tokens"] == len(place.sampler.prompts[0])
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "3"}]}
    said = [*ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    response = await place.client.post("/v1/messages", json={**body, "messages": said, "stream": True})
    found = events(response.text)
    assert [name for name, _ in found] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert found[2][1]["delta"] == {"type": "text_delta", "text": "Three."}
    assert found[4][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert [call.parent for call in attempt.rollout.calls] == [None, 0]


async def test_anthropic_errors_have_anthropics_form(make_place: Make) -> None:
    place = make_place([], api_key="right")
    response = await place.client.post("/v1/messages", json={}, headers={"x-api-key": "wrong"})
    assert response.status_code == 401 and response.json()["error"]["type"] == "authentication_error"
    right = {"x-api-key": "right"}
    response = await place.client.post("/v1/messages", json={"model": "tiny", "messages": ASK}, headers=right)
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert "max_tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lookup"}}])
async def test_a_call_can_be_required(make_place: Make, choice: Any) -> None:
    head = "<tool_call>" if choice == "required" else '<tool_call>{"name": "lookup", "arguments": '
    place = make_place([CALL.removeprefix(head) + END, "Three." + END])
    attempt = place.open()
    tools = [{"type": "function", "function": TOOL}]
    answer = await place.chat(ASK, tools=tools, tool_choice=choice)
    assert json.loads(answer["message"]["tool_calls"][0]["function"]["arguments"]) == {"item": "pear"}
    one = attempt.rollout.calls[0]
    decode = place.sampler.tokenizer.decode
    assert decode(one.prompt).endswith("assistant\n" + head) and decode(one.tokens) == CALL.removeprefix(head) + END
    result = {"role": "tool", "tool_call_id": answer["message"]["tool_calls"][0]["id"], "content": "3"}
    await place.chat([*ASK, answer["message"], result], tools=tools)
    assert attempt.rollout.calls[1].parent == 0


async def test_no_call_and_one_call(make_place: Make) -> None:
    place = make_place([CALL + END, CALL + CALL + END, "<tool_call>{nope</tool_call>" + END])
    tools = [{"type": "function", "function": TOOL}]
    none = await place.chat(ASK, tools=tools, tool_choice="none")
    assert "tool_calls" not in none["message"] and "lookup" in none["message"]["content"]
    one = await place.chat(ASK, tools=tools, parallel_tool_calls=False)
    assert len(one["message"]["tool_calls"]) == 1
    broken = await place.chat(ASK, tools=tools)
    assert broken["message"]["content"] == "<tool_call>{nope</tool_call>" and broken["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"no_such_thing": 1}, "no_such_thing"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [*ASK, {"role": "assistant", "content": "So"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"model": "gpt-9"}, "model"),
    ],
)
async def test_what_can_not_be_done_is_refused_by_name(make_place: Make, change: dict[str, Any], names: str) -> None:
    place = make_place([])
    response = await place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK, **change})
    error = response.json()["error"]
    assert response.status_code in (400, 404) and error["param"] == names and names.split("[")[0] in error["message"]
    assert place.sampler.prompts == []


async def test_a_prompt_that_does_not_fit_is_said_as_clients_know_it(make_place: Make) -> None:
    place = make_place([])
    place.sampler.max_context = 50
    response = await place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_broken_sampler_is_not_tried_again(make_place: Make) -> None:
    place = make_place([])

    async def broken(*_: Any, **__: Any) -> Any:
        raise AttemptError(FailureKind.SAMPLER, "it broke")

    place.sampler.sample = broken
    attempt = place.open()
    response = await place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": ASK})
    assert (response.status_code, response.headers["x-should-retry"]) == (503, "false")
    assert attempt.failure is not None and attempt.failure.kind is FailureKind.SAMPLER and attempt.failed.is_set()


async def test_tokenize_and_models(make_place: Make) -> None:
    place = make_place([])
    tokens = (await place.post("/tokenize", {"model": "tiny", "prompt": "héy", "add_special_tokens": False}))["tokens"]
    assert tokens == place.sampler.tokenizer.encode("héy", add_special_tokens=False)
    assert (await place.post("/detokenize", {"tokens": tokens}))["prompt"] == "héy"
    chat = await place.post("/tokenize", {"messages": ASK})
    assert chat["tokens"] == place.engine.renderer.render_ids(ASK, add_generation_prompt=True)
    assert chat["max_model_len"] == place.sampler.max_context and chat["count"] == len(chat["tokens"])
    models = (await place.client.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == ["tiny"]
    assert (await place.client.get("/v1/models/tiny")).json()["id"] == "tiny"
    with pytest.raises(StropError, match="slash"):
        Gateway(place.engine, "org/tiny")


class TestWhoACallBelongsTo:
    """By its key, the URL, our header, a known client's header; never by guessing."""

    async def test_in_this_order(self, make_place: Make) -> None:
        place = make_place(lambda number, prompt: "yes" + END, api_key="client")
        keyed = place.open("by/key")
        place.open("by/url")
        place.open("by/header")
        place.open("by/session", sessions=("session-1",))
        client = {"authorization": "Bearer client"}
        body = {"model": "tiny", "messages": ASK}
        for path, headers in (
            ("/v1/chat/completions", {"authorization": f"Bearer {keyed.key}", "x-session-id": "session-1"}),
            ("/attempts/by/url/v1/chat/completions", {**client, "x-strop-attempt": "by/header"}),
            ("/v1/chat/completions", {**client, "x-strop-attempt": "by/header", "x-session-id": "session-1"}),
            ("/v1/chat/completions", {**client, "x-session-id": "session-1"}),
            ("/v1/chat/completions", {**client, "x-session-id": "session-unknown"}),
        ):
            await place.post(path, body, headers=headers)
        assert {attempt.id: len(attempt.rollout.calls) for attempt in place.engine.attempts} == {
            "by/key": 1,
            "by/url": 1,
            "by/header": 1,
            "by/session": 1,
        }

    async def test_a_key_opens_no_other_attempt(self, make_place: Make) -> None:
        place = make_place([], api_key="client")
        key = place.open("one").key
        other = place.open("two")
        body = {"model": "tiny", "messages": ASK}
        headers = {"authorization": f"Bearer {key}"}
        response = await place.client.post("/attempts/two/v1/chat/completions", json=body, headers=headers)
        assert response.status_code == 403 and other.rollout.calls == []
        for bad in ("Bearer sk-strop-guessed", "Bearer nobody", ""):
            for path in ("/v1/chat/completions", "/attempts/two/v1/chat/completions"):
                response = await place.client.post(path, json=body, headers={"authorization": bad})
                assert response.status_code == 401
        missing = {"authorization": "Bearer client"}
        response = await place.client.post("/attempts/three/v1/chat/completions", json=body, headers=missing)
        assert response.status_code == 404

    async def test_in_training_every_call_belongs_to_one(self, make_place: Make) -> None:
        place = make_place([], only_attempts=True)
        headers = {"x-session-id": "session-unknown"}
        response = await place.client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": ASK}, headers=headers
        )
        assert (response.status_code, response.json()["error"]["code"]) == (401, "attempt_missing")


class TestAdmin:
    """Pause, resume, the weight version; attempts of other processes."""

    async def test_is_closed_to_everybody_else(self, make_place: Make) -> None:
        place = make_place([], api_key="client")
        attempt = place.open()
        for key in (attempt.key, "client", "", "admin"):
            for path in ("/admin/pause", "/admin/attempts", "/admin/attempts/group/0/freeze"):
                response = await place.client.post(path, headers={"authorization": f"Bearer {key}"})
                assert response.status_code == 401
        assert not place.engine.paused and not attempt.frozen
        assert (await make_place([], admin_key=None).client.get("/admin/status", headers=ADMIN)).status_code == 401

    async def test_pause_holds_calls_and_drains(self, make_place: Make) -> None:
        place = make_place(lambda number, prompt: "yes" + END)
        await place.post("/admin/pause", {"drain": True}, headers=ADMIN)
        waiting = asyncio.create_task(place.chat(ASK))
        await asyncio.sleep(0.05)
        assert not waiting.done() and place.sampler.prompts == []
        place.sampler.version = 7
        status = await place.post("/admin/resume", {}, headers=ADMIN)
        assert (status["weight_version"], status["paused"]) == (7, False)
        assert (await waiting)["message"]["content"] == "yes"

    async def test_an_attempt_of_another_process(self, make_place: Make) -> None:
        place = make_place(lambda number, prompt: "yes" + END)
        opened = await place.post("/admin/attempts", {"id": "far/1", "seed": 5, "token_budget": 100}, headers=ADMIN)
        await place.chat(ASK)  # belongs to nobody
        await place.post("/v1/chat/completions", {"messages": ASK}, headers={"x-api-key": opened["key"]})
        frozen = await place.post("/admin/attempts/far/1/freeze", {}, headers=ADMIN)
        (call,) = frozen["calls"]
        assert call["prompt"] == place.sampler.prompts[1] and frozen["leaves"] == [0] and frozen["forks"] == 0
        late = await place.client.post(
            "/v1/chat/completions", json={"messages": ASK}, headers={"x-api-key": opened["key"]}
        )
        assert late.status_code == 409
        assert (await place.client.delete("/admin/attempts/far/1", headers=ADMIN)).json()["closed"]
        assert len(place.engine.attempts) == 0


async def test_metrics_count_what_happened(make_place: Make) -> None:
    place = make_place(["one" + END, "two" + END])
    attempt = place.open(params=SamplingParams(max_tokens=20))
    message = (await place.chat(ASK))["message"]
    await place.chat([*ASK, message, {"role": "user", "content": "More."}])
    await place.client.post("/v1/chat/completions", json={"model": "tiny", "messages": []})
    text = (await place.client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    read = sum(len(prompt) for prompt in place.sampler.prompts)
    assert float(values['strop_gateway_tokens_total{kind="sampled"}']) == attempt.rollout.sampled_tokens == 8
    assert float(values['strop_gateway_tokens_total{kind="prompt"}']) == read
    assert float(values['strop_gateway_calls_total{place="root"}']) == 1
    assert float(values['strop_gateway_calls_total{place="extension"}']) == 1
    assert float(values['strop_gateway_requests_total{api="chat",status="400"}']) == 1
    assert float(values["strop_gateway_attempts_open"]) == 1
