"""The formats of rows: which keys tell one, and what a row of it says. Reading files is in `files`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from strop.data.examples import Answer, Conversation, Example, Judged, Pair, PlainText, Wrong
from strop.data.messages import (
    kind_of,
    need_list,
    need_object,
    need_text,
    parse_messages,
    parse_object,
    parse_tools,
    said,
)
from strop.rollouts import Message, ToolSpec

Row = Mapping[str, Any]
#: How a prompt and an answer that are strings are understood: as messages, or as text.
Strings = Literal["chat", "plain"]
#: Who speaks, in ShareGPT's words and in OpenAI's.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "function_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function_response": "tool",
}


@dataclass(frozen=True, slots=True)
class Format:
    """A format of rows.

    Attributes:
        keys: those that tell it.
        gives: what its rows are.
        parse: a row to an example.
    """

    keys: tuple[str, ...]
    gives: Literal["demonstrations", "pairs", "judged answers"]
    parse: Callable[[Row, Strings], Example]


def parse_row(row: Row, name: str, strings: Strings = "chat") -> Example:
    """What a row says.

    Args:
        row: its values by key.
        name: of the format, a key of `FORMATS`.
        strings: how prompts and answers that are strings are understood.

    Raises:
        Wrong: names the field, what is wrong and what would be right.
    """
    for key in FORMATS[name].keys:
        if row.get(key) is None:
            raise Wrong(key, "it is missing", f"Rows of the format {name} have {', '.join(FORMATS[name].keys)}")
    return FORMATS[name].parse(row, strings)


def format_of(row: Row) -> str:
    """The format of a row, told by its keys.

    Raises:
        Wrong: no format has such keys.
    """
    there = {key for key, value in row.items() if value is not None}
    for name, known in FORMATS.items():
        if there.issuperset(known.keys):
            return name
    listed = "; ".join(f"{name}: {', '.join(known.keys)}" for name, known in FORMATS.items())
    keys = ", ".join(sorted(map(str, there))) or "none"
    raise Wrong("", f"no format has these keys: {keys}", f"Formats and their keys: {listed}")


# -- demonstrations -------------------------------------------------------------------------------------------------


def conversation(
    messages: list[Message], field: str, tools: tuple[ToolSpec, ...] = (), context: int = 0
) -> Conversation:
    """A conversation whose assistant's messages from `context` on are learnt, but for those of weight 0.

    Raises:
        Wrong: it doesn't end with an assistant's message, or nothing would be learnt.
    """
    if messages[-1]["role"] != "assistant":
        last = f"{field}[{len(messages) - 1 - context}]"
        raise Wrong(last, f"the last message is of {messages[-1]['role']}", "A conversation ends with the assistant's")
    trained = tuple(
        message["role"] == "assistant" and message.get("weight", 1) == 1 and number >= context
        for number, message in enumerate(messages)
    )
    if not any(trained):
        raise Wrong(field, "every message of the assistant has weight 0", "At least one should have weight 1")
    bare = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Conversation(bare, trained, tools)


def _openai(row: Row, strings: Strings) -> Example:
    tools = parse_tools(row.get("tools"), "tools")
    return conversation(parse_messages(row["messages"], "messages", tools), "messages", tools)


def _sharegpt(row: Row, strings: Strings) -> Example:
    tools = parse_tools(row.get("tools"), "tools")
    spoken = sharegpt_messages(row["conversations"], "conversations")
    messages = _renamed(lambda: parse_messages(spoken, "conversations", tools))
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": need_text(row["system"], "system")})
    return conversation(messages, "conversations", tools)


def sharegpt_messages(value: Any, field: str) -> list[Message]:
    """Messages written as {"from": …, "value": …}, as OpenAI writes them; their content is not checked yet."""
    messages = []
    for number, entry in enumerate(need_list(value, field)):
        place = f"{field}[{number}]"
        spoken = need_object(entry, place)
        speaker = spoken.get("from")
        if speaker not in SPEAKERS:
            wrong = "it is missing" if speaker is None else f"there is no speaker {said(speaker)}"
            raise Wrong(f"{place}.from", wrong, f"It should be one of {', '.join(SPEAKERS)}")
        text = need_text(spoken.get("value"), f"{place}.value", empty=True)
        message: Message = {"role": SPEAKERS[speaker], "content": text}
        if "weight" in spoken:
            message["weight"] = spoken["weight"]
        if speaker == "function_call":
            call = parse_object(text, f"{place}.value")
            message |= {"content": None, "tool_calls": [{"type": "function", "function": call}]}
        messages.append(message)
    return messages


def _renamed(parse: Callable[[], list[Message]]) -> list[Message]:
    """Errors in ShareGPT's words."""
    try:
        return parse()
    except Wrong as error:
        field = error.field.replace(".content", ".value").replace(".role", ".from")
        raise Wrong(field, error.wrong, error.right) from None


def _alpaca(row: Row, strings: Strings) -> Example:
    messages: list[Message] = []
    if row.get("system"):
        messages.append({"role": "system", "content": need_text(row["system"], "system")})
    history = row.get("history") or []
    if not isinstance(history, list):
        raise Wrong("history", f"it is {kind_of(history)}", "It should be a list of [instruction, output]")
    for number, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2:
            raise Wrong(f"history[{number}]", f"it is {said(turn)}", "It should be [instruction, output]")
        messages.append({"role": "user", "content": need_text(turn[0], f"history[{number}][0]")})
        messages.append({"role": "assistant", "content": need_text(turn[1], f"history[{number}][1]"), "weight": 0})
    asked = need_text(row["instruction"], "instruction")
    if row.get("input"):
        asked += "\n\n" + need_text(row["input"], "input")
    messages.append({"role": "user", "content": asked})
    messages.append({"role": "assistant", "content": need_text(row["output"], "output")})
    return conversation(messages, "output")


