"""Chains: distillation into a fresh student, gates, mixtures, stored attempts; each resumable to the last bit."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import make_model

from strop.config import parse_recipe
from strop.errors import ConfigError, GateError, RunError
from strop.learning import pack
from strop.rollouts import Scored, derive_seed
from strop.runs import files
from strop.runs.reading import RunRecord
from strop.runs.run import Run, read_recipe
from strop.runs.store import read_groups, trained
from strop.runs.verify import verify_run
from strop.training.chain import promote_by_hand
from strop.training.replay import replay_step
from strop.training.stored import best_attempts, groups_of_step
from strop.training.train import check, train

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
from harness import chain as whole_chain

LETTERS = Path(__file__).parents[1] / "letters.py"
SCHEDULE = {"learning_rate": 2e-3}
COLLECT = {"groups": 3, "group_size": 3}


def recipe(model: Path, *stages: dict[str, Any], **tables: Any) -> Any:
    return parse_recipe(
        {
            "name": "chain",
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": {"name": f"{LETTERS}:Letters", "options": {"delay": 0.0}, "agent": {"max_tokens": 8}},
            "evaluation": {"tasks": 4, "temperature": 1.0},
            "stages": [{"schedule": SCHEDULE, "collect": COLLECT, "steps": 2, **stage} for stage in stages],
            **tables,
        }
    )


def run_to_end(path: Path, asked: Any = None) -> Path:
    run = Run.resume(path) if asked is None else Run.create(path, asked)
    try:
        asyncio.run(train(run))
    finally:
        run.close()
    return path


def stop_at(path: Path, asked: Any, kind: str, number: int = 1) -> None:
    """Break a run off at the nth event of a kind."""
    run, seen = Run.create(path, asked), 0

    def hear(event: dict[str, Any]) -> None:
        nonlocal seen
        seen += event["kind"] == kind
        if seen == number:
            raise KeyboardInterrupt

    run.listeners.append(hear)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(train(run))
    run.close()


def hashes(run: Path, checkpoint: str) -> dict[str, str]:
    return {file.name: files.sha256(file) for file in sorted((run / "checkpoints" / checkpoint).glob("*.safetensors"))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("chain") / "model")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("chain") / "other", hidden=48, seed=5)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_to_end(tmp_path_factory.mktemp("chain") / "whole", whole_chain(model))


# -- distillation ---------------------------------------------------------------------------------------------------------


def test_a_student_comes_to_sample_what_its_teacher_would(model, tmp_path):
    """The divergence is that of whole distributions, computed apart from the loss: plain transformers, every token."""
    from transformers import AutoModelForCausalLM

    taught = {"kind": "sft", "name": "taught", "steps": 4, "batch_size": 8, "schedule": {"learning_rate": 3e-3}}
    stage = {"kind": "distill", "name": "student", "start": "fresh", "steps": 12, "schedule": {"learning_rate": 3e-3},
             "collect": {"groups": 32, "group_size": 1}, "teachers": [{"stage": "taught", "environments": ["Letters"]}]}  # fmt: skip
    asked = recipe(model, stage, evaluation={"tasks": 0}).model_dump(exclude_none=True, mode="json")
    path = run_to_end(tmp_path / "r", parse_recipe({**asked, "stages": [taught, *asked["stages"]]}))
    groups = trained(read_groups(path / "rollouts" / "student-000000.parquet"))
    calls = [rollout.calls[0] for group in groups for rollout in group.rollouts]
    teacher = AutoModelForCausalLM.from_pretrained(path / "checkpoints" / "taught-000004")

    def divergence(folder: Path) -> float:
        """Mean over the places at which the student sampled in its first step."""
        student, found = AutoModelForCausalLM.from_pretrained(folder), []
        for call in calls:
            ids, first = torch.tensor([call.prompt + call.tokens]), len(call.prompt) - 1
            with torch.no_grad():
                pi, rho = (m(ids).logits[0, first:-1].double().log_softmax(-1) for m in (student, teacher))
            found += (pi.exp() * (pi - rho)).sum(-1).tolist()
        return float(np.mean(found))

    before, after = divergence(model), divergence(path / "checkpoints" / "student-000012")
    assert after < 0.3 * before
    logged = [step.metrics["reverse_kl"] for step in RunRecord(path).steps if step.stage == "student"]
    deviation = np.sqrt(2 * before / sum(len(call.tokens) for call in calls))  # of a log-ratio's mean, for small ones
    assert abs(logged[0] - before) < 4 * deviation and np.mean(logged[-6:]) < 0.5 * before
    assert verify_run(path) == []


def test_every_trained_token_has_its_teachers_logprob(model, other, tmp_path, monkeypatch):
    """What reaches the learner, against the teacher's own forward; two teachers, by environment."""
    from transformers import AutoModelForCausalLM

    from strop.learning.embedded import EmbeddedLearner

    seen: list[Any] = []
    original = EmbeddedLearner.forward_backward
    monkeypatch.setattr(
        EmbeddedLearner,
        "forward_backward",
        lambda self, batch, *rest: seen.append(batch) or original(self, batch, *rest),
    )
    letters = {"name": f"{LETTERS}:Letters", "agent": {"max_tokens": 8}}
    stage = {"kind": "distill", "name": "student", "steps": 1, "collect": {"groups": 4, "group_size": 2},
             "environments": [{**letters, "label": "one"}, {**letters, "label": "two"}],
             "teachers": [{"model": str(other), "environments": ["two"]}, {"model": str(model)}]}  # fmt: skip
    path = run_to_end(tmp_path / "r", recipe(model, stage, evaluation={"tasks": 0}))
    (batch,) = seen
    groups = trained(read_groups(path / "rollouts" / "student-000000.parquet"))
    assert sorted(group.task.environment for group in groups) == ["one", "one", "two", "two"]
    models = {"one": AutoModelForCausalLM.from_pretrained(model), "two": AutoModelForCausalLM.from_pretrained(other)}
    found = batch.extras["teacher_logprobs"]
    assert (found[~batch.mask] == 0).all() and (found[batch.mask] < 0).all()
    for number, group in enumerate(batch.groups):
        span = batch.span(number)
        ids = torch.from_numpy(batch.tokens[span].astype(np.int64))
        with torch.no_grad():
            logits = models[groups[group].task.environment](ids[None]).logits[0].double()
        expected = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
        mask = batch.mask[span][1:]
        np.testing.assert_allclose(found[span][1:][mask], expected[mask], atol=1e-4)
    names = [(event["number"], event["source"]) for event in RunRecord(path).of_kind("teacher")]
    assert names == [(0, str(other)), (1, str(model))]


