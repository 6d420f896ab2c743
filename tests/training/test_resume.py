"""Resuming where it is easy to get wrong: before there is a checkpoint, at weights that never changed, at an evaluation
in which nothing was scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model

from strop.config import parse_recipe
from strop.environments.environment import Environment
from strop.errors import AttemptError, EvaluationError
from strop.models.load import load_model
from strop.rollouts import FailureKind, Rollout, Scored, Task
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.training.train import build, train


class Sulking(Environment):
    """Scores everything alike, and held-out tasks not at all while `broken` is set."""

    name = "sulking"
    broken = False

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task(f"{split}-{n}", self.name, ({"role": "user", "content": f"{split} {n}"},)) for n in range(8)]

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        if Sulking.broken and task.id.startswith("test"):
            raise AttemptError(FailureKind.SCORER, "the judge is away")
        return Scored(0.0)


def recipe(folder: Path, **tables: Any) -> Any:
    return parse_recipe(
        {
            "name": "resume",
            "threads": 1,
            "model": {"name": str(folder), "dtype": "float32", **tables.pop("model", {})},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": {"name": f"{__name__}:Sulking", "agent": {"max_tokens": 4}},
            "evaluation": {"tasks": 3},
            "stages": [
                {"kind": "rl", "name": "rl", "steps": 3, "schedule": {"learning_rate": 1e-3},
                 "collect": {"groups": 2, "group_size": 2}, "checkpoints": {"every": 1}},
            ],
            **tables,
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("resume") / "model")


def test_a_checkpoint_of_weights_that_never_changed_can_be_resumed_from(model, tmp_path):
    """No group had variance, so nothing was published: the checkpoint's version is 0, and so is the loaded model's."""
    run = Run.create(tmp_path / "r", recipe(model))
    run.listeners.append(lambda event: _raise(KeyboardInterrupt) if event["kind"] == "checkpoint" else None)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(train(run))
    run.close()
    again = Run.resume(tmp_path / "r")
    asyncio.run(train(again))
    again.close()
    record = RunRecord(tmp_path / "r")
    assert [event["from_checkpoint"] for event in record.of_kind("run") if event["what"] == "ready"] == [
        None,
        "rl-000001",
    ]
    assert [event["step"] for event in record.of_kind("step")] == [0, 1, 2]
    assert len([w for w in record.of_kind("warning") if "no group has any variance" in w["message"]]) == 3


def _raise(error: type[BaseException]) -> None:
    raise error


def test_an_evaluation_in_which_nothing_was_scored_is_made_again_on_resume(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Sulking, "broken", True)
    run = Run.create(tmp_path / "r", recipe(model))
    with pytest.raises(EvaluationError, match="the judge is away"):
        asyncio.run(train(run))
    run.close()
    monkeypatch.setattr(Sulking, "broken", False)
    again = Run.resume(tmp_path / "r")
    asyncio.run(train(again))
    again.close()
    assert [event["failed"] for event in RunRecord(tmp_path / "r").of_kind("evaluation")] == [0, 0]


def test_an_adapter_begins_the_same_in_every_process(model, tmp_path):
    """A run that is killed before its first checkpoint must begin again with the adapter that it began with."""
    begun = []
    for number in range(2):
        torch.manual_seed(number)  # whatever happened before
        run = Run.create(tmp_path / f"r{number}", recipe(model, model={"lora": {"rank": 2}}))
        shop = build(run, load_model(str(model)))
        begun.append({n: p.detach().clone() for n, p in shop.learner.policy.model.named_parameters() if "lora_A" in n})
        run.close()
    assert begun[0] and all(torch.equal(begun[0][name], begun[1][name]) for name in begun[0])
