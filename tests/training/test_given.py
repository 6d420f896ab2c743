"""Stages on given examples: data from files, preferences, reward models; validation, early stopping, resume."""

from __future__ import annotations

import asyncio
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny import make_model

from strop.config import parse_recipe
from strop.errors import ConfigError, DataError, RunError
from strop.rollouts import FinishReason, Group, ModelCall, Rollout, Scored, Task
from strop.runs.reading import RunRecord
from strop.runs.report import write_report
from strop.runs.run import Run
from strop.runs.show import show_run
from strop.runs.verify import verify_run
from strop.training.examples import best_and_worst
from strop.training.replay import replay_step
from strop.training.train import train


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    words = ["red", "blue", "green", "black", "white", "grey"]
    chats, pairs, judged = [], [], []
    for number in range(24):
        word = words[number % 6] + str(number)
        user, good, bad = {"role": "user", "content": f"Say {word}"}, word, word[::-1] + "?"
        chats.append({"messages": [user, {"role": "assistant", "content": good}]})
        pairs.append({"prompt": f"Say {word}", "chosen": good, "rejected": bad})
        judged.append({"prompt": [user], "completion": good if number % 3 else bad, "label": bool(number % 3)})
    for name, rows in (("chats", chats), ("pairs", pairs), ("judged", judged)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe(model: Path, *stages: dict[str, Any], **more: Any):
    rate = {"schedule": {"learning_rate": 3e-3}}
    return parse_recipe(
        {
            "name": "given",
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"max_context": 512},
            "stages": [{**rate, **stage} for stage in stages],
            **more,
        }
    )


def trained(path: Path, asked: Any) -> RunRecord:
    run = Run.create(path, asked)
    asyncio.run(train(run))
    run.close()
    return RunRecord(path)


def last_weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    newest = max((path / "checkpoints").iterdir(), key=lambda folder: int(folder.name.rpartition("-")[2]))
    return load_file(newest / "model.safetensors")


SFT = {"kind": "sft", "name": "sft", "steps": 6, "batch_size": 4}
DPO = {"kind": "preference", "name": "dpo", "steps": 4, "batch_size": 4}


def test_data_from_files_needs_no_environment(model, data, tmp_path):
    stage = {**SFT, "data": {"path": str(data / "chats.jsonl")}, "validation": {"share": 0.25, "every": 3}}
    record = trained(tmp_path / "run", recipe(model, stage))
    (told,) = record.of_kind("examples")
    assert told["trained"] + told["held_out"] == 24 and told["held_out"] > 0
    losses = {event["step"]: event["metrics"]["loss"] for event in record.of_kind("validation")}
    assert list(losses) == [0, 3, 6] and losses[6] < losses[0]
    assert list(verify_run(tmp_path / "run")) == []
    assert not record.of_kind("evaluation")
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(show_run(record))
    assert "finished" in shown.export_text()
    assert "supervised fine-tuning" in write_report(record.path, tmp_path / "page.html").read_text()


