"""What the documentation shows, works: the tutorial's environment and recipe, and every recipe in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from strop.config import load_recipe
from strop.environments.check import check_environment
from strop.training.train import check

ROOT = Path(__file__).parents[1]


def block(page: str, language: str) -> str:
    """The first block of a language on a page."""
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert found, f"{page} has no {language} block"
    return found[1]


@pytest.fixture
def tutorial(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "repeat.py").write_text(block("tutorial.md", "python"))
    (tmp_path / "repeat.toml").write_text(block("tutorial.md", "toml"))
    return tmp_path


def test_the_tutorials_environment_has_nothing_wrong(tutorial):
    found = check_environment("repeat.py:Repeat", {})
    assert found.good, found.problems


def test_the_tutorials_recipe_passes_every_check(tutorial):
    check(load_recipe(tutorial / "repeat.toml"))


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_passes_every_check(recipe):
    check(load_recipe(recipe))


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda path: path.name
)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
