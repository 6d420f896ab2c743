"""Messages as the gateway compares them: one plain form for every dialect, and the key by which a message that comes
back in a later request is known to be the one that was sampled. HTTP and tokens are elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import orjson

from strop.gateway.errors import RequestError
from strop.rollouts import Message, ToolSpec

_TEXT_PARTS = {"text", "input_text", "output_text"}
_ROLES = {"system", "developer", "user", "assistant", "tool"}


def plain_text(content: Any, where: str) -> str:
    """The text of a message's content: a string, nothing, or a list of text parts.

    Raises:
        RequestError: it holds something else, an image for example.
    """
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RequestError(
            f"{where}: expected a string or a list of parts, got {type(content).__name__}", parameter=where
        )
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and part.get("type") == "refusal":
            texts.append(str(part.get("refusal") or ""))
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"{where}[{number}]: a part of type {kind!r}, but this model reads text only", parameter=where
            )
    return "".join(texts)


def plain_message(message: Any, where: str) -> Message:
    """A chat-completions message in the one form that is rendered and compared: content is a string."""
    if not isinstance(message, dict):
        raise RequestError(f"{where}: expected an object, got {type(message).__name__}", parameter=where)
    role = message.get("role")
    if role not in _ROLES:
        raise RequestError(f"{where}.role: {role!r} is none of {', '.join(sorted(_ROLES))}", parameter=f"{where}.role")
    plain: Message = {"role": role, "content": plain_text(message.get("content"), f"{where}.content")}
    if role == "tool":
        plain["tool_call_id"] = str(message.get("tool_call_id") or "")
    if message.get("name"):
        plain["name"] = str(message["name"])
    if role == "assistant":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if isinstance(reasoning, str):
            plain["reasoning_content"] = reasoning
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = [_plain_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return plain


def tool_call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as chat completions write it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _plain_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected a function call with a name", parameter=where)
    arguments = function.get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return tool_call(str(call.get("id") or ""), function["name"], written)


def message_key(message: Message) -> Hashable:
    """Equal for two messages if and only if they say the same.

    An assistant's text is compared without the white space around it, its arguments as JSON values and not as text:
    clients strip the one and write the other anew, and neither is a change of history.
    """
    if message["role"] != "assistant":
        return message["role"], message["content"], message.get("name"), message.get("tool_call_id")
    calls = tuple(
        (call["id"], call["function"]["name"], _canonical(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    )
    return "assistant", message["content"].strip(), message.get("reasoning_content", "").strip(), calls


def tools_key(tools: Sequence[ToolSpec]) -> bytes:
    """Equal for the same tools in the same order: they stand at the very start of what the model reads."""
    return orjson.dumps(tools) if tools else b""


def _canonical(arguments: str) -> bytes | str:
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS)
    except orjson.JSONDecodeError:
        return arguments


def without_reasoning(message: Message) -> Message:
    """The message as a client sends it back that has no place for reasoning."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def plain_tool(tool: Any, where: str) -> ToolSpec:
    """A tool as it is rendered: only what the model reads of it."""
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: only function tools with a name can be offered", parameter=where)
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": kept}
