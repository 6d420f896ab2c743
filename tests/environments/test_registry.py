"""Loading environments: by name, path or file; and what is said when that can't be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from strop.environments import BUILT_IN, Environment, load_environment
from strop.errors import ConfigError, EnvironmentProblem, StropError

MINE = """
from __future__ import annotations
from dataclasses import dataclass
from strop.environments import Environment

@dataclass
class Knob:
    turns: int

class Mine(Environment):
    name = "mine"
    def __init__(self, level: int, words: list[str] | None = None):
        if level > 9:
            raise RuntimeError("level goes up to nine")
        self.level, self.words = level, words

class Loose(Environment):
    def __init__(self, **options):
        self.options = options

def helper():
    pass
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


NEED_OPTIONS = {"code", "faults", "gymnasium", "harbor", "nemo_gym", "pivots", "textarena", "worker"}


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - NEED_OPTIONS))
def test_built_in_environments_load_by_name(name: str) -> None:
    options = {"task": "chain_sum"} if name == "reasoning_gym" else {}
    environment = load_environment(name, options)
    assert environment.name == name and isinstance(environment, Environment)


def test_a_file_and_a_module_load(mine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment: Any = load_environment(f"{mine}:Mine", {"level": 3, "words": ["a"]})
    assert (environment.name, environment.level, environment.words) == ("mine", 3, ["a"])
    monkeypatch.syspath_prepend(Path(mine).parent)
    assert load_environment("mine:Mine", {"level": 3}).name == "mine"
    loose: Any = load_environment(f"{mine}:Loose", {"anything": 1})
    assert loose.options == {"anything": 1}


@pytest.mark.parametrize(
    ("spec", "options", "error", "said"),
    [
        ("shopkeepr", {}, EnvironmentProblem, "Did you mean 'shopkeeper'"),
        ("", {}, EnvironmentProblem, "There is no environment ''"),
        ("mine.py", {}, EnvironmentProblem, "path/to/file.py:Class"),
        (":Mine", {}, EnvironmentProblem, "There is no environment"),
        ("nowhere/mine.py:Mine", {}, EnvironmentProblem, "does not exist"),
        ("no_such_package.module:Mine", {}, EnvironmentProblem, "there is no 'no_such_package'"),
        ("{mine}:Yours", {}, EnvironmentProblem, "it has Loose, Mine"),
        ("{mine}:helper", {}, EnvironmentProblem, "is not an environment"),
        ("{mine}:Knob", {}, EnvironmentProblem, "is not an environment"),
        ("{mine}:Mine", {}, ConfigError, "environment.options.level: .* needs it"),
        ("{mine}:Mine", {"level": 3, "lvl": 2}, ConfigError, "environment.options.lvl: .* no such option"),
        ("{mine}:Mine", {"level": "3"}, ConfigError, "environment.options.level: it is '3'. .*valid integer"),
        ("{mine}:Mine", {"level": True}, ConfigError, "valid integer"),
        ("{mine}:Mine", {"level": 3, "words": "ab"}, ConfigError, "valid list"),
        ("{mine}:Mine", {"level": 10}, EnvironmentProblem, "RuntimeError: level goes up to nine"),
        ("shopkeeper", {"fault_rate": "often"}, ConfigError, "valid number"),
        ("shopkeeper", {"fault_rate": 2}, ConfigError, "within 0 and 0.6"),
        ("arithmetic", {"operations": ["+", "?"]}, ConfigError, "'\\?' is not an operation"),
        ("reasoning_gym", {}, ConfigError, "environment.options.task"),
        ("reasoning_gym", {"task": "chain_sums"}, ConfigError, "no 'chain_sums'"),
        ("reasoning_gym", {"task": "chain_sum", "difficulty": {"terms": 2}}, ConfigError, "It takes: min_terms"),
        ("reasoning_gym", {"task": "chain_sum", "difficulty": {"min_terms": 99}}, ConfigError, "refuses"),
    ],
)
def test_what_can_not_be_loaded_is_said(
    spec: str, options: dict[str, Any], error: type[StropError], said: str, mine: str
) -> None:
    with pytest.raises(error, match=said):
        load_environment(spec.replace("{mine}", mine), options)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def broken(:", r"SyntaxError.*line 1"),
        ("import no_such_thing", "No module named 'no_such_thing'.*mine.py, line 1"),
        ("x = 1\n\n1 / 0", "ZeroDivisionError.*mine.py, line 3"),
    ],
)
def test_a_broken_file_is_named_with_its_line(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(EnvironmentProblem, match=said):
        load_environment(f"{tmp_path / 'mine.py'}:Mine")


def test_the_door_imports_nothing_heavy() -> None:
    code = (
        "import sys, strop.environments, strop.agents; "
        "print([name for name in ('torch', 'transformers', 'renderers', 'reasoning_gym', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