def test_teachers_that_cannot_teach_are_refused_before_anything_starts(model, tmp_path):
    def asked(teachers: list[Any], **more: Any) -> Any:
        return recipe(model, {"kind": "distill", "name": "student", "teachers": teachers, **more})

    def like(name: str, **changed: Any) -> Path:
        """The student with another tokenizer."""
        folder = Path(shutil.copytree(model, tmp_path / name))
        told = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**told, **changed}))
        return folder

    told = json.loads((model / "tokenizer.json").read_text())
    a, b = (told["model"]["vocab"][letter] for letter in "ab")
    swapped = {**told["model"], "vocab": {**told["model"]["vocab"], "a": b, "b": a}}
    with pytest.raises(
        ConfigError, match=r"stages.student.teachers.0: .*another vocabulary: 259 tokens for 259, and '[ab]'"
    ):
        check(asked([{"model": str(like("stranger", model=swapped))}]))
    with pytest.raises(ConfigError, match=r"splits text into tokens differently. .*train on its attempts instead"):
        check(asked([{"model": str(like("lower", normalizer={"type": "Lowercase"}))}]))
    with pytest.raises(ConfigError, match=r"teachers.0.stage: 'rl' is no stage before student"):
        check(asked([{"stage": "rl"}]))
    with pytest.raises(ConfigError, match=r"there is no environment 'elsewhere'"):
        check(asked([{"model": str(model), "environments": ["elsewhere"]}]))
    with pytest.raises(ConfigError, match=r"two teachers name no environments"):
        check(asked([{"model": str(model)}, {"model": str(model)}]))
    with pytest.raises(ConfigError, match=r'no component of the loss learns from them. Add {name = "reverse_kl"}'):
        check(asked([{"model": str(model)}], loss=[{"name": "ppo_clip"}]))
    with pytest.raises(ConfigError, match=r"collect.group_size: it is 1, but a component"):
        check(
            asked(
                [{"model": str(model)}], loss=[{"name": "reverse_kl"}, {"name": "ppo_clip"}], collect={"group_size": 1}
            )
        )
    with pytest.raises(ConfigError, match=r"it needs a teacher"):
        check(recipe(model, {"kind": "rl", "name": "rl", "loss": [{"name": "reverse_kl"}]}))


