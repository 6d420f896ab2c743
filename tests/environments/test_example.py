"""The example of an environment of one's own is a good one: it passes the check, and its demonstrations earn the reward."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from strop.environments import load_environment
from strop.environments.check import check_environment, show_check
from strop.rollouts import Rollout

SPEC = f"{Path(__file__).parents[2] / 'examples' / 'library.py'}:Library"


def test_the_example_passes_the_check() -> None:
    check = check_environment(SPEC)
    assert check.good and not check.advice, show_check(check)


async def test_its_demonstrations_are_right() -> None:
    environment: Any = load_environment(SPEC)
    shown = environment.demonstrations(40, random.Random(0))
    assert {len(demonstration.messages) for demonstration in shown} == {4, 6, 8}  # one, two or three pages
    for demonstration in shown:
        session = await environment.start(demonstration.task, 0)
        rollout = Rollout("g/0", demonstration.task.id, environment.name, 0, 0, transcript=list(demonstration.messages))
        assert (await session.score(rollout)).solved
        rollout.transcript[-1] = {"role": "assistant", "content": "It has 1 pages."}
        assert not (await session.score(rollout)).solved


def test_the_shortest_one_of_the_guide_passes_too(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "how-to-environment.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(import random.*?)```", guide, re.DOTALL)
    assert code is not None
    (tmp_path / "reverse.py").write_text(code[1], encoding="utf-8")
    check = check_environment(f"{tmp_path / 'reverse.py'}:Reverse", {"length": 3})
    assert check.good and not check.advice, show_check(check)
