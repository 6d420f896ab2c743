"""Reading a request's fields: typed, and strict. What is honoured, what is without effect here, and what is refused
because leaving it out would change what was asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol

from strop.gateway.attempts import Answer
from strop.gateway.errors import RequestError, refused

Body = Mapping[str, Any]


class Events(Protocol):
    """The events of one streamed response, in an API's form, each as soon as it can be known."""

    def started(self, prompt: list[int]) -> Iterator[dict[str, Any]]:
        """Events once the first token was sampled, if anything can be sent before the end.

        Args:
            prompt: the tokens that were read.
        """
        ...

    def said(self, reply: int, text: str) -> Iterator[dict[str, Any]]:
        """Events when the content of reply number `reply` goes on with `text`. Comes after `started`."""
        ...

    def ended(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        """Events once all replies are complete: what was not sent yet, and the end."""
        ...


def number(body: Body, name: str, low: float, high: float = float("inf")) -> float | None:
    """A number within bounds, or None if it isn't given."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        bounds = f"from {low:g} to {high:g}" if high != float("inf") else f"of at least {low:g}"
        raise RequestError(f"{name}: it is {value!r}, but must be a number {bounds}", parameter=name)
    return float(value)


def whole(body: Body, name: str, low: int, high: int = 2**63 - 1) -> int | None:
    """A whole number within bounds, or None if it isn't given."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(f"{name}: it is {value!r}, but must be a whole number of at least {low}", parameter=name)
    return value


def flag(body: Body, name: str, default: bool = False) -> bool:
    """A truth value."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name}: it is {value!r}, but must be true or false", parameter=name)
    return value


def strings(body: Body, name: str) -> tuple[str, ...]:
    """A string or a list of strings."""
    value = body.get(name)
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise RequestError(f"{name}: expected a string or a list of strings", parameter=name)
    return tuple(item for item in values if item)


def items(body: Body, name: str) -> list[Any]:
    """A list; empty if it isn't given."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{name}: expected a list, got {type(value).__name__}", parameter=name)
    return value


def check_names(body: Body, honoured: Collection[str], without_effect: Collection[str], off: Mapping[str, Any]) -> None:
    """Refuse what can't be done.

    Args:
        body: the request.
        honoured: names that are read elsewhere.
        without_effect: names that change nothing about the reply (who pays, where it is stored …).
        off: names that can't be honoured, and the value that asks for nothing.

    Raises:
        RequestError: a name is unknown, or asks for what can't be done.
    """
    for name, value in body.items():
        if name in honoured or name in without_effect or value is None:
            continue
        if name not in off:
            raise refused(name, "there is no such parameter here")
        if value != off[name] and value not in ([], {}, ""):
            raise refused(name, f"it can't be honoured here; leave it out or set it to {off[name]!r}")


def answer_schema(form: Any, name: str) -> Mapping[str, Any] | None:
    """The JSON schema that a reply has to fit.

    Args:
        form: the request's field: nothing, or a format as OpenAI's and Anthropic's APIs write it.
        name: of that field.

    Raises:
        RequestError: it is none of these.
    """
    kind = form.get("type") if isinstance(form, Mapping) else form
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise refused(name, f"there is no format {kind!r} here; there are text, json_object and json_schema")
    schema = form.get("json_schema", form).get("schema")
    if not isinstance(schema, Mapping):
        raise RequestError(f"{name}: a json_schema format needs a schema", parameter=name)
    return schema
