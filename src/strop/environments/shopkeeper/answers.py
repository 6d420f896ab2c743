"""What the shopkeeper's tools answer when nothing fails: one function of the facts and the call.

It imports nothing of strop, because it may run inside a sandbox, where this file's text is all that is there. Faults,
counts and wording are in tools.py.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

#: The unit that each field is kept in, the unit that a confused tool may answer in, and how many of it make one.
UNITS = {"price": ("dollars", "cents", 100.0), "weight": ("g", "kg", 0.001), "distance": ("km", "m", 1000.0)}

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Answer(NamedTuple):
    """What a call is about to answer: a number, its unit, and which fact it is (two lookups of it are the same)."""

    number: float
    unit: str = ""
    fact: str = ""


class Refusal(NamedTuple):
    """A call that makes no sense: what the agent reads, and a short name of its mistake."""

    content: str
    error: str


def answer(table: Mapping[str, Mapping[str, float]], name: str, arguments: Mapping[str, object]) -> Answer | Refusal:
    """What a tool gives back.

    Args:
        table: facts by item and field.
        name: of the tool; may be unknown.
        arguments: as the agent wrote them; may make no sense.
    """
    if name == "lookup":
        return _lookup(table, arguments)
    if name == "calculate":
        return _calculate(arguments)
    if name == "convert":
        return _convert(arguments)
    return Refusal("error: the tools are lookup, calculate, convert", "unknown tool")


def _lookup(table: Mapping[str, Mapping[str, float]], arguments: Mapping[str, object]) -> Answer | Refusal:
    item, wanted = arguments.get("item"), arguments.get("field")
    if not isinstance(item, str) or not isinstance(wanted, str):
        return _bad("lookup needs item and field")
    names = {_plain(name): name for name in table}
    name = names.get(_plain(item))
    if name is None:
        return _bad(f"no item {item[:20]!r}")
    facts = table[name]
    if wanted not in facts:
        return _bad(f"fields of {name}: {', '.join(facts)}")
    unit = UNITS[wanted][0] if wanted in UNITS else "in stock"
    return Answer(facts[wanted], unit, f"{name} {wanted}")


def _calculate(arguments: Mapping[str, object]) -> Answer | Refusal:
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


def _convert(arguments: Mapping[str, object]) -> Answer | Refusal:
    value, unit, to = arguments.get("value"), arguments.get("from"), arguments.get("to")
    try:
        number = float(value) if isinstance(value, int | float | str) else None
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


def _bad(what: str) -> Refusal:
    return Refusal(f"error: {what}", "bad arguments")


def _plain(name: str) -> str:
    """A name without case and plural."""
    return name.strip().lower().removesuffix("s")