def test_bad_rows_end_a_run_before_it_begins(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    run = Run.create(tmp_path / "run", recipe(model, {**SFT, "data": {"path": str(tmp_path / "rows.jsonl")}}))
    with pytest.raises(DataError, match=r"rows\.jsonl row 1, messages"):
        asyncio.run(train(run))
    run.close()
    assert not RunRecord(tmp_path / "run").steps


def test_rows_that_may_be_dropped_are_counted(model, data, tmp_path):
    rows = (data / "chats.jsonl").read_text() + '{"messages": []}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    settings = {"path": str(tmp_path / "rows.jsonl"), "bad_rows": "drop"}
    record = trained(tmp_path / "run", recipe(model, {**SFT, "steps": 1, "data": settings}))
    assert "1 rows were dropped" in record.of_kind("warning")[0]["message"]
    assert record.of_kind("examples")[0]["trained"] == 24


def test_a_stage_ends_early_with_its_best_weights(model, data, tmp_path):
    """A rate that is far too high: the loss on held-out examples rises at once."""
    stage = {
        **SFT,
        "steps": 40,
        "data": {"path": str(data / "chats.jsonl")},
        "validation": {"share": 0.25, "every": 2, "patience": 2},
        "schedule": {"learning_rate": 0.3},
    }
    record = trained(tmp_path / "run", recipe(model, stage))
    losses = {event["step"]: event["metrics"]["loss"] for event in record.of_kind("validation")}
    best = min(losses, key=lambda step: losses[step])
    assert len(record.steps) == max(losses) == best + 4 < 40
    weights = last_weights(tmp_path / "run")
    from safetensors.torch import load_file

    kept = load_file(tmp_path / "run" / "checkpoints" / f"sft-{best:06d}" / "model.safetensors")
    assert all(torch.equal(weights[name], kept[name]) for name in weights)
    assert list(verify_run(tmp_path / "run")) == []
    # Whoever resumes finds it over.
    (tmp_path / "run" / "summary.json").unlink()
    run = Run.resume(tmp_path / "run")
    asyncio.run(train(run))
    run.close()
    assert len(RunRecord(tmp_path / "run").steps) == max(losses)


@pytest.mark.parametrize(
    ("loss", "file"),
    [("dpo", "pairs"), ("ipo", "pairs"), ("simpo", "pairs"), ("orpo", "pairs"), ("kto", "judged"), ("kto", "pairs")],
)
def test_every_preference_is_learnt(model, data, tmp_path, loss, file):
    stage = {**DPO, "loss": [{"name": loss}], "data": {"path": str(data / f"{file}.jsonl")}}
    stage |= {"validation": {"share": 0.2, "every": 4}}
    record = trained(tmp_path / "run", recipe(model, stage))
    before, after = (event["metrics"]["loss"] for event in record.of_kind("validation"))
    assert after < before
    if loss == "dpo":
        assert before == pytest.approx(math.log(2), abs=1e-6)
    assert (tmp_path / "run" / "reference" / "dpo.npz").exists() == (loss in ("dpo", "ipo", "kto"))
    assert list(verify_run(tmp_path / "run")) == []


def test_under_an_adapter_the_reference_is_the_base(model, data, tmp_path):
    pytest.importorskip("peft")
    stage = {**DPO, "data": {"path": str(data / "pairs.jsonl")}, "validation": {"share": 0.2, "every": 4}}
    asked = recipe(model, stage)
    asked = parse_recipe({**asked.model_dump(exclude_none=True), "model": {"name": str(model), "lora": {"rank": 4}}})
    record = trained(tmp_path / "run", asked)
    before, after = (event["metrics"]["loss"] for event in record.of_kind("validation"))
    assert before == pytest.approx(math.log(2), abs=1e-6) and after < before


@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_a_preference_stage_resumes_to_the_same_weights(model, data, tmp_path, loss):
    stage = {**DPO, "loss": [{"name": loss}], "data": {"path": str(data / "pairs.jsonl")}, "checkpoints": {"every": 2}}
    whole = trained(tmp_path / "whole", recipe(model, stage))
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "dpo-000004")
    (tmp_path / "half" / "summary.json").unlink()
    run = Run.resume(tmp_path / "half")
    asyncio.run(train(run))
    run.close()
    first, second = last_weights(tmp_path / "whole"), last_weights(tmp_path / "half")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not RunRecord(tmp_path / "half").of_kind("warning") and len(whole.steps) == 4
    assert asyncio.run(replay_step(tmp_path / "whole", 4)).good


def test_a_reference_of_other_examples_is_refused(model, data, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text((data / "pairs.jsonl").read_text())
    stage = {**DPO, "data": {"path": str(rows)}, "checkpoints": {"every": 2}}
    trained(tmp_path / "run", recipe(model, stage))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "dpo-000004")
    rows.write_text("".join(sorted(rows.read_text().splitlines(keepends=True), reverse=True)))
    run = Run.resume(tmp_path / "run")
    with pytest.raises(RunError, match="is of other examples"):
        asyncio.run(train(run))
    run.close()


def test_a_reward_model_is_one_for_plain_transformers(model, data, tmp_path):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    stage = {"kind": "reward", "name": "judge", "steps": 12, "batch_size": 8, "checkpoints": {"every": 6}}
    stage |= {"data": {"path": str(data / "pairs.jsonl")}, "validation": {"share": 0.2, "every": 6}}
    first = {**SFT, "steps": 1, "data": {"path": str(data / "chats.jsonl")}}
    record = trained(tmp_path / "run", recipe(model, first, stage))
    losses = [event["metrics"]["loss"] for event in record.of_kind("validation")]
    assert losses[-1] < losses[0]
    folder = tmp_path / "run" / "checkpoints" / "judge-000012"
    judge, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "Say red0"}, {"role": "assistant", "content": said}], tokenize=False
        )
        for said in ("red0", "0der?")
    ]
    padded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    assert padded["attention_mask"].sum(1).unique().numel() == 2  # one of them is padded
    together = judge(**padded).logits[:, 0]
    alone = [judge(**tokenizer(text, return_tensors="pt", add_special_tokens=False)).logits[0, 0] for text in texts]
    torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-6)
    assert together[0] > together[1]
    assert list(verify_run(tmp_path / "run")) == []
    shutil.rmtree(folder)
    (tmp_path / "run" / "summary.json").unlink()
    run = Run.resume(tmp_path / "run")  # from step 6 of the reward model
    asyncio.run(train(run))
    run.close()
    again = AutoModelForSequenceClassification.from_pretrained(folder)
    assert all(torch.equal(a, b) for a, b in zip(judge.parameters(), again.parameters(), strict=True))


