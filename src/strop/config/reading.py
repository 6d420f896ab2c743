"""Reading recipes: TOML, overrides, and what is wrong with them in words that a user can act on."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from strop.config.recipe import KINDS, Recipe
from strop.config.stages import DataSettings
from strop.config.tables import SandboxSettings, Settings
from strop.errors import ConfigError


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file.
        overrides: "a.b=c" each; c is TOML, or else a plain string. A stage is named: "stages.rl.steps=3".

    Raises:
        ConfigError: names the key, what is wrong and what would be right.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            str(path), "there is no such file", "Name a recipe, for example recipes/quickstart.toml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"it can't be read ({error})", "Name a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"it is not valid TOML: {error}", "Mend that line") from None
    for override in overrides:
        _override(table, override)
    return parse_recipe(table)


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """A recipe from a parsed TOML table; errors as in `load_recipe`."""
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise _explain(error, table) from None


def parse_data(table: Mapping[str, Any]) -> DataSettings:
    """A stage's data table by itself; errors as in `load_recipe`."""
    try:
        return DataSettings.model_validate(table)
    except ValidationError as error:
        raise _explain(error, table, DataSettings) from None


def parse_sandboxes(table: Mapping[str, Any]) -> SandboxSettings:
    """An environment's `sandboxes` table; errors as in `load_recipe`."""
    try:
        return SandboxSettings.model_validate(table)
    except ValidationError as error:
        raise _explain(error, table, SandboxSettings) from None


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}", "it has no '='", "Write --set a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    parts = key.strip().split(".")
    at: Any = table
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(at, list):
            named = [i for i, entry in enumerate(at) if isinstance(entry, dict) and entry.get("name") == part]
            if not named:
                names = ", ".join(str(entry.get("name")) for entry in at if isinstance(entry, dict))
                raise ConfigError(
                    f"--set {key}", f"there is no {parts[number - 1]} entry named {part!r}", f"There are: {names}"
                )
            if last:
                raise ConfigError(f"--set {key}", "it names a whole stage", f"Name one of its keys: {key}.steps=…")
            at = at[named[0]]
        elif not isinstance(at, dict):
            raise ConfigError(
                f"--set {key}", f"{'.'.join(parts[:number])} is a value, not a table", "Name a key that is"
            )
        elif last:
            at[part] = value
        else:
            at = at.setdefault(part, {})


def _explain(error: ValidationError, table: Mapping[str, Any], root: type[Settings] | None = None) -> ConfigError:
    """The first problem in words a user can act on (the others follow once it is mended)."""
    problem = error.errors()[0]
    location = [part for part in problem["loc"] if part not in KINDS]
    key = _dotted(location, table)
    kind, given = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1], root or Recipe)
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(sorted(known))}"
        return ConfigError(key, "there is no such key", hint)
    if kind == "missing":
        return ConfigError(key, "it is missing", "Add it")
    if kind == "union_tag_not_found":
        return ConfigError(f"{key}.kind", "it is missing", f"Say one of: {', '.join(map(repr, KINDS))}")
    if kind == "union_tag_invalid":
        tag = given.get("kind") if isinstance(given, Mapping) else given
        return ConfigError(
            f"{key}.kind", f"there is no stage kind {tag!r}", f"There are: {', '.join(map(repr, KINDS))}"
        )
    if kind == "value_error":
        return ConfigError(key or "recipe", str(problem["ctx"]["error"]), "")
    message = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return ConfigError(key, f"{given!r} is not right", f"It should be {message}")


def _dotted(location: Iterable[str | int], table: Mapping[str, Any]) -> str:
    """Key as a user writes it: stages by their names."""
    parts: list[str] = []
    at: Any = table
    for part in location:
        try:
            at = at[part]
        except (KeyError, IndexError, TypeError):
            at = None
        if isinstance(part, int):
            name = at.get("name") if isinstance(at, Mapping) else None
            parts.append(str(name if name is not None else part))
        else:
            parts.append(part)
    return ".".join(parts)


def _known_keys(location: Sequence[str | int], root: type[Settings]) -> list[str]:
    """Keys of the table at `location` of a recipe (or of another table)."""
    model: Any = root
    for part in location:
        if isinstance(part, int):
            continue
        if part in KINDS:
            model = KINDS[part]
        elif isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    """The settings class inside an annotation such as `EvaluationSettings | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_in(inner)) is not None:
            return found
    return None
