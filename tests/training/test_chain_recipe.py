"""recipes/chain.toml in small, on the real start model: warm-up, reinforcement learning, distillation into a fresh student."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from strop.config import load_recipe
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.runs.store import read_groups, trained
from strop.runs.verify import verify_run
from strop.training.train import train

RECIPE = Path(__file__).parents[2] / "recipes" / "chain.toml"
SMALL = (
    "threads=1",
    "sampler.max_context=384",
    "evaluation.tasks=4",
    "environment.agent.max_turns=2",
    "environment.agent.max_tokens=16",
    "stages.warmup.steps=2",
    "stages.warmup.schedule.warmup_steps=1",
    "stages.warmup.batch_size=2",
    "stages.rl.steps=1",
    "stages.rl.schedule.warmup_steps=0",
    "stages.rl.collect={groups=2, group_size=2}",
    "stages.rl.gate={gain_above=-1.0}",
    "stages.imitation.steps=1",
    "stages.imitation.schedule.warmup_steps=0",
    "stages.imitation.collect.groups=2",
    "stages.imitation.stored={stage='rl', best=1}",
    "stages.student.steps=2",
    "stages.student.schedule.warmup_steps=1",
    "stages.student.collect={groups=4, group_size=1}",
)


@pytest.mark.model
@pytest.mark.timeout(900)  # half a minute of one core, but not on a machine that is busy with other things
def test_the_whole_chain_runs(tmp_path):
    run = Run.create(tmp_path / "chain", load_recipe(RECIPE, SMALL))
    summary = asyncio.run(train(run))
    run.close()
    record = RunRecord(run.path)
    assert verify_run(run.path) == []
    assert [row["stage"] for row in summary["scores"]] == ["start", "warmup", "rl", "imitation", "student"]
    assert [(step.stage, step.step) for step in record.steps] == [
        ("warmup", 1), ("warmup", 2), ("rl", 1), ("imitation", 1), ("student", 1), ("student", 2)]  # fmt: skip
    names = [found.evaluation.name for found in record.evaluations]
    assert names == ["start", "warmup", "rl", "imitation start", "imitation", "student"]
    distances = [step.metrics["reverse_kl"] for step in record.steps if step.stage == "student"]
    assert all(distance > 0 for distance in distances), "a fresh student is not where its teacher is"
    assert all(step.metrics["grad_norm"] > 0 for step in record.steps if step.stage == "student")
    groups = trained(read_groups(run.path / "rollouts" / "student-000000.parquet"))
    assert all(len(group.rollouts) == 1 and group.rollouts[0].sampled_tokens for group in groups)