def test_a_teacher_that_was_exchanged_is_noticed(model, other, tmp_path):
    teacher = Path(shutil.copytree(other, tmp_path / "teacher"))
    stage = {"kind": "distill", "name": "student", "teachers": [{"model": str(teacher)}], "checkpoints": {"every": 1}}
    stop_at(tmp_path / "r", recipe(model, stage), "checkpoint")
    shutil.rmtree(teacher)
    make_model(teacher, hidden=48, seed=6)
    with pytest.raises(RunError, match=r"is not the teacher that stage student began with"):
        run_to_end(tmp_path / "r")


# -- resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 4, 5, 6, 8])
def test_a_chain_that_was_broken_off_at_a_checkpoint_ends_in_the_same_weights(model, whole, tmp_path, number):
    """Mixtures with a curriculum, a gate that kept the earlier model, a fresh student, stored attempts."""
    path = tmp_path / "r"
    stop_at(path, whole_chain(model), "checkpoint", number)
    run_to_end(path)
    for checkpoint in ("rl-000003", "worse-000002", "student-000003", "best-000002"):
        assert hashes(path, checkpoint) == hashes(whole, checkpoint)
    assert verify_run(path) == []


@pytest.mark.parametrize(
    ("kind", "number"), [("batch", 4), ("gate", 1), ("evaluation", 4), ("teacher", 1), ("step", 7)]
)
def test_a_chain_that_was_broken_off_anywhere_ends_in_the_same_weights(model, whole, tmp_path, kind, number):
    path = tmp_path / "r"
    stop_at(path, whole_chain(model), kind, number)
    run_to_end(path)
    assert hashes(path, "best-000002") == hashes(whole, "best-000002")
    assert [e["passed"] for e in RunRecord(path).of_kind("gate")] == [False]
    assert verify_run(path) == []


def test_a_chains_steps_can_be_done_again(whole):
    for stage, step in (("rl", 3), ("student", 1), ("student", 3), ("best", 2)):
        replay = asyncio.run(replay_step(whole, step, stage=stage))
        assert replay.good, (stage, step, replay.different)
    assert asyncio.run(replay_step(whole, 2, stage="student")).weights_equal  # the two newest are kept


