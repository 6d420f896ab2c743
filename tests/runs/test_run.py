"""The run directory under fault: what is written is whole, what is damaged is named, nobody shares a run."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest

from strop.config import parse_recipe
from strop.errors import RunError
from strop.rollouts import Failed, FailureKind, FinishReason, Group, ModelCall, Rollout, Scored, Task
from strop.runs import files
from strop.runs.events import BadLine, LineLog, decode_line, encode_line, read_lines
from strop.runs.journal import Entry, Journal
from strop.runs.run import Run, check_checkpoint
from strop.runs.store import read_groups, read_state, write_groups

RECIPE = parse_recipe(
    {
        "name": "test",
        "environment": {"name": "arithmetic"},
        "stages": [
            {"kind": "sft", "name": "warmup", "steps": 2, "schedule": {"learning_rate": 1e-4}},
            {"kind": "rl", "name": "rl", "steps": 4, "schedule": {"learning_rate": 1e-5}},
        ],
    }
)


def sample_group() -> Group:
    task = Task(
        "t", "e", ({"role": "user", "content": "é\u2028?"},), ({"type": "function"},), {"answer": 1}, {"d": "x"}
    )
    calls = [
        ModelCall(None, [1, 2], [3], [-0.1000000014901161], [0], FinishReason.STOP, 1, 0.5, 0.75),
        ModelCall(0, [4], [5, 6], [-2.0, -1e-7], [0, 1], FinishReason.LENGTH),
        ModelCall(None, [9], [], [], [], FinishReason.LENGTH),
    ]
    scored = Rollout(
        "g/0", "t", "e", 0, 2**62, calls, [{"role": "assistant", "content": "5"}], Scored(1.5, {"m": 2.0}, True)
    )
    failed = Rollout("g/1", "t", "e", 1, 7, [], [], Failed(FailureKind.SANDBOX, "it died"), tries=3, forks=1)
    return Group("g", task, [scored, failed], 4)


def test_groups_come_back_as_they_were_stored(tmp_path):
    path = tmp_path / "rl-000000.parquet"
    group = sample_group()
    write_groups(path, [(group, "trained")], {"next": 9})
    (back, used), *rest = read_groups(path)
    assert used == "trained" and not rest and read_state(path) == {"next": 9}
    assert back.task == group.task and back.id == group.id and back.step == group.step
    assert back.rollouts[1] == group.rollouts[1]
    for call, original in zip(back.rollouts[0].calls, group.rollouts[0].calls, strict=True):
        assert call.logprobs == [pytest.approx(value, rel=1e-7) for value in original.logprobs]
        assert (call.parent, call.prompt, call.tokens, call.versions) == (
            original.parent, original.prompt, original.tokens, original.versions,
        )  # fmt: skip


def test_the_journal_gives_back_attempts_exactly_and_skips_a_cut_line(tmp_path):
    journal = Journal(tmp_path / "rl.journal")
    group = sample_group()
    for rollout in group.rollouts:
        journal.append(Entry(3, 1, rollout))
    journal.close()
    with (tmp_path / "rl.journal").open("ab") as file:
        file.write(b'{"group":4,"beg')
    again = Journal(tmp_path / "rl.journal")
    assert [entry.rollout for entry in again.found] == group.rollouts
    again.keep_only(again.found[1:])
    again.append(Entry(8, 2, group.rollouts[0]))
    again.close()
    assert [entry.group for entry in Journal(tmp_path / "rl.journal").found] == [3, 8]


@pytest.mark.parametrize("at", range(5, 120, 7))
def test_a_flipped_bit_in_a_line_is_noticed(at):
    line = encode_line({"kind": "step", "metrics": {"loss": 0.25, "note": "x" * 80}})
    changed = line[:at] + chr(ord(line[at]) ^ 1) + line[at + 1 :]
    with pytest.raises(ValueError):
        decode_line(changed)


def test_event_lines_survive_a_kill_in_the_middle_of_one(tmp_path):
    log = LineLog(tmp_path / "events.jsonl")
    log.append({"kind": "a"})
    log.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"kind":"b"')
    assert isinstance(list(read_lines(tmp_path / "events.jsonl"))[-1], BadLine)
    log = LineLog(tmp_path / "events.jsonl")
    assert log.cut == 11
    log.append({"kind": "c"})
    assert [event["kind"] for event in read_lines(tmp_path / "events.jsonl")] == ["a", "c"]


def _killed_while_writing(path: Path) -> None:
    with files.written_whole(path) as beside:
        beside.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_between_write_and_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"old": 1})
    process = multiprocessing.get_context("fork").Process(target=_killed_while_writing, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert json.loads(path.read_text()) == {"old": 1}
    assert [leftover.name for leftover in files.remove_leftovers(tmp_path)] == [f".x.json.{process.pid}.part"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def _full(path: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # the kernel refuses further bytes, as a full disk does
    try:
        files.write_json(path, {"new": "x" * 5000})
    except RunError as error:
        os._exit(7 if "can't be written" in str(error) else 1)
    os._exit(0)


def test_a_full_disk_is_an_error_and_harms_nothing(tmp_path):
    path = tmp_path / "x.json"
    files.write_json(path, {"old": 1})
    process = multiprocessing.get_context("fork").Process(target=_full, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 7
    assert json.loads(path.read_text()) == {"old": 1} and len(list(tmp_path.iterdir())) == 1


def test_two_processes_cannot_have_one_run(tmp_path):
    run = Run.create(tmp_path / "r", RECIPE)
    with pytest.raises(RunError, match="in use by another process"):
        Run.resume(tmp_path / "r")
    run.close()
    Run.resume(tmp_path / "r").close()


def test_a_run_is_not_begun_over_another(tmp_path):
    Run.create(tmp_path / "r", RECIPE).close()
    with pytest.raises(RunError, match="--resume"):
        Run.create(tmp_path / "r", RECIPE)


def test_what_was_asked_comes_back_on_resume(tmp_path):
    Run.create(tmp_path / "r", RECIPE).close()
    run = Run.resume(tmp_path / "r")
    assert run.recipe == RECIPE
    run.close()


def save(text: str):
    def write(folder: Path) -> None:
        (folder / "weights").write_text(text)

    return write


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path):
    run = Run.create(tmp_path / "r", RECIPE)
    run.checkpoint("warmup", 2, save("w"), {"version": 2})
    run.checkpoint("rl", 1, save("a"), {"version": 3})
    run.checkpoint("rl", 2, save("b"), {"version": 4})
    assert [c.path.name for c in run.checkpoints()] == ["warmup-000002", "rl-000001", "rl-000002"]
    newest = run.path / "checkpoints" / "rl-000002" / "weights"
    data = bytearray(newest.read_bytes())
    data[0] ^= 4
    newest.write_bytes(data)
    assert list(check_checkpoint(newest.parent)) == ["rl-000002/weights has changed since it was written"]
    found = run.newest_whole_checkpoint()
    assert found is not None and (found.stage, found.step) == ("rl", 1)
    run.close()
    assert "rl-000002/weights has changed" in (run.path / "events.jsonl").read_text()


def test_old_checkpoints_of_a_stage_go_and_other_stages_keep_theirs(tmp_path):
    run = Run.create(tmp_path / "r", RECIPE)
    run.checkpoint("warmup", 2, save("w"), {})
    for step in range(1, 5):
        run.checkpoint("rl", step, save(str(step)), {})
    assert [c.path.name for c in run.checkpoints()] == ["warmup-000002", "rl-000003", "rl-000004"]
    run.close()


def test_the_clock_leaves_out_the_time_in_which_nobody_worked(tmp_path):
    run = Run.create(tmp_path / "r", RECIPE)
    run._began -= 100  # as if it had worked for 100 s
    run.log("run", what="stopped")
    run.close()
    again = Run.resume(tmp_path / "r")
    assert 100 <= again.clock < 110
    again.close()
