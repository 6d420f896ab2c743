"""Finding an environment by name, import path or file, and giving it its options, checked before anything runs."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.environments.environment import Environment
from strop.errors import ConfigError, EnvironmentProblem, StropError
from strop.rollouts import derive_seed

#: Built-in environments by name.
BUILT_IN: dict[str, str] = {
    "arithmetic": "strop.environments.arithmetic:Arithmetic",
    "code": "strop.environments.code:Code",
    "faults": "strop.environments.faults:Faults",
    "gymnasium": "strop.environments.gymnasium_games:GymnasiumText",
    "harbor": "strop.environments.harbor:Harbor",
    "nemo_gym": "strop.environments.nemo_gym:NemoGym",
    "pivots": "strop.environments.pivots:Pivots",
    "reasoning_gym": "strop.environments.reasoning_gym:ReasoningGym",
    "shopkeeper": "strop.environments.shopkeeper:Shopkeeper",
    "textarena": "strop.environments.textarena_games:TextArena",
    "worker": "strop.environments.workers:WorkerEnvironment",
}


def load_environment(spec: str, options: Mapping[str, object] | None = None) -> Environment:
    """Load and make an environment.

    Args:
        spec: the name of a built-in one, "package.module:Class", or "path/to/file.py:Class".
        options: keyword arguments of the class, checked against its annotations.

    Raises:
        EnvironmentProblem: it can't be found, imported or made, or is no `Environment`.
        ConfigError: an option is unknown, missing, of the wrong type, or refused by the environment.
    """
    environment_class = find_class(spec)
    keywords = dict(options or {})
    _check_options(environment_class, spec, keywords)
    try:
        return environment_class(**keywords)
    except StropError:
        raise
    except Exception as error:
        raise EnvironmentProblem(
            f"The environment {spec!r} could not be made: {type(error).__name__}: {error}. Its constructor should "
            "accept these options, or raise strop.errors.ConfigError that says what would be right."
        ) from error


def find_class(spec: str) -> type[Environment]:
    """The class that `spec` names. Raises EnvironmentProblem if there is none, or it is no `Environment`."""
    path, colon, class_name = BUILT_IN.get(spec, spec).rpartition(":")
    if not colon or not path or not class_name:
        close = difflib.get_close_matches(spec, BUILT_IN, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise EnvironmentProblem(
            f"There is no environment {spec!r}.{hint} Built in are {', '.join(sorted(BUILT_IN))}; one of yours is "
            'named "package.module:Class" or "path/to/file.py:Class".'
        )
    module = _module_of_file(Path(path), spec) if path.endswith(".py") else _module_of_package(path, spec)
    found = getattr(module, class_name, None)
    if found is None:
        names = [name for name, value in vars(module).items() if _is_environment(value) and value is not Environment]
        there = f"it has {', '.join(sorted(names))}" if names else "it has no class derived from Environment"
        raise EnvironmentProblem(f"{path} has no class {class_name!r}: {there}.")
    if not _is_environment(found):
        raise EnvironmentProblem(
            f"{spec} is not an environment: {class_name} must be a class derived from strop.environments.Environment."
        )
    return typing.cast(type[Environment], found)


def _is_environment(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Environment)


def _module_of_package(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise EnvironmentProblem(
                f"The environment {spec!r} is in a module that can't be found: there is no {error.name!r}. "
                "Install it, or name the file instead (path/to/file.py:Class)."
            ) from error
        raise _broken(spec, error) from error
    except StropError:
        raise
    except Exception as error:
        raise _broken(spec, error) from error


def _module_of_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise EnvironmentProblem(f"The environment {spec!r} is in a file that does not exist: {path.absolute()}.")
    name = f"strop_user_{path.stem}_{derive_seed(str(path.resolve())):x}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise EnvironmentProblem(f"{path} can't be imported as a Python module.")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pickles look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(spec, error) from error
    return module


def _broken(spec: str, error: Exception) -> EnvironmentProblem:
    where = ""
    if isinstance(error, SyntaxError):
        where = f" (line {error.lineno})"
    elif error.__traceback__ is not None:
        *_, last = _frames(error)
        where = f" ({last})"
    return EnvironmentProblem(
        f"The environment {spec!r} can't be imported: {type(error).__name__}: {error}{where}. Its module should import "
        "without error by itself."
    )


def _frames(error: Exception) -> list[str]:
    """Where the error passed: file name and line, outermost first."""
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(f"{Path(at.tb_frame.f_code.co_filename).name}, line {at.tb_lineno}")
        at = at.tb_next
    return frames


def _check_options(environment_class: type[Environment], spec: str, options: dict[str, object]) -> None:
    """Refuse options that the class does not take, and values that its annotations rule out."""
    parameters = inspect.signature(environment_class).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name: p for name, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    known = ", ".join(named) or "none"
    for name in options:
        if name not in named and not takes_any:
            raise ConfigError(f"environment.options.{name}", f"{spec} has no such option", f"It has: {known}.")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(f"environment.options.{name}", f"{spec} needs it", f"Its options are: {known}.")
    try:
        annotations = typing.get_type_hints(environment_class.__init__)
    except (NameError, AttributeError, TypeError):  # annotations that only a type checker can read
        return
    for name, value in options.items():
        if name in annotations:
            _check_type(name, value, annotations[name])


def _check_type(name: str, value: object, annotation: Any) -> None:
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        adapter = TypeAdapter(annotation)
    except PydanticUserError:  # an annotation beyond plain data
        return
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        wrong = f"it is {value!r}"
        raise ConfigError(f"environment.options.{name}", wrong, f"{problem['msg']}.") from None
