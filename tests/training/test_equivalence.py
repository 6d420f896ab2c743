"""Asynchronous with a staleness of 0 is synchronous, bit for bit, with the real sampler and learner.

The reference is a loop written out by hand: one attempt after another, no collector, nothing in flight beside it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tiny import make_model

from strop.config import parse_recipe
from strop.models.load import load_model
from strop.rollouts import Group
from strop.runs import files
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.runs.verify import verify_run
from strop.training.rl import RLUpdate
from strop.training.train import build, train

LETTERS = Path(__file__).parents[1] / "letters.py"
STEPS = 4


def recipe(model: Path, *, delay: float = 0.0, **collect: Any) -> Any:
    rl = {"kind": "rl", "name": "rl", "steps": STEPS, "schedule": {"learning_rate": 2e-3}, "checkpoints": {"every": 2}}
    return parse_recipe(
        {
            "name": "equal",
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": {
                "name": f"{LETTERS}:Letters", "options": {"delay": delay}, "agent": {"max_tokens": 12},
            },
            "evaluation": {"tasks": 4, "every": 2},
            "stages": [rl | {"collect": {"groups": 3, "group_size": 3, **collect}}],
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("equal") / "model")


def hashes(folder: Path) -> dict[str, str]:
    return {file.name: files.sha256(file) for file in sorted(folder.glob("*.safetensors"))}


async def by_hand(run: Run, folder: Path) -> None:
    """The synchronous loop."""
    shop = build(run, load_model(run.recipe.model.name))
    (stage,) = run.recipe.stages
    source, seed, update = shop.tasks(stage), shop.seed(stage.name), RLUpdate(stage, shop)
    shop.learner.begin_stage()
    for step in range(stage.steps):
        groups = []
        for number in range(3 * step, 3 * step + 3):
            task, runner = source(number, step)
            members = [await runner.run(f"rl-{number:06d}", member, task, seed) for member in range(3)]
            groups.append(Group(f"rl-{number:06d}", task, members, step))
        await update(groups, step)
    folder.mkdir()
    shop.learner.save(folder)
    await shop.sampler.close()


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("reference")
    run = Run.create(root / "run", recipe(model))
    asyncio.run(by_hand(run, root / "saved"))
    run.close()
    return hashes(root / "saved")


@pytest.mark.parametrize(("in_flight", "delay"), [(256, 0.0), (256, 0.02), (4, 0.01), (1, 0.0)])
def test_any_number_in_flight_in_any_order_gives_the_weights_of_the_synchronous_loop(
    model, reference, tmp_path, in_flight, delay
):
    run = Run.create(tmp_path / "run", recipe(model, delay=delay, staleness=0, in_flight=in_flight))
    asyncio.run(train(run))
    run.close()
    assert hashes(run.path / "checkpoints" / f"rl-{STEPS:06d}") == reference
    assert [step.metrics["staleness_max"] for step in RunRecord(run.path).steps] == [0.0] * STEPS


@pytest.mark.parametrize("staleness", [1, 2])
def test_asynchronous_runs_keep_their_bound_and_every_token_its_version(model, reference, tmp_path, staleness):
    run = Run.create(tmp_path / "run", recipe(model, delay=0.02, staleness=staleness, in_flight=256))
    asyncio.run(train(run))
    run.close()
    assert verify_run(run.path) == []  # versions never exceed the step, and are never more than the bound behind it
    oldest = max(step.metrics["staleness_max"] for step in RunRecord(run.path).steps)
    assert 1 <= oldest <= staleness
