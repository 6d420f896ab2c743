"""The shopkeeper's tools and their faults. Plain and deterministic: a task's data says all that they will ever do."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.environments.environment import ToolOutcome
from strop.environments.numbers import write_number
from strop.environments.shopkeeper.answers import UNITS, Answer, Refusal, answer
from strop.rollouts import ToolSpec


def _tool(name: str, description: str, arguments: Mapping[str, dict[str, Any]]) -> ToolSpec:
    schema = {"type": "object", "properties": dict(arguments), "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_STRING, _FIELDS = {"type": "string"}, ["price", "stock", "weight", "distance"]
TOOLS: tuple[ToolSpec, ...] = (
    _tool("lookup", "facts about an item or town", {"item": _STRING, "field": {"type": "string", "enum": _FIELDS}}),
    _tool("calculate", "arithmetic", {"expression": _STRING}),
    _tool("convert", "change units", {"value": {"type": "number"}, "from": _STRING, "to": _STRING}),
)

#: What can go wrong at a call; a wrong unit only where the answer has one that can be confused.
FAULTS = {
    "lookup": ("timeout", "busy", "malformed", "wrong unit"),
    "calculate": ("timeout", "busy", "malformed"),
    "convert": ("timeout", "busy", "malformed"),
}
#: Faults are drawn for so many calls of each tool; later calls go well.
_CALLS_DRAWN = 12
#: No tool fails more often than this in a row, so that trying again always helps.
_MOST_IN_A_ROW = 2


def draw_faults(rate: float, rng: random.Random) -> dict[str, list[str | None]]:
    """What happens at the first calls of each tool: the name of a fault, or None where the call goes well."""
    drawn: dict[str, list[str | None]] = {}
    for tool, kinds in FAULTS.items():
        faults: list[str | None] = []
        for _ in range(_CALLS_DRAWN):
            fails = rng.random() < rate and not all(
                faults[-_MOST_IN_A_ROW:] if len(faults) >= _MOST_IN_A_ROW else [None]
            )
            faults.append(rng.choice(kinds) if fails else None)
        drawn[tool] = faults
    return drawn


@dataclass(slots=True)
class Workbench:
    """The tools of one attempt, their state, and what is counted about their use.

    An error is met when a fault of the tool reaches the agent. It is recovered from when the agent afterwards gets
    the number that the failed call would have given: by the same lookup, or as the result of any calculation or
    conversion. The agent's own mistakes (an unknown tool, wrong arguments) are rejected calls, not errors met.

    Attributes:
        table: facts by item and field.
        faults: from `draw_faults`.
        calls: how often each tool was called with arguments that make sense.
        rejected: calls of unknown tools or with arguments that make no sense.
        met, recovered: errors.
    """

    table: Mapping[str, Mapping[str, float]]
    faults: Mapping[str, list[str | None]]
    calls: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    met: int = 0
    recovered: int = 0
    _missing: list[Answer] = field(default_factory=list)

    def call(self, name: str, arguments: Mapping[str, object]) -> ToolOutcome:
        """Run a tool; a fault drawn for this call of it comes back as an outcome with an error."""
        return self.receive(name, answer(self.table, name, arguments))

    def receive(self, name: str, answer: Answer | Refusal) -> ToolOutcome:
        """What the agent reads of a tool's answer, wherever that was worked out."""
        if isinstance(answer, Refusal):
            self.rejected += 1
            return ToolOutcome(answer.content, error=answer.error)
        number = self.calls.get(name, 0)
        self.calls[name] = number + 1
        faults = self.faults.get(name, [])
        fault = faults[number] if number < len(faults) else None
        if fault is None:
            self._settle(answer)
            return ToolOutcome(_text(answer))
        self.met += 1
        self._missing.append(answer)
        return _spoil(answer, fault)

    def _settle(self, answer: Answer) -> None:
        """Strike off the errors that this answer makes up for."""
        left = [
            missing
            for missing in self._missing
            if not (answer.fact == missing.fact if answer.fact else _same(answer.number, missing.number))
        ]
        self.recovered += len(self._missing) - len(left)
        self._missing = left


def _spoil(answer: Answer, fault: str) -> ToolOutcome:
    """What the agent reads instead of `answer`."""
    confused = next(((other, factor) for base, other, factor in UNITS.values() if base == answer.unit), None)
    if fault == "wrong unit" and confused is not None:
        other, factor = confused
        return ToolOutcome(_text(Answer(round(answer.number * factor, 6), other)), error="wrong unit")
    if fault == "malformed":
        return ToolOutcome(f'{{"value": {write_number(answer.number)[:1]}', error="malformed")
    if fault == "busy":
        return ToolOutcome("error: busy, try again", error="busy")
    return ToolOutcome("error: timeout", error="timeout")


def _text(answer: Answer) -> str:
    """As the agent reads it."""
    return f"{write_number(answer.number)} {answer.unit}".strip()


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(1.0, abs(one))