def group(*rewards: float | None) -> Group:
    rollouts = []
    for member, reward in enumerate(rewards):
        call = ModelCall(None, [1, 2], [3 + member, 9], [-1.0, -1.0], [0, 0], FinishReason.STOP)
        ending = None if reward is None else Scored(reward)
        rollouts.append(Rollout(f"g-{member}", "t", "e", member, 0, calls=[call], ending=ending))
    return Group("g", Task("t", "e", ({"role": "user", "content": "Hi"},)), rollouts)


@pytest.mark.parametrize(
    ("rewards", "margin", "most", "members"),
    [
        ((0.0, 1.0, 0.5), 0.0, 1, [(1, 0)]),
        ((0.0, 1.0, None, 0.5), 0.0, 3, [(1, 0)]),  # the middle one has no partner
        ((0.1, 0.9, 0.8, 0.0), 0.0, 3, [(1, 3), (2, 0)]),
        ((0.1, 0.9, 0.8, 0.0), 0.75, 3, [(1, 3)]),
        ((1.0, 1.0), 0.0, 1, []),
        ((None, 1.0), 0.0, 1, []),
    ],
)
def test_pairs_of_a_group(rewards, margin, most, members):
    found = [(best.member, worst.member) for best, worst in best_and_worst(group(*rewards), margin, most)]
    assert found == members


def test_pairs_are_made_of_a_runs_attempts(model, tmp_path):
    letters = f"{Path(__file__).parents[1] / 'letters.py'}:Letters"
    rl = {"kind": "rl", "name": "rl", "steps": 2, "collect": {"groups": 3, "group_size": 4}}
    environment = {"name": letters, "agent": {"max_tokens": 6}}
    first = trained(tmp_path / "first", recipe(model, rl, environment=environment, evaluation={"tasks": 0}))
    attempts = {"run": str(tmp_path / "first"), "stage": "rl"}
    record = trained(tmp_path / "second", recipe(model, {**DPO, "attempts": attempts}))
    (told,) = record.of_kind("examples")
    assert told["trained"] > 0 and first.steps
    with np.load(tmp_path / "second" / "reference" / "dpo.npz") as stored:
        assert stored["logprobs"].any()


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        ({**DPO}, "give one of data and attempts"),
        ({**SFT, "data": {"path": "nowhere.jsonl"}}, "there is no such file"),
        ({**DPO, "data": {"path": "FILE"}, "loss": [{"name": "cross_entropy"}]}, "nothing in it prefers"),
        ({**DPO, "data": {"path": "FILE"}, "loss": [{"name": "dpo"}, {"name": "kto"}]}, "compares pairs and judges"),
        ({**DPO, "data": {"path": "FILE"}, "loss": [{"name": "bradley_terry"}]}, "it is for reward models"),
        ({**DPO, "data": {"path": "FILE", "max_tokens": 4000}}, "may have 8000 tokens"),
        ({**DPO, "data": {"path": "FILE"}, "validation": {"every": 2}}, "give share or path"),
    ],
)
def test_what_can_not_work_is_refused_before_anything(model, data, stage, says):
    from strop.errors import StropError
    from strop.training.checks import check

    if "FILE" in json.dumps(stage):
        stage = {**stage, "data": {**stage["data"], "path": str(data / "pairs.jsonl")}}
    with pytest.raises(StropError, match=says):
        check(recipe(model, stage))


def test_a_reward_model_ends_its_recipe(model, data):
    stage = {"kind": "reward", "name": "judge", "steps": 1, "data": {"path": str(data / "pairs.jsonl")}}
    with pytest.raises(ConfigError, match="put it last"):
        recipe(model, stage, {**DPO, "data": {"path": str(data / "pairs.jsonl")}})