def test_a_fresh_student_begins_with_the_recipes_model(model, whole):
    """Its first tokens' log-probabilities are those of the model as it was loaded."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model)
    groups = trained(read_groups(whole / "rollouts" / "student-000000.parquet"))
    batch = pack(groups, lambda some: [np.ones(len(group)) for group in some])
    for number in range(len(batch.lengths)):
        span = batch.span(number)
        ids = torch.from_numpy(batch.tokens[span].astype(np.int64))
        with torch.no_grad():
            expected = plain(ids[None]).logits[0].double().log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        mask = batch.mask[span][1:]
        np.testing.assert_allclose(batch.sampler_logprobs[span][1:][mask], expected.numpy()[mask], atol=1e-4)
    names = [found.evaluation.name for found in RunRecord(whole).evaluations]
    assert names == ["start", "rl", "worse start", "worse", "student start", "student", "best"]


# -- gates ----------------------------------------------------------------------------------------------------------------


RL = {"kind": "rl", "name": "rl"}
NEXT = {"kind": "rl", "name": "next"}


def test_a_closed_gate_ends_the_run_and_a_person_may_open_it(model, tmp_path):
    asked = recipe(model, {**RL, "gate": {"score_above": 1.0}}, NEXT)
    path = tmp_path / "r"
    for attempt in range(2):  # resuming alone changes nothing
        with pytest.raises(
            GateError, match=r"rl was not promoted: the held-out score's lower bound is 0\.\d+, not above 1"
        ):
            run_to_end(path, None if attempt else asked)
    record = RunRecord(path)
    assert [event["passed"] for event in record.of_kind("gate")] == [False]
    assert not [step for step in record.steps if step.stage == "next"]
    run = Run.resume(path)
    promote_by_hand(run, "rl")
    with pytest.raises(GateError, match=r"nothing to promote"):
        promote_by_hand(run, "rl")
    run.close()
    run_to_end(path)
    free = run_to_end(tmp_path / "free", recipe(model, RL, NEXT))
    assert hashes(path, "next-000002") == hashes(free, "next-000002") and verify_run(path) == []


def test_a_gate_that_keeps_the_earlier_model_gives_what_a_chain_without_the_stage_gives(model, tmp_path):
    worse = {"kind": "rl", "name": "worse", "gate": {"gain_above": 0.9, "otherwise": "keep"}}
    path = run_to_end(tmp_path / "r", recipe(model, RL, worse, NEXT))
    without = run_to_end(tmp_path / "without", recipe(model, RL, NEXT))
    ours, theirs = (
        [trained(read_groups(run / "rollouts" / f"next-{step:06d}.parquet")) for step in range(2)]
        for run in (path, without)
    )
    tokens = [[[r.calls[0].tokens for g in batch for r in g.rollouts] for batch in some] for some in (ours, theirs)]
    assert tokens[0] == tokens[1]
    assert hashes(path, "next-000002")["model.safetensors"] == hashes(without, "next-000002")["model.safetensors"]
    first = make_kept_first(model, tmp_path)
    assert (
        hashes(first, "next-000002")["model.safetensors"]
        == hashes(run_to_end(tmp_path / "alone", recipe(model, NEXT)), "next-000002")["model.safetensors"]
    )


def make_kept_first(model: Path, tmp_path: Path) -> Path:
    """A run whose first stage was not promoted: the recipe's own model goes on."""
    worse = {"kind": "rl", "name": "worse", "gate": {"gain_above": 0.9, "otherwise": "keep"}}
    path = run_to_end(tmp_path / "first", recipe(model, worse, NEXT))
    assert verify_run(path) == []
    return path


def test_an_open_gate_lets_the_model_go_on(model, tmp_path):
    path = run_to_end(tmp_path / "r", recipe(model, {**RL, "gate": {"score_above": 0.0, "gain_above": -1.0}}, NEXT))
    assert [event["passed"] for event in RunRecord(path).of_kind("gate")] == [True]
    assert [step.stage for step in RunRecord(path).steps] == ["rl", "rl", "next", "next"]


# -- mixtures -------------------------------------------------------------------------------------------------------------


def test_a_mixture_is_measured_and_scored_by_environment(whole):
    record = RunRecord(whole)
    groups = [g for file in record.rollout_files if file.stage == "rl" for g, _ in read_groups(file.path)]
    counts = {label: sum(group.task.environment == label for group in groups) for label in ("one", "two")}
    assert counts == {"one": 6, "two": 3}
    step = next(step for step in record.steps if step.stage == "rl")
    batch = trained(read_groups(whole / "rollouts" / "rl-000000.parquet"))
    for label in ("one", "two"):
        rewards = [r.reward for g in batch if g.task.environment == label for r in g.rollouts]
        assert step.metrics[f"reward/{label}"] == pytest.approx(np.mean(rewards))
        assert step.metrics[f"groups/{label}"] == {"one": 2, "two": 1}[label]
    found = {e.evaluation.name: e.evaluation for e in record.evaluations}["rl"]
    assert len(found.tasks) == 8
    assert {"environment one", "environment two"} <= set(found.by_label())
    assert {task.task_id.partition("/")[0] for task in found.tasks} == {"one", "two"}


