"""What docs/algorithms.md shows is what there is, and works."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import torch

from strop.config import parse_recipe
from strop.learning import ADVANTAGES, LOSSES, Tokens, make_advantage, make_loss
from strop.learning.corrections import CORRECTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def documented(heading: str) -> set[str]:
    """The names in the first column of the table with that heading."""
    table = PAGE.split(f"| `{heading}` |")[1].split("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_the_tables_name_what_there_is():
    assert documented("advantage.name") == set(ADVANTAGES.classes)
    assert documented("loss.name") == set(LOSSES.classes)
    assert documented("corrections.name") == set(CORRECTIONS.classes)


@pytest.mark.parametrize("text", RECIPES)
def test_every_recipe_is_one(text):
    stage = {"kind": "rl", "name": "rl", "steps": 2, "schedule": {"learning_rate": 1e-5}, **tomllib.loads(text)}
    recipe = parse_recipe({"name": "documented", "environment": {"name": "arithmetic"}, "stages": [stage]})
    make_advantage(recipe.stages[0].advantage.spec)
    make_loss([part.spec for part in recipe.stages[0].loss])


def test_the_component_of_ones_own_works():
    source = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    before = dict(LOSSES.classes)
    try:
        exec(source.group(1), {"__name__": "documented"})
        ((_, _, component),) = make_loss([{"name": "unlikelihood"}]).components
    finally:
        LOSSES.classes = before
    none = torch.zeros(1)
    tokens = Tokens(torch.tensor([0.25]).log(), none, none, none.long(), none.long(), {})
    assert component(tokens)[0].item() == pytest.approx(-torch.tensor(0.75).log().item())
