"""A run directory is readable at any moment of its life, by its files alone."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from synthetic import Writer, evaluate, make_run

from strop.config import parse_recipe
from strop.errors import RunError
from strop.runs.reading import RunRecord, list_runs, open_run
from strop.runs.run import Run
from strop.runs.turns import turns


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    return make_run(tmp_path_factory.mktemp("runs") / "made-up")


def test_steps_evaluations_and_files_come_in_order(run: RunRecord) -> None:
    assert [(s.stage, s.step) for s in run.steps] == [("warmup", n) for n in range(1, 5)] + [
        ("rl", n) for n in range(1, 13)
    ]
    assert [found.evaluation.name for found in run.evaluations] == ["start", "warmup", "rl 4", "rl 8", "rl"]
    assert [name for name, _ in run.milestones] == ["start", "warmup", "rl"]
    labels = [file.label for file in run.rollout_files]
    assert labels[:3] == ["evaluation start", "evaluation warmup", "rl step 1"]
    assert labels.index("evaluation rl-4") == labels.index("rl step 4") + 1
    assert run.state == "finished" and run.summary is not None and not run.damaged


def test_attempts_come_back_as_they_were_stored(run: RunRecord) -> None:
    attempts = run.attempts(run.find(step=3, stage="rl"))
    assert len(attempts) == 32
    assert {attempt.used for attempt in attempts} == {"trained", "no variance"}
    assert all(attempt.group.task.messages[1]["content"].startswith("Synthetic question") for attempt in attempts)
    failed = [attempt for attempt in attempts if attempt.failure]
    assert all(a.rollout.reward is None and a.solved is None and a.metrics == {} for a in failed)
    counts = run.attempt_counts
    stored = [attempt for file in run.rollout_files for attempt in run.attempts(file)]
    assert counts["made"] == len(stored)
    assert counts["failed"] == sum(a.failure is not None for a in stored)
    assert counts["solved"] == sum(a.solved is True for a in stored)
    assert counts["scored"] == counts["made"] - counts["failed"]


def test_every_reply_stands_next_to_the_call_that_sampled_it(run: RunRecord) -> None:
    for attempt in run.attempts(run.find(step=1)):
        replies = [turn for turn in turns(attempt) if turn.role == "assistant"]
        assert [turn.call for turn in replies] == attempt.rollout.calls
        assert all(turn.call is None for turn in turns(attempt) if turn.role != "assistant")
    errors = [turn for a in run.attempts(run.find(step=1)) for turn in turns(a) if turn.error]
    assert errors and all(turn.role == "tool" and turn.name == "lookup" for turn in errors)


def test_a_rewritten_history_shows_no_call_next_to_the_wrong_reply(run: RunRecord) -> None:
    attempt = run.attempts(run.find(step=1))[0]
    attempt.rollout.transcript.append({"role": "note", "content": "The agent rewrote its history:"})
    attempt.rollout.transcript.append({"role": "assistant", "content": "said before"})
    assert all(turn.call is None for turn in turns(attempt))


def test_without_a_step_the_last_one_is_shown_and_a_missing_one_is_named(run: RunRecord) -> None:
    assert run.find().label == "rl step 12"
    assert run.find(evaluation="rl 4").label == "evaluation rl-4"
    with pytest.raises(RunError, match=r"no stored attempts of step 99\. There are: evaluation start"):
        run.find(step=99)
    with pytest.raises(RunError, match="no stored attempts of step 3 of warmup"):
        run.find(step=3, stage="warmup")
    with pytest.raises(RunError, match="evaluation 'rl 5'"):
        run.find(evaluation="rl 5")


def test_a_line_that_a_kill_cut_short_is_passed_over_and_counted(run: RunRecord, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    with (copy / "events.jsonl").open("a") as file:
        file.write('{"time":1,"kind":"step","stage":"rl"')
    record = RunRecord(copy)
    assert len(record.steps) == len(run.steps)
    assert len(record.damaged) == 1


def test_a_run_that_has_only_begun_is_readable(tmp_path: Path) -> None:
    recipe = parse_recipe(
        {
            "name": "begun",
            "environment": {"name": "arithmetic"},
            "stages": [{"kind": "rl", "name": "rl", "steps": 2, "schedule": {"learning_rate": 1e-5}}],
        }
    )
    writer = Run.create(tmp_path / "begun", recipe)
    record = RunRecord(tmp_path / "begun")
    assert (record.state, record.steps, record.milestones, record.rollout_files) == ("running", [], [], [])
    assert record.attempt_counts["made"] == 0
    writer.close()
    assert RunRecord(tmp_path / "begun").state == "interrupted"


def test_a_step_that_was_logged_twice_counts_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "twice", 0)
    for reward in (0.1, 0.2):
        writer.event("step", stage="rl", step=0, metrics={"reward": reward})
    (step,) = RunRecord(tmp_path / "twice").steps
    assert step.metrics["reward"] == 0.2


def test_runs_are_found_by_name_or_path_and_listed_newest_first(tmp_path: Path) -> None:
    for number, name in enumerate(["old", "new"]):
        evaluate(Writer(tmp_path / name, number), "start", "", 0, 0.1, 5)
    os.utime(tmp_path / "old" / "events.jsonl", (1, 1))
    assert [record.name for record in list_runs(tmp_path)] == ["new", "old"]
    assert open_run("old", tmp_path).path == open_run(tmp_path / "old").path == (tmp_path / "old").resolve()
    with pytest.raises(RunError, match=r"no run at elsewhere .* new, old"):
        open_run("elsewhere", tmp_path)


def test_damage_is_named(run: RunRecord, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    file = RunRecord(copy).find(step=2)
    data = bytearray(file.path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.path.write_bytes(bytes(data))
    with pytest.raises(RunError, match=r"rl-000001\.parquet is damaged"):
        RunRecord(copy).attempts(file)
    (copy / "config.toml").write_text("name = [")
    with pytest.raises(RunError, match=r"config\.toml is damaged"):
        _ = RunRecord(copy).config
    (copy / "summary.json").write_text("{")
    with pytest.raises(RunError, match=r"summary\.json is damaged"):
        _ = RunRecord(copy).summary
    assert json.loads((run.path / "summary.json").read_text()) == run.summary
