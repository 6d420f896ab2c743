"""The shopkeeper's tools and their faults. Plain and deterministic: a task's data says all that they will ever do."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.environments.environment import ToolOutcome
from strop.environments.numbers import write_number
from strop.environments.shopkeeper.questions import UNITS
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

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call is about to answer: a number, its unit, and which fact it is (two lookups of it are the same)."""

    number: float
    unit: str = ""
    fact: str = ""

    @property
    def text(self) -> str:
        """As the agent reads it."""
        return f"{write_number(self.number)} {self.unit}".strip()


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
        answer = self._answer(name, arguments)
        if isinstance(answer, ToolOutcome):
            self.rejected += 1
            return answer
        number = self.calls.get(name, 0)
        self.calls[name] = number + 1
        faults = self.faults.get(name, [])
        fault = faults[number] if number < len(faults) else None
        if fault is None:
            self._settle(answer)
            return ToolOutcome(answer.text)
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

    def _answer(self, name: str, arguments: Mapping[str, object]) -> Answer | ToolOutcome:
        if name == "lookup":
            return self._lookup(arguments)
        if name == "calculate":
            return _calculate(arguments)
        if name == "convert":
            return _convert(arguments)
        return ToolOutcome("error: the tools are lookup, calculate, convert", error="unknown tool")

    def _lookup(self, arguments: Mapping[str, object]) -> Answer | ToolOutcome:
        item, wanted = arguments.get("item"), arguments.get("field")
        if not isinstance(item, str) or not isinstance(wanted, str):
            return _bad("lookup needs item and field")
        names = {_plain(name): name for name in self.table}
        name = names.get(_plain(item))
        if name is None:
            return _bad(f"no item {item[:20]!r}")
        facts = self.table[name]
        if wanted not in facts:
            return _bad(f"fields of {name}: {', '.join(facts)}")
        unit = UNITS[wanted][0] if wanted in UNITS else "in stock"
        return Answer(facts[wanted], unit, fact=f"{name} {wanted}")


def _calculate(arguments: Mapping[str, object]) -> Answer | ToolOutcome:
    expression = arguments.get("expression")
    if not isinstance(expression, str):
        return _bad("calculate needs expression")
    try:
        value = _evaluate(ast.parse(expression.strip()[:200], mode="eval").body)
    except ZeroDivisionError:
        return _bad("division by zero")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return _bad("use numbers and + - * / ( )")
    return Answer(value)


def _convert(arguments: Mapping[str, object]) -> Answer | ToolOutcome:
    value, unit, to = arguments.get("value"), arguments.get("from"), arguments.get("to")
    try:
        number = float(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or not abs(number) < 1e15:
        return _bad("convert needs a number as value")
    for base, other, factor in UNITS.values():
        if (unit, to) == (base, other):
            return Answer(round(number * factor, 6), other)
        if (unit, to) == (other, base):
            return Answer(round(number / factor, 6), base)
    pairs = ", ".join(f"{base} and {other}" for base, other, _ in UNITS.values())
    return _bad(f"can convert {pairs}")


def _spoil(answer: Answer, fault: str) -> ToolOutcome:
    """What the agent reads instead of `answer`."""
    confused = next(((other, factor) for base, other, factor in UNITS.values() if base == answer.unit), None)
    if fault == "wrong unit" and confused is not None:
        other, factor = confused
        return ToolOutcome(Answer(round(answer.number * factor, 6), other).text, error="wrong unit")
    if fault == "malformed":
        return ToolOutcome(f'{{"value": {write_number(answer.number)[:1]}', error="malformed")
    if fault == "busy":
        return ToolOutcome("error: busy, try again", error="busy")
    return ToolOutcome("error: timeout", error="timeout")


def _evaluate(node: ast.expr) -> float:
    """The value of an arithmetic expression; ValueError if it is anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _bounded(_ARITHMETIC[type(node.op)](_evaluate(node.left), _evaluate(node.right)))
    raise ValueError("not arithmetic")


def _bounded(value: float) -> float:
    if not abs(value) < 1e15:
        raise ValueError("too large")
    return value


def _bad(what: str) -> ToolOutcome:
    return ToolOutcome(f"error: {what}", error="bad arguments")


def _plain(name: str) -> str:
    """A name without case and plural."""
    return name.strip().lower().removesuffix("s")


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-6 * max(1.0, abs(one))
