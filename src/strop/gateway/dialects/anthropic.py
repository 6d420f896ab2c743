"""Anthropic Messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from strop.gateway.attempts import Answer, RetryMark
from strop.gateway.dialects.fields import Body, answer_schema, check_names, flag, items, number, strings, whole
from strop.gateway.engine import Request, Wishes
from strop.gateway.errors import RequestError
from strop.gateway.messages import plain_text, plain_tool, tool_call
from strop.gateway.tokens import TokenText
from strop.rollouts import Message, ToolSpec

_HONOURED = {
    *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream", "temperature"),
    *("top_p", "top_k", "output_config", "output_format"),
}
_WITHOUT_EFFECT = {"metadata", "service_tier", "cache_control", "betas", "thinking", "inference_geo"}
_OFF: dict[str, Any] = {"container": None, "mcp_servers": [], "context_management": None}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Body, mark: RetryMark) -> Request:
    """The request that a body makes.

    Raises:
        RequestError: it is malformed, or asks for what can't be done.
    """
    messages, tools = conversation(body)
    choice, parallel = _tool_choice(body.get("tool_choice"))
    max_tokens = whole(body, "max_tokens", 1)
    if max_tokens is None:
        raise RequestError("max_tokens: it is required", parameter="max_tokens")
    wishes = Wishes(
        max_tokens=max_tokens,
        temperature=number(body, "temperature", 0.0),
        top_p=number(body, "top_p", 0.0, 1.0),
        top_k=whole(body, "top_k", 0),
        stop=strings(body, "stop_sequences"),
    )
    form = (body.get("output_config") or {}).get("format") or body.get("output_format")
    answer = answer_schema(form, "output_config.format")
    return Request(tuple(messages), (), tuple(tools), choice, parallel, wishes, mark=mark, answer=answer)


def conversation(body: Body) -> tuple[list[Message], list[ToolSpec]]:
    """The messages and tools of a request, for `count_tokens` too."""
    check_names(body, _HONOURED, _WITHOUT_EFFECT, _OFF)
    messages: list[Message] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": _texts(system, "system")})
    for position, message in enumerate(items(body, "messages")):
        messages += _messages(message, f"messages[{position}]")
    tools = [_tool(tool, f"tools[{position}]") for position, tool in enumerate(items(body, "tools"))]
    return messages, tools


def _tool(tool: Any, where: str) -> ToolSpec:
    if not isinstance(tool, dict) or "input_schema" not in tool:
        raise RequestError(f"{where}: only tools with an input_schema can be offered", parameter=where)
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return plain_tool({"type": "function", "function": function}, where)


def _tool_choice(choice: Any) -> tuple[str, bool]:
    """The choice, and whether several calls may be made at once."""
    if choice is None:
        return "auto", True
    if not isinstance(choice, dict):
        raise RequestError("tool_choice: expected an object", parameter="tool_choice")
    kind, parallel = choice.get("type"), not flag(choice, "disable_parallel_tool_use")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return choice["name"], parallel
    if kind not in ("auto", "any", "none"):
        raise RequestError(f"tool_choice.type: {kind!r} is none of auto, any, tool, none", parameter="tool_choice")
    return ("required" if kind == "any" else kind), parallel


def _texts(content: Any, where: str) -> str:
    """Blocks of text, joined as paragraphs: they are separate blocks to the caller."""
    if not isinstance(content, list):
        return plain_text(content, where)
    return "\n\n".join(plain_text([block], where) for block in content)


def _messages(message: Any, where: str) -> list[Message]:
    """One message of this API: one of the assistant's, or tool results and what the user says beside them."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise RequestError(f"{where}.role: it must be user or assistant", parameter=where)
    role, content = message["role"], message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": role, "content": content or ""}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise RequestError(f"{where}.content: expected a string or a list of blocks", parameter=where)
    if role == "assistant":
        return [_reply(content, where)]
    results: list[Message] = []
    texts = []
    for position, block in enumerate(content):
        if block.get("type") == "tool_result":
            text = _texts(block.get("content"), f"{where}.content[{position}]")
            results.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id") or "")})
        else:
            texts.append(plain_text([block], f"{where}.content[{position}]"))
    return [*results, {"role": role, "content": "\n\n".join(texts)}] if texts else results


def _reply(content: list[dict[str, Any]], where: str) -> Message:
    reply: Message = {"role": "assistant", "content": ""}
    for position, block in enumerate(content):
        kind = block.get("type")
        if kind == "tool_use":
            written = json.dumps(block.get("input") or {}, ensure_ascii=False)
            call = tool_call(str(block.get("id") or ""), str(block.get("name") or ""), written)
            reply.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            reply["reasoning_content"] = reply.get("reasoning_content", "") + str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            reply["content"] += plain_text([block], f"{where}.content[{position}]")
    return reply


def write(body: Body, answers: list[Answer], identity: str, model: str, text: TokenText) -> dict[str, Any]:
    """The response."""
    answer = answers[0]
    by_string = answer.stop_string is not None and answer.finish == "stop"
    return {
        "id": f"msg_{identity}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": _blocks(answer),
        "stop_reason": "stop_sequence" if by_string else _STOP_REASONS[answer.finish],
        "stop_sequence": answer.stop_string,
        "usage": {
            "input_tokens": answer.prompt_tokens - answer.sample.cached,
            "cache_read_input_tokens": answer.sample.cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": len(answer.sample.tokens),
        },
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reasoning := answer.message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if answer.message["content"]:
        blocks.append({"type": "text", "text": answer.message["content"]})
    for call in answer.message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return blocks


class Events:
    """The events of a streamed response. See `fields.Events`."""

    def __init__(self, body: Body, identity: str, model: str, text: TokenText) -> None:
        self._body, self._identity, self._model, self._text = body, identity, model, text
        self._begun = False
        self._said = 0  # characters of the content that were sent

    def started(self, prompt: list[int]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        counted = {"input_tokens": len(prompt), "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        return self._opened(counted)

    def said(self, reply: int, text: str) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        if not self._said:
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        self._said += len(text)
        yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}

    def ended(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        message = write(self._body, answers, self._identity, self._model, self._text)
        yield from self._opened(message["usage"])
        for position, block in enumerate(message["content"]):
            sent = self._said if block["type"] == "text" else 0
            if not sent:
                yield {"type": "content_block_start", "index": position, "content_block": _emptied(block)}
            if delta := _delta(block, sent):
                yield {"type": "content_block_delta", "index": position, "delta": delta}
            yield {"type": "content_block_stop", "index": position}
        ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
        yield {"type": "message_delta", "delta": ended, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def _opened(self, counted: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The first event, once."""
        if self._begun:
            return
        self._begun = True
        head = {"id": f"msg_{self._identity}", "type": "message", "role": "assistant", "model": self._model}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**head, **empty, "usage": {**counted, "output_tokens": 0}}}


def _emptied(block: dict[str, Any]) -> dict[str, Any]:
    name = {"thinking": "thinking", "text": "text", "tool_use": "input"}[block["type"]]
    return {**block, name: {} if name == "input" else ""}


def _delta(block: dict[str, Any], sent: int) -> dict[str, Any] | None:
    """What is left of a block after `sent` characters of its text."""
    if block["type"] == "tool_use":
        return {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    name = block["type"]
    left = block[name][sent:]
    return {"type": f"{name}_delta", name: left} if left else None
