"""Items of the Responses API, in which NeMo Gym writes what is said, and the messages that strop writes.

Neighbouring items of one reply (reasoning, text, calls) are one message. What a model without eyes and ears can't read
(images, audio, files) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from strop.rollouts import Message, ToolSpec

_TEXT = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def messages_of(items: object) -> list[Message]:
    """Messages that items say.

    Args:
        items: a text (of the user), or a list of items.

    Raises:
        ValueError: an item that is none, or that is not text; says which.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise ValueError(f"the input is {items!r}, neither a text nor a list of items")
    messages: list[Message] = []
    reply: Message | None = None
    for number, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise ValueError(f"item {number} is no object")
        kind, role = item.get("type") or "message", item.get("role")
        if kind in ("reasoning", "function_call") or (kind == "message" and role == "assistant"):
            if reply is None or (kind == "reasoning" and (reply["content"] or "tool_calls" in reply)):
                reply = {"role": "assistant", "content": ""}
                messages.append(reply)
            _add(reply, kind, item)
            continue
        reply = None
        if kind == "message" and role in ("user", "system", "developer"):
            messages.append({"role": role, "content": _text(item.get("content"))})
        elif kind == "function_call_output":
            content = _text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content})
        else:
            raise ValueError(f"item {number} is of type {kind!r} and role {role!r}, which can't be read here")
    return messages


def _add(reply: Message, kind: str, item: Mapping[str, Any]) -> None:
    if kind == "reasoning":
        reply["reasoning_content"] = _text(item.get("content") or item.get("summary") or "")
    elif kind == "message":
        reply["content"] += _text(item.get("content"))
    else:
        arguments = item.get("arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
        function = {"name": str(item.get("name") or ""), "arguments": written}
        call = {"id": str(item.get("call_id") or ""), "type": "function", "function": function}
        reply.setdefault("tool_calls", []).append(call)


def _text(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content)
    texts = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") in _TEXT:
            texts.append(str(part.get("text") or ""))
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"a part of its content is of type {kind!r}; only text can be read here")
    return "".join(texts)


def tools_of(tools: object) -> tuple[ToolSpec, ...]:
    """Tools as the chat API writes them. Raises ValueError for one that is no function (web search, MCP …)."""
    found = []
    for tool in tools if isinstance(tools, list) else []:
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise ValueError(f"a tool of type {kind!r} is offered by nobody here; only functions are")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return tuple(found)


def written_tools(tools: Iterable[ToolSpec]) -> list[dict[str, Any]]:
    """Tools as the Responses API writes them."""
    return [{"type": "function", "strict": False, **tool["function"]} for tool in tools]


def items_of(messages: Sequence[Message], identity: str) -> list[dict[str, Any]]:
    """What was said, as output items of a response.

    Args:
        messages: replies and tool results; notes for readers are left out.
        identity: that the ids of the items are made from.
    """
    items: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        number = len(items)
        if role == "tool":
            call_id = str(message.get("tool_call_id") or "")
            output = str(message.get("content") or "")
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
        elif role == "assistant":
            items += _reply_items(message, f"{identity}_{number}")
        elif role in ("user", "system", "developer"):
            items.append({"type": "message", "role": role, "content": str(message.get("content") or "")})
    return items


def _reply_items(message: Message, identity: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        thought = {"type": "reasoning_text", "text": str(reasoning)}
        items.append({"type": "reasoning", "id": f"rs_{identity}", "summary": [], "content": [thought]})
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        text = str(message.get("content") or "")
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        said = {"type": "message", "id": f"msg_{identity}", "role": "assistant", "status": "completed"}
        items.append({**said, "content": [part]})
    for number, call in enumerate(calls):
        function = call["function"]
        arguments = function["arguments"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{identity}_{number}",
                "call_id": str(call.get("id") or f"call_{identity}_{number}"),
                "name": function["name"],
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
                "status": "completed",
            }
        )
    return items