def _prompt_completion(row: Row, strings: Strings) -> Example:
    return _answer(row, "completion", strings)


def _text(row: Row, strings: Strings) -> Example:
    return PlainText("", need_text(row["text"], "text"))


# -- preferences ----------------------------------------------------------------------------------------------------


def _answer(row: Row, key: str, strings: Strings) -> Answer:
    """A prompt with the answer under `key`; both are strings, or both are messages."""
    prompt, answer = row["prompt"], row[key]
    if isinstance(prompt, str) and isinstance(answer, str):
        need_text(prompt, "prompt")
        need_text(answer, key)
        if strings == "plain":
            return PlainText(prompt, answer)
        asked = _system(row)
        asked.append({"role": "user", "content": prompt})
        return conversation([*asked, {"role": "assistant", "content": answer}], key, context=len(asked))
    tools = parse_tools(row.get("tools"), "tools")
    if isinstance(prompt, str):
        asked = [*_system(row), {"role": "user", "content": need_text(prompt, "prompt")}]
    else:
        asked = parse_messages(prompt, "prompt", tools)
    return _answered(asked, _as_messages(answer, key), key, tools)


def _answered(asked: list[Message], answer: list[Any], key: str, tools: tuple[ToolSpec, ...]) -> Conversation:
    """The prompt's messages and the answer's; errors count from the answer's first on."""
    try:  # together, for a tool's result may answer a call of the prompt
        messages = parse_messages([*asked, *answer], key, tools)
    except Wrong as error:
        number, bracket, rest = error.field.removeprefix(f"{key}[").partition("]")
        moved = f"{key}[{int(number) - len(asked)}]{rest}" if bracket and number.isdigit() else error.field
        raise Wrong(moved, error.wrong, error.right) from None
    return conversation(messages, key, tools, context=len(asked))


def _system(row: Row) -> list[Message]:
    return [{"role": "system", "content": need_text(row["system"], "system")}] if row.get("system") else []


def _as_messages(value: Any, field: str) -> list[Any]:
    """An answer as a list of messages: a string, one message, or several; ShareGPT's among them."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": need_text(value, field)}]
    entries = [value] if isinstance(value, Mapping) else need_list(value, field)
    if any(isinstance(entry, Mapping) and entry.get("from") is not None for entry in entries):
        return sharegpt_messages(entries, field)
    return entries


def _pairs(row: Row, strings: Strings) -> Example:
    if row.get("prompt") is None:
        row = _with_prompt(row)
    chosen, rejected = (_answer(row, key, strings) for key in ("chosen", "rejected"))
    if chosen == rejected:
        raise Wrong("rejected", "it is the same as chosen", "A pair has two different answers")
    return Pair(chosen, rejected)


def _with_prompt(row: Row) -> Row:
    """The row of whole conversations, or of ShareGPT's: what both begin with is their prompt."""
    if row.get("conversations") is not None:
        return {**row, "prompt": sharegpt_messages(row["conversations"], "conversations")}
    chosen, rejected = (row[key] for key in ("chosen", "rejected"))
    for key, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, list):
            raise Wrong("prompt", f"it is missing, and {key} is {kind_of(value)}", "Add the prompt that both answer")
    shared = 0
    while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
        shared += 1
    if not shared:
        raise Wrong("rejected[0]", "it differs from chosen[0]", "Both begin with the same prompt")
    return {**row, "prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _openai_pairs(row: Row, strings: Strings) -> Example:
    asked = need_object(row.get("input"), "input")
    tools = parse_tools(asked.get("tools"), "input.tools")
    prompt = parse_messages(asked.get("messages"), "input.messages", tools)
    answers = []
    for key in ("preferred_output", "non_preferred_output"):
        given = need_list(row[key], key)
        if len(given) != 1 or need_object(given[0], f"{key}[0]").get("role") != "assistant":
            raise Wrong(key, f"it has {len(given)} messages", "It should be one message of the assistant")
        answers.append(_answered(prompt, given, key, tools))
    if answers[0] == answers[1]:
        raise Wrong("non_preferred_output", "it is the same as preferred_output", "A pair has two different answers")
    return Pair(*answers)


def _labelled(row: Row, strings: Strings) -> Example:
    label = row["label"]
    if not isinstance(label, bool):
        raise Wrong("label", f"it is {said(label)}", "It should be true or false")
    return Judged(_answer(row, "completion", strings), label)


#: From the most telling keys to the least.
FORMATS = {
    "openai_pairs": Format(("input", "preferred_output", "non_preferred_output"), "pairs", _openai_pairs),
    "pairs": Format(("chosen", "rejected"), "pairs", _pairs),
    "labelled": Format(("prompt", "completion", "label"), "judged answers", _labelled),
    "messages": Format(("messages",), "demonstrations", _openai),
    "sharegpt": Format(("conversations",), "demonstrations", _sharegpt),
    "alpaca": Format(("instruction", "output"), "demonstrations", _alpaca),
    "prompt_completion": Format(("prompt", "completion"), "demonstrations", _prompt_completion),
    "text": Format(("text",), "demonstrations", _text),
}


def canonical(row: Row) -> str:
    """A row as one line of text, the same for equal rows: what validation rows are drawn by."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)
