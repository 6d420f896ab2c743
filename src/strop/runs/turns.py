"""An attempt as a reader follows it: its messages in order, each reply next to the model call that sampled it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from strop.rollouts import ModelCall
from strop.runs.reading import Attempt

#: Text of a token by its id.
TokenText = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A tool call in a reply: the tool, its arguments as text, and why it could not be run (None if it could)."""

    name: str
    arguments: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Turn:
    """One message.

    Attributes:
        role: "system", "user", "assistant", "tool" or "note".
        text: what was said.
        name: of the tool that answered; "" otherwise.
        error: short name of the error that a tool's answer is; None if it went well.
        tools: tool calls of a reply.
        call: the model call that sampled a reply; None for everything that wasn't sampled.
    """

    role: str
    text: str
    name: str = ""
    error: str | None = None
    tools: tuple[ToolUse, ...] = ()
    call: ModelCall | None = None


def turns(attempt: Attempt) -> list[Turn]:
    """The messages of an attempt. Replies get their calls if each has one (an agent may rewrite its history)."""
    messages = attempt.rollout.transcript or list(attempt.group.task.messages)
    given = sum(message.get("role") == "assistant" for message in attempt.group.task.messages)
    replies = [number for number, message in enumerate(messages) if message.get("role") == "assistant"][given:]
    calls = attempt.rollout.calls
    sampled_by = dict(zip(replies, calls, strict=True)) if len(replies) == len(calls) else {}
    return [_turn(message, sampled_by.get(number)) for number, message in enumerate(messages)]


def _turn(message: dict[str, Any], call: ModelCall | None) -> Turn:
    text = message.get("content") or ""
    if isinstance(text, list):  # content parts, as the OpenAI API has them
        text = "\n".join(str(part.get("text", part.get("type", ""))) for part in text)
    if thought := message.get("reasoning_content"):
        text = f"({thought})\n{text}"
    tools = []
    for use in message.get("tool_calls") or ():
        function = use.get("function", {})
        tools.append(ToolUse(str(function.get("name", "")), str(function.get("arguments", "")), use.get("problem")))
    return Turn(
        str(message.get("role", "")),
        str(text),
        str(message.get("name") or ""),
        message.get("error"),
        tuple(tools),
        call,
    )


@cache
def token_texts(checkpoints: Path) -> TokenText | None:
    """Text of a token by the tokenizer of the run's newest checkpoint; None if there is no checkpoint."""
    files = sorted(checkpoints.glob("*/tokenizer.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(files[-1]))
    return cache(lambda token: str(tokenizer.decode([token], skip_special_tokens=False)))
