"""`strop verify` finds every kind of corruption and names it; a clean run, finished or killed, has none."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import make_model

from strop.config import parse_recipe
from strop.errors import RunError
from strop.rollouts import Failed, FailureKind, Group, Rollout, Scored
from strop.runs import files
from strop.runs.events import encode_line, read_lines
from strop.runs.journal import Entry, Journal
from strop.runs.run import Run
from strop.runs.store import read_groups, read_state, write_groups
from strop.runs.verify import show_verification, verify_run

LETTERS = Path(__file__).parents[1] / "letters.py"


def recipe(model: Path, steps: int = 3) -> Any:
    return parse_recipe(
        {
            "name": "verify",
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": {"name": f"{LETTERS}:Letters", "agent": {"max_tokens": 8}},
            "evaluation": {"tasks": 4},
            "stages": [
                {"kind": "sft", "name": "warmup", "steps": 1, "batch_size": 2, "demonstrations": 4,
                 "schedule": {"learning_rate": 1e-3}},
                {"kind": "rl", "name": "rl", "steps": steps, "schedule": {"learning_rate": 1e-3},
                 "collect": {"groups": 2, "group_size": 3, "staleness": 1}, "checkpoints": {"every": 1, "keep": 3}},
            ],
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of a tiny model, finished."""
    from strop.training.train import train

    root = tmp_path_factory.mktemp("verify")
    run = Run.create(root / "run", recipe(make_model(root / "model")))
    asyncio.run(train(run))
    run.close()
    return root / "run"


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def test_a_finished_run_is_whole(whole):
    assert verify_run(whole) == []
    assert show_verification(whole)[1] == 0


def test_a_killed_run_has_nothing_that_a_resume_does_not_mend(run):
    """As it is when a kill falls between a batch and its record, half an event and half a file later."""
    drop_events(run, lambda event: event.get("what") == "finished" or event.get("file") == "rl-000002.parquet")
    drop_events(run, lambda event: event["kind"] == "step" and event["step"] == 2)
    drop_events(run, lambda event: event["kind"] == "checkpoint" and event["step"] == 3)
    drop_events(run, lambda event: event.get("stage") == "rl" and event.get("what") == "ended")
    drop_events(run, lambda event: event["kind"] == "evaluation" and event["name"] == "rl")
    for left in ("rollouts/rl-rest.parquet", "rollouts/evaluation-rl.parquet", "checkpoints/rl-000003", "summary.json"):
        shutil.rmtree(run / left) if (run / left).is_dir() else (run / left).unlink(missing_ok=True)
    drop_events(run, lambda event: event.get("file") in ("rl-rest.parquet", "evaluation-rl.parquet"))
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"time":1,"clo')
    (run / "rollouts" / ".rl-000003.parquet.77.part").write_bytes(b"half")
    problems = verify_run(run)
    assert len(problems) >= 3 and all(problem.mended for problem in problems), problems
    assert show_verification(run)[1] == 0


def test_where_there_is_no_run_it_says_so(tmp_path):
    with pytest.raises(RunError, match="holds no run"):
        verify_run(tmp_path)


# -- ways to damage a run -------------------------------------------------------------------------------------------


def flip(path: Path, share: float = 0.5) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * share)] ^= 1
    path.write_bytes(data)


def events(run: Path) -> list[dict[str, Any]]:
    return list(read_lines(run / "events.jsonl"))  # type: ignore[arg-type]


def write_events(run: Path, lines: list[dict[str, Any]]) -> None:
    (run / "events.jsonl").write_text("".join(encode_line(line) for line in lines))


def drop_events(run: Path, which: Callable[[dict[str, Any]], bool]) -> None:
    write_events(run, [event for event in events(run) if not which(event)])


def change_events(run: Path, kind: str, change: Callable[[dict[str, Any]], None], place: int = -1) -> None:
    """Change one event of a kind, with a checksum that fits: what only the rules can find."""
    lines = events(run)
    change([line for line in lines if line["kind"] == kind][place])
    write_events(run, lines)


