"""Messages and tools as the OpenAI API writes them, checked field by field. What rows look like is in `formats`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from strop.data.examples import Wrong
from strop.rollouts import Message, ToolSpec

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = ("reasoning_content", "reasoning", "thinking")


def said(value: Any) -> str:
    """A value, short enough for a sentence."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


def kind_of(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "missing" if value is None else names.get(type(value), "an object")


def need_text(value: Any, field: str, *, empty: bool = False) -> str:
    """A string, by default not empty."""
    if not isinstance(value, str):
        raise Wrong(field, f"it is {kind_of(value)}", "It should be a string")
    if not empty and not value.strip():
        raise Wrong(field, "it is empty", "It should hold text")
    return value


def need_list(value: Any, field: str) -> list[Any]:
    """A list that isn't empty."""
    if not isinstance(value, list):
        raise Wrong(field, f"it is {kind_of(value)}", "It should be a list")
    if not value:
        raise Wrong(field, "it is empty", "It should have at least one entry")
    return value


def need_object(value: Any, field: str) -> dict[str, Any]:
    """An object, without the keys that have no value (columns of a table are there for every row)."""
    if not isinstance(value, Mapping):
        raise Wrong(field, f"it is {kind_of(value)}", "It should be an object")
    return {key: inner for key, inner in value.items() if inner is not None}


def parse_messages(value: Any, field: str, tools: tuple[ToolSpec, ...] = ()) -> list[Message]:
    """A list of messages.

    Args:
        value: what the row holds.
        field: its name in the row.
        tools: what may be called; without any, calls of any name are accepted.

    Raises:
        Wrong: names the message and its key.
    """
    names = {tool["function"]["name"] for tool in tools}
    open_calls: set[str] = set()
    messages = []
    for number, entry in enumerate(need_list(value, field)):
        place = f"{field}[{number}]"
        message = _message(need_object(entry, place), place)
        for at, call in enumerate(message.get("tool_calls", ())):
            if names and call["function"]["name"] not in names:
                called = call["function"]["name"]
                listed = f"tools has: {', '.join(sorted(names))}"
                raise Wrong(f"{place}.tool_calls[{at}].function.name", f"{called!r} is not among the tools", listed)
            open_calls.add(str(call.get("id", "")))
        if message["role"] == "tool":
            _answers_a_call(message, place, open_calls)
        messages.append(message)
    return messages


def _answers_a_call(message: Message, place: str, calls: set[str]) -> None:
    if not calls:
        raise Wrong(place, "it is a tool's result, but nothing was called before it", "Give the call before it")
    name = message.get("tool_call_id")
    if name is not None and calls != {""} and name not in calls:
        raise Wrong(f"{place}.tool_call_id", f"no earlier call has the id {said(name)}", "Name the call it answers")


def _message(message: Message, place: str) -> Message:
    role = message.get("role")
    if role not in ROLES:
        raise Wrong(
            f"{place}.role",
            "it is missing" if role is None else f"there is no role {said(role)}",
            f"It should be one of {', '.join(ROLES)}",
        )
    if "function_call" in message:
        raise Wrong(f"{place}.function_call", "this older form of a call is not read", "Write tool_calls, a list")
    if "weight" in message:
        _check_weight(message["weight"], role, f"{place}.weight")
    if "tool_calls" in message:
        if role != "assistant":
            raise Wrong(f"{place}.tool_calls", f"a message of {role} calls tools", "Only an assistant calls tools")
        message["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{at}]")
            for at, call in enumerate(need_list(message["tool_calls"], f"{place}.tool_calls"))
        ]
    for key in REASONING:
        if key in message:
            thought = need_text(message.pop(key), f"{place}.{key}", empty=True)
            message["reasoning_content"] = thought
    message["content"] = _content(message, role, f"{place}.content")
    return message


def _content(message: Message, role: str, field: str) -> str:
    content = message.get("content")
    if isinstance(content, list):
        for at, part in enumerate(content):
            inner = need_object(part, f"{field}[{at}]")
            if inner.get("type") != "text":
                kind = said(inner.get("type"))
                raise Wrong(f"{field}[{at}].type", f"parts of type {kind} are not read", "Only text is")
            need_text(inner.get("text"), f"{field}[{at}].text", empty=True)
        content = "".join(part["text"] for part in content)
    if content is None and "tool_calls" in message:
        return ""
    if role == "assistant" and content == "" and "tool_calls" not in message:
        raise Wrong(field, "it is empty", "An assistant says something or calls a tool")
    return need_text(content, field, empty=role in ("assistant", "tool", "system", "developer"))


def _check_weight(weight: Any, role: str, field: str) -> None:
    if role != "assistant":
        raise Wrong(field, f"a message of {role} has a weight", "Only an assistant's messages are learnt")
    if isinstance(weight, bool) or weight not in (0, 1):
        raise Wrong(field, f"{said(weight)} is no weight", "It should be 0 (not learnt) or 1")


def _call(value: Any, place: str) -> dict[str, Any]:
    call = need_object(value, place)
    if call.get("type", "function") != "function":
        raise Wrong(f"{place}.type", f"there are no calls of type {said(call['type'])}", 'It should be "function"')
    function = need_object(call.get("function"), f"{place}.function")
    name = need_text(function.get("name"), f"{place}.function.name")
    arguments = parse_object(function.get("arguments", {}), f"{place}.function.arguments")
    return {**call, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_object(value: Any, field: str) -> dict[str, Any]:
    """An object, given as one or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Wrong(field, f"it is not valid JSON ({error})", "It should be a JSON object") from None
    return need_object(value, field)


def parse_tools(value: Any, field: str) -> tuple[ToolSpec, ...]:
    """Tools of a row: a list of them, or its JSON text; nothing is none.

    Raises:
        Wrong: names the tool and its key.
    """
    if value is None:
        return ()
    if isinstance(value, str):
        try:
            value = json.loads(value or "[]")
        except (ValueError, RecursionError) as error:
            raise Wrong(field, f"it is not valid JSON ({error})", "It should be a list of tools") from None
    if not isinstance(value, list):
        raise Wrong(field, f"it is {kind_of(value)}", "It should be a list of tools")
    tools: list[ToolSpec] = []
    for at, entry in enumerate(value):
        place = f"{field}[{at}]"
        tool = need_object(entry, place)
        function = need_object(tool.get("function", tool), f"{place}.function")
        name = need_text(function.get("name"), f"{place}.function.name")
        if name in {other["function"]["name"] for other in tools}:
            raise Wrong(f"{place}.function.name", f"two tools are called {name!r}", "Give each a name of its own")
        if "parameters" in function:
            function["parameters"] = parse_object(function["parameters"], f"{place}.function.parameters")
        tools.append({"type": "function", "function": function})
    return tuple(tools)
