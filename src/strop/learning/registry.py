"""Functions that a recipe names: `{name = "grpo", divide_by_std = false}` becomes a checked, immutable object.

Every family (advantages, losses, corrections) keeps one `Registry` of dataclasses whose fields are the options.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from strop.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """Dataclasses by name.

    Args:
        what: what they are, for error messages: "advantage".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.classes: dict[str, type[T]] = {}

    def add(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorator that enters a dataclass under `name`."""

        def enter(cls: type[T]) -> type[T]:
            self.classes[name] = cls
            return cls

        return enter

    def make(self, name: str, options: Mapping[str, Any], key: str) -> T:
        """An object of the class that `name` stands for.

        Args:
            name: as entered.
            options: its fields; those left out keep their defaults.
            key: the recipe's key, for error messages.

        Raises:
            ConfigError: no such name or option, a value of the wrong type, or one that the class refuses.
        """
        if name not in self.classes:
            close = difflib.get_close_matches(name, self.classes, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{key}.name", f"there is no {self.what} {name!r}", f"{hint}There are: {', '.join(self.classes)}"
            )
        cls = self.classes[name]
        hints = typing.get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        checked = {}
        for option, value in options.items():
            if option not in known:
                there = f"It takes: {', '.join(known)}" if known else "It takes none"
                raise ConfigError(f"{key}.{option}", f"{self.what} {name!r} has no such option", there)
            if not _fits(value, hints[option]):
                raise ConfigError(f"{key}.{option}", f"{value!r} is not right", f"It should be {_words(hints[option])}")
            checked[option] = tuple(value) if isinstance(value, list) else value
        try:
            return cls(**checked)
        except ValueError as error:
            raise ConfigError(key, str(error), "") from None


def _fits(value: Any, hint: Any) -> bool:
    """Whether a TOML value is of the annotated type. An integer is fine where a float is asked for; a bool is not."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, inner[0]) for item in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(option) for option in inner if option is not type(None))
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, inner))
    if origin is tuple:
        return f"a list of {_words(inner[0])}"
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}
    return names.get(hint, "a table" if origin is not None else str(hint))
