"""A whole recipe on a tiny random model: what is on disk afterwards is what the design promises."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tiny import make_model

from strop.config import Recipe, parse_recipe
from strop.runs.reading import RunRecord
from strop.runs.run import Run, check_checkpoint
from strop.training.train import train

LETTERS = Path(__file__).parents[1] / "letters.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


def chain(model: Path, **collect: int) -> Recipe:
    shop = {
        "name": "shopkeeper",
        "options": {"steps": [2]},
        "agent": {"kind": "tool_loop", "max_tokens": 8, "max_turns": 2},
    }
    return parse_recipe(
        {
            "name": "chain",
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"slots": 8, "max_context": 2048},
            "environment": {"name": "arithmetic", "agent": {"max_tokens": 6}},
            "evaluation": {"tasks": 5, "every": 2},
            "stages": [
                {
                    "kind": "sft",
                    "name": "warmup",
                    "steps": 2,
                    "batch_size": 2,
                    "demonstrations": 8,
                    "environment": shop,
                    "evaluation": {"tasks": 2},
                    "schedule": {"learning_rate": 1e-3},
                },
                {
                    "kind": "rl",
                    "name": "rl",
                    "steps": 3,
                    "schedule": {"learning_rate": 1e-3},
                    "collect": {"groups": 2, "group_size": 3, **collect},
                    "advantage": {"name": "grpo"},
                    "environment": {"name": f"{LETTERS}:Letters", "agent": {"max_tokens": 6}},
                },
            ],
        }
    )


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory) -> RunRecord:
    path = tmp_path_factory.mktemp("runs") / "chain"
    run = Run.create(path, chain(model))
    asyncio.run(train(run))
    run.close()
    return RunRecord(path)


def test_the_summary_has_what_its_schema_says(finished):
    summary = json.loads((finished.path / "summary.json").read_text())
    assert [row["stage"] for row in summary["scores"]] == ["start", "warmup", "rl"]
    assert all(set(row) == {"stage", "score", "low", "high", "n"} for row in summary["scores"])
    assert set(summary["gain_rl"]) == {"points", "low", "high"}
    assert {"recovery", "seconds", "tokens", "cost_usd", "points_per_usd"} <= set(summary)
    assert summary["tokens"]["sampled"] > 0 and summary["tokens"]["trained"] > 0 and summary["cost_usd"] > 0


def test_the_ledger_adds_up_to_the_clock(finished):
    last = finished.cost_points[-1]
    assert last.seconds() == pytest.approx(last.clock, rel=0.02, abs=0.05)


def test_every_step_and_evaluation_is_there_once(finished):
    assert [(s.stage, s.step) for s in finished.steps] == [
        *(("warmup", n) for n in (1, 2)),
        *(("rl", n) for n in (1, 2, 3)),
    ]
    assert [e.evaluation.name for e in finished.evaluations] == ["start", "warmup", "rl start", "rl 2", "rl"]


def test_every_trained_token_was_sampled_by_the_weights_it_says(finished):
    for file in finished.rollout_files:
        if file.step is None:
            continue
        for attempt in finished.attempts(file):
            for call in attempt.rollout.calls:
                assert len(call.tokens) == len(call.logprobs) == len(call.versions) > 0
                assert set(call.versions) == {1 + file.step}  # two updates of the warm-up came before step 1
                assert all(logprob <= 0 for logprob in call.logprobs)


def test_the_samplers_and_the_learners_logprobs_agree_in_fp32(finished):
    steps = [step for step in finished.steps if step.stage == "rl" and "mismatch_max" in step.metrics]
    assert steps and all(step.metrics["mismatch_max"] < 1e-4 for step in steps)


def test_the_last_checkpoint_loads_in_plain_transformers(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.path / "checkpoints" / "rl-000003"
    assert not list(check_checkpoint(folder))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("What is 7 + 7?", return_tensors="pt")["input_ids"]
    assert model(ids).logits.isfinite().all()


def test_the_same_seed_gives_the_same_weights(model, finished, tmp_path):
    run = Run.create(tmp_path / "again", chain(model))
    asyncio.run(train(run))
    run.close()
    ours, theirs = (path / "checkpoints" / "rl-000003" / "model.safetensors" for path in (run.path, finished.path))
    assert ours.read_bytes() == theirs.read_bytes()


def test_the_asynchronous_loop_stays_in_its_bound(model, tmp_path):
    run = Run.create(tmp_path / "async", chain(model, staleness=1))
    asyncio.run(train(run))
    run.close()
    steps = [step for step in RunRecord(run.path).steps if step.stage == "rl"]
    assert len(steps) == 3 and all(step.metrics["staleness_max"] <= 1 for step in steps)
