"""`strop replay`: a stored step gives, in the learner, what it gave; a half of the loop works alone."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import make_model

from strop.config import parse_recipe
from strop.errors import ConfigError, RunError
from strop.runs import files
from strop.runs.events import encode_line, read_lines
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.runs.verify import verify_run
from strop.training.replay import replay_step, show_replay
from strop.training.train import train

LETTERS = Path(__file__).parents[1] / "letters.py"


def recipe(model: Path, **tables: Any) -> Any:
    return parse_recipe(
        {
            "name": "replay",
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": {"name": f"{LETTERS}:Letters", "agent": {"max_tokens": 8}},
            "evaluation": {"tasks": 0},
            "stages": [
                {"kind": "sft", "name": "warmup", "steps": 2, "batch_size": 2, "demonstrations": 4,
                 "schedule": {"learning_rate": 1e-3}},
                {"kind": "rl", "name": "rl", "steps": 4, "schedule": {"learning_rate": 1e-3},
                 "collect": {"groups": 2, "group_size": 3}, "checkpoints": {"every": 2, "keep": 1}},
            ],
            **tables,
        }
    )  # fmt: skip


def train_in(path: Path, asked: Any) -> Path:
    run = Run.create(path, asked)
    asyncio.run(train(run))
    run.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("replay") / "model")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_in(tmp_path_factory.mktemp("replay") / "run", recipe(model))


def test_steps_give_what_they_gave(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    last = asyncio.run(replay_step(whole, 4))
    assert (last.stage, last.begun_from, last.steps) == ("rl", "warmup-000002", 4)
    assert last.good and last.weights_equal and last.checkpoint == "rl-000004" and "loss" in last.replayed
    first = asyncio.run(replay_step(whole, 1, stage="warmup"))
    assert first.good and first.weights_equal is None and first.begun_from == "" and first.steps == 1
    assert show_replay(last)[1] == 0
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_the_tokens_of_an_attempt_are_computed_again(whole):
    replay = asyncio.run(replay_step(whole, 2, attempt=3))
    (file,) = [file for file in RunRecord(whole).rollout_files if file.step == 2]
    rollout = RunRecord(whole).attempts(file)[3].rollout
    assert replay.attempt == rollout.id
    assert [check.token for check in replay.tokens] == [token for call in rollout.calls for token in call.tokens]
    assert [check.recomputed for check in replay.tokens] == pytest.approx(
        [logprob for call in rollout.calls for logprob in call.logprobs], abs=2e-5
    )
    with pytest.raises(RunError, match="attempts 0 to 5, and no 6"):
        asyncio.run(replay_step(whole, 2, attempt=6))


def test_what_was_not_trained_is_refused(whole):
    with pytest.raises(RunError, match=r"no step 5.*warmup 1 to 2, rl 1 to 4"):
        asyncio.run(replay_step(whole, 5))
    with pytest.raises(RunError, match="trained on given examples"):
        asyncio.run(replay_step(whole, 1, stage="warmup", attempt=0))


def test_another_loss_and_other_weights_are_noticed(whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    lines: list[Any] = list(read_lines(run / "events.jsonl"))
    for line in lines:
        if line["kind"] == "step" and line["step"] == 3:
            line["metrics"]["loss"] += 1e-6
    (run / "events.jsonl").write_text("".join(map(encode_line, lines)))
    checkpoint = run / "checkpoints" / "rl-000004"
    data = bytearray((checkpoint / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(data)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digest = {"model.safetensors": files.sha256(checkpoint / "model.safetensors")}
    files.write_json(checkpoint / "manifest.json", manifest | digest)
    replay = asyncio.run(replay_step(run, 4))
    assert list(replay.different) == ["loss"] and replay.weights_equal is False
    assert not replay.good and show_replay(replay)[1] == 1


def test_a_batch_that_changed_is_not_replayed(whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    shutil.copyfile(run / "rollouts" / "rl-000000.parquet", run / "rollouts" / "rl-000001.parquet")
    with pytest.raises(RunError, match=r"rl-000001\.parquet has changed"):
        asyncio.run(replay_step(run, 4))


def test_the_halves_of_the_loop_work_alone(whole, model, tmp_path):
    collected = train_in(tmp_path / "collected", recipe(model, debug={"only": "rollouts"}))
    assert len(list((collected / "rollouts").glob("rl-00000?.parquet"))) == 4
    assert RunRecord(collected).of_kind("step", "checkpoint", "evaluation") == []
    assert verify_run(collected) == []
    trained = train_in(tmp_path / "trained", recipe(model, debug={"only": "training", "batches": str(whole)}))
    assert RunRecord(trained).cost_points[-1].ledger["tokens"].get("rl", {}).get("sampled", 0) <= 4 * 8  # the canary's
    for name in ("model.safetensors", "learner.safetensors"):
        theirs, mine = (run / "checkpoints" / "rl-000004" / name for run in (whole, trained))
        assert files.sha256(theirs) == files.sha256(mine)


def test_training_alone_needs_all_its_batches(whole, model, tmp_path):
    (tmp_path / "few" / "rollouts").mkdir(parents=True)
    shutil.copy(whole / "rollouts" / "rl-000000.parquet", tmp_path / "few" / "rollouts")
    asked = recipe(model, debug={"only": "training", "batches": str(tmp_path / "few")})
    with pytest.raises(ConfigError, match=r"has the batches of 1 steps of rl. At most 1 steps"):
        train_in(tmp_path / "r", asked)
    with pytest.raises(ConfigError, match="batches names the run"):
        recipe(model, debug={"only": "training"})