# -- stored attempts ------------------------------------------------------------------------------------------------------


def test_the_best_of_each_group_are_chosen(whole):
    groups = trained(read_groups(whole / "rollouts" / "rl-000000.parquet"))
    for best, above in ((1, None), (2, None), (3, 0.4)):
        for group in best_attempts(groups, best, above):
            all_of_it = next(other for other in groups if other.id == group.id)
            rewards = sorted((r.reward for r in all_of_it.rollouts if r.reward is not None), reverse=True)
            wanted = [reward for reward in rewards if above is None or reward > above][:best]
            assert sorted((r.reward for r in group.rollouts), reverse=True) == wanted
    assert best_attempts(groups, 1, 2.0) == []
    for rollout in groups[0].rollouts:
        rollout.ending = Scored(0.5)
    (chosen,) = best_attempts(groups[:1], 1)
    assert chosen.rollouts[0].member == 0


def test_stored_attempts_are_trained_on_token_by_token(model, whole, tmp_path):
    """Another run's, by cross-entropy: the loss of the first step by hand, from the plain model."""
    from transformers import AutoModelForCausalLM

    stage = {"kind": "distill", "name": "copy", "collect": {"groups": 2},
             "stored": {"run": str(whole), "stage": "student"}}  # fmt: skip
    path = run_to_end(tmp_path / "r", recipe(model, stage, evaluation={"tasks": 0}))
    (first, _) = RunRecord(path).steps
    groups = [group for group, _ in read_groups(path / "rollouts" / "copy-stored.parquet")]
    chosen = groups_of_step(groups, read_recipe(path).stages[0], 0, derive_seed(0, "copy", "order"))
    plain, losses = AutoModelForCausalLM.from_pretrained(model), []
    for rollout in (rollout for group in chosen for rollout in group.rollouts):
        (call,) = rollout.calls
        ids = torch.tensor(call.prompt + call.tokens)
        with torch.no_grad():
            logprobs = plain(ids[None]).logits[0].double().log_softmax(-1)
        losses += [-float(logprobs[place - 1, ids[place]]) for place in range(len(call.prompt), len(ids))]
    assert first.metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert not [name for name in first.metrics if name.startswith(("mismatch_", "staleness_"))]
    assert RunRecord(path).cost_points[-1].ledger["tokens"].get("copy", {}).get("sampled", 0) <= 2 * 8  # the canary's
    assert verify_run(path) == []


def test_the_best_attempts_are_written_as_data_for_supervised_learning(whole, tmp_path):
    """What `strop select` writes, the data room reads."""
    from strop.data import Conversation, parse_row
    from strop.data.files import read_rows
    from strop.training.stored import stored_groups, write_conversations

    groups = best_attempts(stored_groups(RunRecord(whole), "rl"), 1)
    assert write_conversations(groups, tmp_path / "best.jsonl") == len(groups) == 9
    for (_, number, row), group in zip(read_rows(tmp_path / "best.jsonl"), groups, strict=True):
        found = parse_row(row, "messages")
        assert isinstance(found, Conversation) and number >= 1
        assert found.messages[-1]["content"] == group.rollouts[0].transcript[-1]["content"]


def test_stored_attempts_that_are_not_there_are_refused(model, whole):
    def asked(**stored: Any) -> Any:
        return recipe(model, {"kind": "distill", "name": "copy", "stored": stored})

    with pytest.raises(ConfigError, match=r"no attempts of a stage 'sft'. It has: rl, student, worse"):
        check(asked(run=str(whole), stage="sft"))
    with pytest.raises(ConfigError, match=r"'rl' is no stage before copy that makes attempts. There are: none"):
        check(asked(stage="rl"))
