"""The shape of the house: which room may import which, and what stays unloaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "strop"
#: From the bottom: a room imports its own layer and those below it.
LAYERS = [
    {"__init__", "rollouts", "errors", "config", "statistics", "serving", "kernels"},
    {"runs", "costs"},
    {"models", "data", "environments", "sandboxes", "sampling", "learning", "weights"},
    {"agents", "gateway", "cluster"},
    {"training", "evaluation", "planning"},
    {"cli", "console", "doctor", "service", "dashboard"},
]
LAYER = {room: number for number, rooms in enumerate(LAYERS) for room in rooms}


def imports(path: Path) -> set[str]:
    """Rooms of strop that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("strop.")}
    return {room for room in found if room in LAYER or (SOURCE / room).exists()}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows_point_down(path):
    room = room_of(path)
    assert room in LAYER, f"{room} is a new room: give it a layer"
    for other in imports(path):
        assert LAYER[other] <= LAYER[room], f"{room} imports {other}, which is above it"


@pytest.mark.parametrize(
    "module", ["strop", "strop.cli", "strop.config", "strop.rollouts", "strop.costs", "strop.runs"]
)
def test_importing_a_door_loads_nothing_heavy(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'ray', 'vllm') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_file_says_what_lives_in_it(path):
    assert ast.get_docstring(ast.parse(path.read_text())), "the file has no docstring"
