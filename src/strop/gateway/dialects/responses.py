"""OpenAI Responses: `POST /v1/responses`, with the items and the sequence of events that its clients rely on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from strop.gateway.attempts import Answer, RetryMark
from strop.gateway.dialects.chat import logprobs
from strop.gateway.dialects.fields import Body, answer_schema, check_names, flag, items, number, whole
from strop.gateway.engine import Request, Wishes
from strop.gateway.errors import RequestError, refused
from strop.gateway.messages import plain_text, plain_tool, tool_call
from strop.gateway.tokens import TokenText
from strop.rollouts import Message

_HONOURED = {
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "stream", "max_output_tokens"),
    *("temperature", "top_p", "text", "include", "top_logprobs", "previous_response_id", "return_token_ids", "seed"),
}
_WITHOUT_EFFECT = {
    *("metadata", "store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("reasoning", "stream_options", "truncation", "client_metadata"),
}
_OFF = {"background": False, "conversation": None, "max_tool_calls": None, "prompt": None, "context_management": None}
#: What may stand in `include`: the one that is honoured, and those about tools that this gateway does not offer.
_LOGPROBS = "message.output_text.logprobs"


def read(body: Body, mark: RetryMark, earlier: Mapping[str, list[Message]]) -> Request:
    """The request that a body makes.

    Args:
        body: the JSON.
        mark: what its client says about having sent it before.
        earlier: conversations by the id of the response that they ended with, for `previous_response_id`; without
            their instructions, which are of one request each.

    Raises:
        RequestError: it is malformed, or asks for what can't be done.
    """
    check_names(body, _HONOURED, _WITHOUT_EFFECT, _OFF)
    if whole(body, "top_logprobs", 0, 20):
        raise refused("top_logprobs", "only the log-probability of the sampled token is known; ask for 0")
    messages: list[Message] = []
    previous = body.get("previous_response_id")
    if previous is not None:
        if previous not in earlier:
            raise RequestError(
                f"previous_response_id: {previous!r} is not kept here (any more); send the whole input",
                code="previous_response_not_found",
                parameter="previous_response_id",
            )
        messages += earlier[previous]
    messages += _messages(body.get("input"))
    if instructions := body.get("instructions"):
        messages = [{"role": "system", "content": str(instructions)}, *messages]
    return Request(
        messages=tuple(messages),
        tools=tuple(_tool(tool, f"tools[{position}]") for position, tool in enumerate(items(body, "tools"))),
        tool_choice=_tool_choice(body.get("tool_choice")),
        parallel_calls=flag(body, "parallel_tool_calls", True),
        wishes=Wishes(
            max_tokens=whole(body, "max_output_tokens", 1),
            temperature=number(body, "temperature", 0.0),
            top_p=number(body, "top_p", 0.0, 1.0),
            seed=whole(body, "seed", -(2**63)),
        ),
        prompt_ids=flag(body, "return_token_ids"),
        mark=mark,
        answer=answer_schema((body.get("text") or {}).get("format"), "text.format"),
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, dict) and tool.get("type") == "function" and "function" not in tool:
        tool = {"type": "function", "function": tool}
    return plain_tool(tool, where)


def _tool_choice(choice: Any) -> str:
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return str(choice["name"])
    raise RequestError(f"tool_choice: {choice!r} can't be honoured here", parameter="tool_choice")


def _messages(given: Any) -> list[Message]:
    """Items as messages. Neighbouring items of one reply (reasoning, text, calls) are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise RequestError("input: expected a string or a list of items", parameter="input")
    messages: list[Message] = []
    reply: Message | None = None
    for position, item in enumerate(given):
        where = f"input[{position}]"
        if not isinstance(item, dict):
            raise RequestError(f"{where}: expected an object", parameter=where)
        kind = item.get("type") or "message"
        ours = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if ours:
            if reply is None or (kind == "reasoning" and (reply["content"] or "tool_calls" in reply)):
                reply = {"role": "assistant", "content": ""}
                messages.append(reply)
            _add_to_reply(reply, kind, item, where)
            continue
        reply = None
        if kind == "message":
            role = item.get("role")
            if role not in ("user", "system", "developer"):
                raise RequestError(f"{where}.role: {role!r} is no role of a message", parameter=where)
            messages.append({"role": role, "content": plain_text(item.get("content"), f"{where}.content")})
        elif kind == "function_call_output":
            text = plain_text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "content": text, "tool_call_id": str(item.get("call_id") or "")})
        else:
            raise RequestError(f"{where}.type: {kind!r} can't be read here", parameter=f"{where}.type")
    return messages


def _add_to_reply(reply: Message, kind: str, item: dict[str, Any], where: str) -> None:
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        reply["reasoning_content"] = "".join(str(part.get("text", "")) for part in parts)
    elif kind == "message":
        reply["content"] += plain_text(item.get("content"), f"{where}.content")
    else:
        name, arguments = item.get("name"), item.get("arguments")
        if not isinstance(name, str):
            raise RequestError(f"{where}.name: a function call needs one", parameter=where)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        reply.setdefault("tool_calls", []).append(tool_call(str(item.get("call_id") or ""), name, written))


