"""Grammars as texts: JSON of a schema, tool calls whose arguments fit, or either. They are in llguidance's dialect of
Lark; what reads them is `constraints`' business, and this needs nothing installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strop.rollouts import ToolSpec

#: As json.dumps writes it: a model that may put white space anywhere can go on with it for ever.
_JSON = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ANY_OBJECT = {"type": "object"}


def grammar(*, answer: Mapping[str, Any] | None = None, calls: Sequence[str] = (), several: bool = True) -> str:
    """A grammar, as `SamplingParams.grammar` takes it.

    Args:
        answer: JSON schema of a reply; None: the reply has to be a tool call.
        calls: what calls may be; see `call_rules`.
        several: whether a reply may hold more than one call.
    """
    choices = [f"%json {_schema(answer)}"] if answer is not None else []
    if calls:
        choices.append('call ("\\n" call)*' if several else "call")
    lines = [f"start: {' | '.join(f'choice_{number}' for number in range(len(choices)))}"]
    lines += [f"choice_{number}: {choice}" for number, choice in enumerate(choices)]
    if calls:
        lines.append(f"call: {' | '.join(f'call_{number}' for number in range(len(calls)))}")
        lines += [f"call_{number}: {call}" for number, call in enumerate(calls)]
    return "\n".join(lines)


def call_rules(tools: Sequence[ToolSpec], begin: str, end: str) -> Iterator[str]:
    """A rule for a call of each tool: `begin`, its name, arguments that fit its schema, `end`."""
    for tool in tools:
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        head = json.dumps(f'{begin}{{"name": {name}, "arguments": ', ensure_ascii=False)
        schema = function.get("parameters") or _ANY_OBJECT
        yield f"{head} %json {_schema(schema, lenient=True)} {json.dumps('}' + end)}"


def _schema(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    """A schema with how it is written; `lenient` leaves out what can't be kept: tools describe more than they check."""
    return json.dumps({**schema, "x-guidance": {**_JSON, "lenient": lenient}}, ensure_ascii=False)
