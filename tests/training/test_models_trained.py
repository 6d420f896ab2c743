"""Whole runs of other models than a dense one: an adapter, and experts; what is stored, exported and said of memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model, make_tokenizer

from strop.config import parse_recipe
from strop.console import export
from strop.errors import ConfigError
from strop.learning import EmbeddedLearner
from strop.models.load import load_model
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.runs.store import read_groups
from strop.training.train import build, train

LETTERS = Path(__file__).parents[1] / "letters.py"
TOKENS = torch.arange(4, 20)[None]


def trained(folder: Path, name: Path, **model: Any) -> RunRecord:
    run = Run.create(folder / "runs" / "letters", recipe(name, **model))
    asyncio.run(train(run))
    return RunRecord(run.path)


def recipe(name: Path, **model: Any) -> Any:
    return parse_recipe(
        {
            "name": "letters",
            "threads": 1,
            "model": {"name": str(name), "dtype": "float32", **model},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": {"name": f"{LETTERS}:Letters", "agent": {"max_tokens": 6}},
            "evaluation": {"tasks": 3},
            "stages": [
                {"kind": "rl", "name": "rl", "steps": 2, "schedule": {"learning_rate": 1e-3},
                 "collect": {"groups": 2, "group_size": 4}},
            ],
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder, tokenizer = tmp_path_factory.mktemp("sparse"), make_tokenizer()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        norm_topk_prob=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_an_adapter_is_trained_and_exported_merged_with_a_card(tmp_path, dense):
    record = trained(tmp_path, dense, lora={"rank": 2, "alpha": 4.0, "targets": ["q_proj", "down_proj"]})
    checkpoint = record.path / "checkpoints" / "rl-000002"
    assert (checkpoint / "adapter_model.safetensors").is_file() and not list(checkpoint.glob("model*.safetensors"))
    assert max(step.metrics["mismatch_max"] for step in record.steps) < 1e-4
    export("letters", tmp_path / "out", "transformers", None, None, record.path.parent)
    merged, base = (load_model(str(folder)).model for folder in (tmp_path / "out", dense))
    changed = {name for name, tensor in merged.state_dict().items() if not torch.equal(tensor, base.state_dict()[name])}
    assert changed and all("q_proj" in name or "down_proj" in name for name in changed)
    expected = load_model(str(checkpoint)).model(TOKENS).logits
    torch.testing.assert_close(merged(TOKENS).logits, expected, atol=1e-6, rtol=0)
    card = (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((record.path / "summary.json").read_text())
    assert card.startswith(f"---\nbase_model: {dense.name}\n")
    for row in summary["scores"]:
        assert f"| {row['stage']} | {row['score']:.3f} |" in card
    assert f"{summary['cost_usd']:.4f} US dollars" in card and "letters.py:Letters" in card and "rank = 2" in card
    with pytest.raises(ConfigError, match="transformers, gguf, adapter"):
        export("letters", tmp_path / "again", "onnx", None, None, record.path.parent)


def test_experts_are_trained_on_the_samplers_choices(tmp_path, sparse):
    record = trained(tmp_path, sparse, experts={"balance": 0.01})
    for step in record.steps:
        assert step.metrics["experts_replay_differs"] < 0.05  # fp32: rounding alone may tip a choice
        assert 1 <= step.metrics["experts_load_max"] <= 8 / 2
        assert step.metrics["experts_balance"] >= 0.99
        assert step.metrics["mismatch_max"] < 1e-4
    for group, _ in read_groups(record.path / "rollouts" / "rl-000000.parquet"):
        for rollout in group.rollouts:
            for call in rollout.calls:
                places = len(call.prompt) + len(call.tokens)
                assert len(call.experts.ids) == 2 * places * 2 * 2  # int16, two layers, two experts each
    stored = json.loads((record.path / "checkpoints" / "rl-000002" / "config.json").read_text())
    assert "strop" not in json.dumps(stored)


def test_a_frozen_router_comes_out_as_it_went_in(tmp_path, sparse):
    record = trained(tmp_path, sparse, experts={"router": "frozen"})
    before, after = (load_model(str(f)).model.state_dict() for f in (sparse, record.path / "checkpoints" / "rl-000002"))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any(name.endswith("mlp.gate.weight") for name in moved)


def test_settings_of_experts_need_experts(tmp_path, dense):
    run = Run.create(tmp_path / "run", recipe(dense, experts={}))
    with pytest.raises(ConfigError, match=r"model\.experts: .* has no experts"):
        build(run, load_model(str(dense)))
    with pytest.raises(ConfigError, match="balance trains the router"):
        recipe(dense, experts={"router": "frozen", "balance": 0.1})


def test_targets_are_checked_before_anything_starts(tmp_path, dense):
    run = Run.create(tmp_path / "run", recipe(dense, lora={"targets": ["qproj"]}))
    with pytest.raises(ConfigError, match=r"'qproj' is not in the model\. Did you mean 'q_proj'\?"):
        build(run, load_model(str(dense)))


def test_a_run_that_runs_out_of_memory_goes_on_and_says_so(tmp_path, dense, monkeypatch):
    own = EmbeddedLearner._part_logprobs

    def starved(self, part, *arguments):
        if len(part.tree.tokens) > 60:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123456 bytes")
        return own(self, part, *arguments)

    monkeypatch.setattr(EmbeddedLearner, "_part_logprobs", starved)
    record = trained(tmp_path, dense)
    assert record.state == "finished" and len(record.steps) == 2
    said = [event for event in record.warnings if "ran out of memory" in event["message"]]
    assert len(said) == 1 and said[0]["tokens_per_micro_batch"] <= 60