def write(body: Body, answers: list[Answer], identity: str, model: str, text: TokenText) -> dict[str, Any]:
    """The response."""
    answer = answers[0]
    cut = answer.finish == "length"
    sampled = len(answer.sample.tokens)
    return {
        **_frame(body, identity, model),
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _output(body, answer, identity, text),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.sample.cached},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + sampled,
        },
    }


def _frame(body: Body, identity: str, model: str) -> dict[str, Any]:
    """What a response says about its request."""
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": flag(body, "parallel_tool_calls", True),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "max_output_tokens": body.get("max_output_tokens"),
        "previous_response_id": body.get("previous_response_id"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
    }


def _output(body: Body, answer: Answer, identity: str, text: TokenText) -> list[dict[str, Any]]:
    """The reply as items; the last of them carries the tokens, if they were asked for."""
    status = "incomplete" if answer.finish == "length" else "completed"
    output: list[dict[str, Any]] = []
    if reasoning := answer.message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": reasoning}
        output.append({"type": "reasoning", "id": f"rs_{identity}", "summary": [], "content": [part]})
    calls = answer.message.get("tool_calls", ())
    if answer.message["content"] or not calls:
        part = {"type": "output_text", "text": answer.message["content"], "annotations": []}
        part["logprobs"] = logprobs(answer, text) if _LOGPROBS in items(body, "include") else []
        message = {"type": "message", "id": f"msg_{identity}", "role": "assistant", "status": status, "content": [part]}
        output.append(message)
    for position, call in enumerate(calls):
        function = call["function"]
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{identity}_{position}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    if body.get("return_token_ids"):
        output[-1] |= {
            "prompt_token_ids": answer.prompt,
            "generation_token_ids": answer.sample.tokens,
            "generation_log_probs": answer.sample.logprobs,
        }
    return output


class Events:
    """The events of a streamed response, numbered. See `fields.Events`."""

    def __init__(self, body: Body, identity: str, model: str, text: TokenText) -> None:
        self._body, self._identity, self._model, self._text = body, identity, model, text
        self._sent = 0  # events
        self._said = 0  # characters of the content that were sent

    def started(self, prompt: list[int]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        return self._numbered(self._opened())

    def said(self, reply: int, text: str) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        return self._numbered(self._text_goes_on(text))

    def ended(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        return self._numbered(self._rest(answers))

    def _numbered(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            yield {**event, "sequence_number": self._sent}
            self._sent += 1

    def _opened(self) -> Iterator[dict[str, Any]]:
        begun = _frame(self._body, self._identity, self._model)
        begun |= {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}

    def _text_goes_on(self, text: str) -> Iterator[dict[str, Any]]:
        place = {"output_index": 0, "item_id": f"msg_{self._identity}", "content_index": 0}
        if not self._said:
            yield from self._text_begins(place, {"type": "message", "id": place["item_id"], "role": "assistant"})
        self._said += len(text)
        yield {"type": "response.output_text.delta", **place, "delta": text, "logprobs": []}

    def _text_begins(self, place: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        opened = {**item, "status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", "output_index": place["output_index"], "item": opened}
        empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield {"type": "response.content_part.added", **place, "part": empty}

    def _rest(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        response = write(self._body, answers, self._identity, self._model, self._text)
        if not self._sent:
            yield from self._opened()
        for position, item in enumerate(response["output"]):
            place = {"output_index": position, "item_id": item["id"]}
            if item["type"] == "function_call":
                yield from _call_events(place, item)
            elif item["type"] == "reasoning":
                yield from _reasoning_events(place, item)
            else:
                yield from self._text_events({**place, "content_index": 0}, item)
            yield {"type": "response.output_item.done", "output_index": position, "item": item}
        ended = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        yield {"type": ended, "response": response}

    def _text_events(self, place: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """What is left to say of a message; its log-probabilities come with the last of it."""
        (part,) = item["content"]
        if not self._said:
            yield from self._text_begins(place, item)
        if left := part["text"][self._said :]:
            yield {
                "type": "response.output_text.delta",
                **place,
                "delta": left,
                "logprobs": [
                    {key: entry[key] for key in ("token", "logprob", "top_logprobs")} for entry in part["logprobs"]
                ],
            }
        yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": part["logprobs"]}
        yield {"type": "response.content_part.done", **place, "part": part}


def _call_events(place: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    opened = {**item, "arguments": "", "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": place["output_index"], "item": opened}
    yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
    done = {"arguments": item["arguments"], "name": item["name"]}
    yield {"type": "response.function_call_arguments.done", **place, **done}


def _reasoning_events(place: dict[str, Any], item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    opened = {**item, "content": [], "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": place["output_index"], "item": opened}
    said = item["content"][0]["text"]
    yield {"type": "response.reasoning_text.delta", **place, "content_index": 0, "delta": said}
    yield {"type": "response.reasoning_text.done", **place, "content_index": 0, "text": said}