def change_batch(run: Path, name: str, change: Callable[[list[tuple[Group, str]]], Any]) -> None:
    """Rewrite a file of attempts, with a recorded hash that fits."""
    path = run / "rollouts" / name
    groups, state = read_groups(path), read_state(path)
    groups = change(groups) or groups
    write_groups(path, groups, state)
    lines = events(run)
    for line in lines:
        if line.get("file") == name:
            line["sha256"] = files.sha256(path)
    write_events(run, lines)


def first(groups: list[tuple[Group, str]]) -> Rollout:
    return groups[0][0].rollouts[0]


def set_call(**values: Any) -> Callable[[list[tuple[Group, str]]], None]:
    def change(groups: list[tuple[Group, str]]) -> None:
        for name, value in values.items():
            old = getattr(first(groups).calls[0], name)
            setattr(first(groups).calls[0], name, [value, *old[1:]] if isinstance(old, list) else value)

    return change


def set_rollout(**values: Any) -> Callable[[list[tuple[Group, str]]], None]:
    return lambda groups: [setattr(first(groups), name, value) for name, value in values.items()] and None


def set_group(**values: Any) -> Callable[[list[tuple[Group, str]]], None]:
    return lambda groups: [setattr(groups[0][0], name, value) for name, value in values.items()] and None


def two_fail(groups: list[tuple[Group, str]]) -> None:
    for rollout in groups[0][0].rollouts[:2]:
        rollout.ending = Failed(FailureKind.SANDBOX, "it died")


def from_elsewhere(run: Path) -> Callable[[list[tuple[Group, str]]], Any]:
    """The first batch's first group takes the place of another's."""
    earlier = read_groups(run / "rollouts" / "rl-000000.parquet")
    return lambda groups: [earlier[0], *groups[1:]]


def journal_of(run: Path, *rollouts: Rollout) -> None:
    journal = Journal(run / "rollouts" / "rl.journal")
    for rollout in rollouts:
        journal.append(Entry(0, 0, rollout))
    journal.close()


def change_state(run: Path, **values: Any) -> None:
    path = run / "checkpoints" / "rl-000003"
    files.write_json(path / "state.json", json.loads((path / "state.json").read_text()) | values)
    manifest = json.loads((path / "manifest.json").read_text())
    files.write_json(path / "manifest.json", manifest | {"state.json": files.sha256(path / "state.json")})


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def summary(run: Path, **values: Any) -> None:
    files.write_json(run / "summary.json", json.loads((run / "summary.json").read_text()) | values)


def last_step(run: Path, **metrics: float) -> None:
    change_events(run, "step", lambda event: event["metrics"].update(metrics))


def scale_ledger(event: dict[str, Any], factor: float) -> None:
    for parts in event["ledger"]["accounts"].values():
        for name in parts:
            parts[name] *= factor


RL2, RL1 = "rl-000002.parquet", "rl-000001.parquet"
CHECKPOINT = "checkpoints/rl-000003"
#: Name: how to damage a run, the file that must be named, and what must be said of it.
CORRUPTIONS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "recipe is gone": (lambda run: (run / "config.toml").unlink(), "config.toml", "is missing"),
    "recipe is not TOML": (lambda run: edit(run / "config.toml", "=", "=="), "config.toml", "is damaged"),
    "recipe has a foreign key": (lambda run: edit(run / "config.toml", "seed", "sead"), "config.toml", "sead"),
    "log is gone": (lambda run: (run / "events.jsonl").unlink(), "events.jsonl", "is missing"),
    "bit of the log": (lambda run: flip(run / "events.jsonl"), "events.jsonl", "is damaged"),
    "log is cut at its start": (lambda run: write_events(run, events(run)[3:]), "events.jsonl", "beginning is lost"),
    "log is out of order": (
        lambda run: write_events(run, [*events(run)[:-5], *events(run)[:-6:-1]]), "events.jsonl", "goes back"),
    "a step is gone": (
        lambda run: drop_events(run, lambda e: e["kind"] == "step" and e["stage"] == "rl" and e["step"] == 1),
        "events.jsonl", "step 2 of rl is not where it should be"),
    "a step of the end is gone": (
        lambda run: drop_events(run, lambda e: e["kind"] == "step" and e["stage"] == "rl" and e["step"] == 2),
        "events.jsonl", "has 2 steps of rl, but the recipe asks for 3"),
    "a step of no stage": (
        lambda run: change_events(run, "step", lambda e: e.update(stage="dpo")), "events.jsonl", "which is no stage"),
    "bit of a batch": (lambda run: flip(run / "rollouts" / RL1), RL1, "SHA-256"),
    "half of a batch": (
        lambda run: (run / "rollouts" / RL1).write_bytes((run / "rollouts" / RL1).read_bytes()[:999]), RL1, "can't be read"),
    "a trained batch is gone": (lambda run: (run / "rollouts" / RL1).unlink(), RL1, "step 2 was trained on it"),
    "a batch's record is gone": (
        lambda run: drop_events(run, lambda e: e.get("file") == RL1), RL1, "is not recorded"),
    "attempt without an ending": (
        lambda run: change_batch(run, RL2, set_rollout(ending=None)), RL2, "has no ending"),
    "infinite reward": (
        lambda run: change_batch(run, RL2, set_rollout(ending=Scored(float("inf")))), RL2, "has the reward inf"),
    "another reward": (
        lambda run: change_batch(run, RL2, set_rollout(ending=Scored(17.0))), RL2, "was logged with"),
    "positive log-probability": (
        lambda run: change_batch(run, RL2, set_call(logprobs=0.5)), RL2, "log-probability 0.5"),
    "log-probability that is no number": (
        lambda run: change_batch(run, RL2, set_call(logprobs=float("nan"))), RL2, "log-probability nan"),
    "token without a version": (
        lambda run: change_batch(run, RL2, set_call(versions=-1)), RL2, "weight version -1"),
    "token of the future": (
        lambda run: change_batch(run, RL2, set_call(versions=99)), RL2, "weight version 99, but step 3 began at 3"),
    "token too old": (
        lambda run: change_batch(run, RL2, set_call(versions=0)), RL2, "3 behind step 3, but collect.staleness = 1"),
    "group too old": (
        lambda run: change_batch(run, RL2, set_group(step=0)), RL2, "was begun at step 1 and trained on at step 3"),
    "call that extends a later one": (
        lambda run: change_batch(run, RL2, set_call(parent=3)), RL2, "extends call 3"),
    "token that is none": (lambda run: change_batch(run, RL2, set_call(tokens=-7)), RL2, "a token below 0"),
    "nothing sampled": (
        lambda run: change_batch(
            run, RL2, lambda groups: first(groups).calls.__setitem__(
                0, replace(first(groups).calls[0], tokens=[], logprobs=[], versions=[]))),
        RL2, "has no sampled token"),
    "more trained than sampled": (
        lambda run: last_step(run, tokens_trained=10_000.0), RL2, "every trained token is a sampled one"),
    "reply longer than allowed": (
        lambda run: change_batch(
            run, RL2, lambda groups: first(groups).calls.__setitem__(
                0, replace(first(groups).calls[0], tokens=[5] * 9, logprobs=[-1.0] * 9, versions=[3] * 9))),
        RL2, "a reply of 9 tokens"),
    "attempt stored twice": (
        lambda run: change_batch(run, RL2, from_elsewhere(run)), RL2, "is in rl-000000.parquet already"),
    "group is lost": (
        lambda run: change_batch(run, RL2, lambda groups: groups[1:]), "rollouts", "attempts were lost"),
    "member is lost": (
        lambda run: change_batch(run, RL2, lambda groups: groups[0][0].rollouts.pop() and None), RL2, "has 2 members"),
    "attempt under another's name": (
        lambda run: change_batch(run, RL2, set_rollout(id="rl-000099/0")), RL2, "is called so, but is member 0"),
    "attempt at another task": (
        lambda run: change_batch(run, RL2, set_rollout(task_id="train-999")), RL2, "is at task train-999"),
    "another seed": (lambda run: change_batch(run, RL2, set_rollout(seed=1)), RL2, "has the seed 1"),
    "no baseline": (lambda run: change_batch(run, RL2, two_fail), RL2, "fewer than 2 scored members"),
    "journal of a stage that is over": (
        lambda run: journal_of(run, Rollout("rl-000000/9", "t", "e", 9, 1)), "rl.journal", "its stage is over"),
    "bit of a journal": (
        lambda run: (journal_of(run, Rollout("rl-000000/0", "t", "e", 0, 1)), flip(run / "rollouts" / "rl.journal")),
        "rl.journal", "is damaged"),
    "journal holds an attempt twice": (
        lambda run: journal_of(run, *[Rollout("rl-000000/0", "t", "e", 0, 1)] * 2), "rl.journal", "a second time"),
    "bit of the weights": (
        lambda run: flip(run / CHECKPOINT / "model.safetensors"), "checkpoints", "model.safetensors has changed"),
    "bit of the optimizer": (
        lambda run: flip(run / CHECKPOINT / "learner.safetensors"), "checkpoints", "learner.safetensors has changed"),
    "weights are gone": (
        lambda run: (run / CHECKPOINT / "model.safetensors").unlink(), "checkpoints", "model.safetensors is missing"),
    "manifest is gone": (
        lambda run: (run / CHECKPOINT / "manifest.json").unlink(), "checkpoints", "manifest.json can't be read"),
    "foreign file in a checkpoint": (
        lambda run: (run / CHECKPOINT / "extra.bin").write_text("?"), CHECKPOINT, "extra.bin is not in its manifest"),
    "checkpoint is gone": (lambda run: shutil.rmtree(run / CHECKPOINT), CHECKPOINT, "events.jsonl records it"),
    "checkpoint under another name": (
        lambda run: change_state(run, step=2), CHECKPOINT, "says that it is step 2 of rl"),
    "checkpoint of another version": (
        lambda run: change_state(run, version=7), CHECKPOINT, "has weight version 7"),
    "ledger that does not add up": (
        lambda run: change_events(run, "cost", lambda event: scale_ledger(event, 0.2)), "events.jsonl", "less in it"),
    "ledger beyond the clock": (
        lambda run: change_events(run, "cost", lambda event: scale_ledger(event, 9.0)), "events.jsonl", "aren't the whole"),
    "evaluation is gone": (
        lambda run: (run / "rollouts" / "evaluation-rl.parquet").unlink(), "evaluation-rl.parquet", "is missing"),
    "evaluation with other scores": (
        lambda run: change_events(run, "evaluation", lambda e: e["tasks"][0].__setitem__(3, [0.99])),
        "evaluation-rl.parquet", "but evaluation 'rl' was logged with [0.99]"),
    "evaluation of two versions": (
        lambda run: change_batch(run, "evaluation-rl.parquet", set_call(versions=1)),
        "evaluation-rl.parquet", "an evaluation is of one version"),
    "summary is gone": (lambda run: (run / "summary.json").unlink(), "summary.json", "is missing"),
    "summary is no JSON": (lambda run: (run / "summary.json").write_text("{"), "summary.json", "is damaged"),
    "summary that flatters": (lambda run: summary(run, cost_usd=0.0), "summary.json", "says cost_usd = 0.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_kind_of_corruption_is_found_and_named(run, name):
    damage, file, sentence = CORRUPTIONS[name]
    damage(run)
    found = [problem for problem in verify_run(run) if not problem.mended]
    assert any(file in problem.file and sentence in problem.sentence for problem in found), found
    assert show_verification(run)[1] == 1
