"""Wrong input is refused before work starts, by one paragraph that names the key and what would be right."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from strop.config import load_recipe
from strop.errors import ConfigError, StropError
from strop.training.train import check

GOOD: dict[str, Any] = {
    "name": "good",
    "environment": {"name": "arithmetic", "agent": {"kind": "single_reply", "max_tokens": 16}},
    "evaluation": {"tasks": 10},
    "stages": [
        {
            "kind": "rl",
            "name": "rl",
            "steps": 3,
            "schedule": {"learning_rate": 1e-5},
            "collect": {"groups": 2},
            "advantage": {"name": "grpo"},
            "loss": [{"name": "ppo_clip"}],
        }
    ],
}
SFT = {"kind": "sft", "name": "warmup", "steps": 2, "schedule": {"learning_rate": 1e-4}}

#: (where, value, what the message must say); the value DELETE takes the key away.
DELETE = object()
WRONG: list[tuple[str, Any, str]] = [
    ("name", DELETE, "name: it is missing"),
    ("name", "a/b", "name: 'a/b' is not right"),
    ("name", "", "name: '' is not right"),
    ("nme", "x", "nme: there is no such key. Did you mean 'name'?"),
    ("seed", "zero", "seed: 'zero' is not right. It should be integer"),
    ("threads", -1, "threads: -1 is not right"),
    ("model.name", 3, "model.name: 3 is not right"),
    ("model.name", "/no/such/folder", "'/no/such/folder': there is no such folder"),
    ("model.name", "smolm2", "'smolm2'"),
    ("model.dtype", "float8", "model.dtype: 'float8' is not right. It should be 'auto', 'float32' or 'bfloat16'"),
    ("model.lora", {"rank": 0}, "model.lora.rank: 0 is not right"),
    ("model.lora", {"rnk": 8}, "model.lora.rnk: there is no such key. Did you mean 'rank'?"),
    ("sampler.kind", "vllmm", "sampler.kind: 'vllmm' is not right"),
    ("sampler.slots", 0, "sampler.slots: 0 is not right"),
    ("sampler.max_context", 16, "leaves no room for a prompt"),
    ("sampler.temperature", 1.0, "sampler.temperature: there is no such key"),
    ("learner.betas", [0.9], "learner.betas"),
    ("learner.max_grad_norm", 0.0, "learner.max_grad_norm: 0.0 is not right"),
    ("environment", DELETE, "add an [environment] table"),
    ("environment.agent", {"kind": "program"}, "needs a command"),
    ("environment.agent", {"kind": "tool_loop", "command": "mini"}, "command is a setting of program"),
    ("environment.agent", {"token_budget": 5}, "token_budget is a setting of program and own_harness"),
    (
        "environment.agent",
        {"kind": "program", "command": "mini", "seconds": 300.0},
        "not below collect.attempt_seconds",
    ),
    ("environment.name", "arithmetics", "Did you mean 'arithmetic'?"),
    ("environment.name", "no.such.module:Thing", "no.such.module"),
    ("environment.name", "json:dumps", "json:dumps"),
    ("environment.name", "missing_file.py:Env", "missing_file.py"),
    ("environment.options", {"digit": 2}, "digit"),
    ("environment.options", {"digits": 9}, "digits"),
    ("environment.options", {"operations": ["%"]}, "'%' is not an operation"),
    ("environment.agent.kind", "toolloop", "environment.agent.kind: 'toolloop' is not right"),
    ("environment.agent.max_tokens", 0, "environment.agent.max_tokens: 0 is not right"),
    ("evaluation.tasks", -5, "evaluation.tasks: -5 is not right"),
    ("evaluation.split", "validation", "validation"),
    ("costs.machine", "aws:imaginary", "imaginary"),
    ("costs.usd_per_hour", -1.0, "costs.usd_per_hour: -1.0 is not right"),
    ("stages", [], "stages: [] is not right"),
    ("stages", DELETE, "stages: it is missing"),
    ("stages.0.kind", "ppo", "there is no stage kind 'ppo'. There are: 'sft', 'preference', 'reward', 'rl', 'distill'"),
    (
        "stages.0.kind",
        DELETE,
        "stages.rl.kind: it is missing. Say one of: 'sft', 'preference', 'reward', 'rl', 'distill'",
    ),
    ("stages.0.steps", 0, "stages.rl.steps: 0 is not right"),
    ("stages.0.steps", 2.5, "stages.rl.steps: 2.5 is not right"),
    ("stages.0.batch_size", 8, "stages.rl.batch_size: there is no such key"),
    ("stages.0.schedule", DELETE, "stages.rl.schedule: it is missing"),
    ("stages.0.schedule.learning_rate", 0.0, "stages.rl.schedule.learning_rate: 0.0 is not right"),
    ("stages.0.schedule.warmup_steps", 3, "stages.rl.schedule.warmup_steps: 3 leaves none of the 3 steps"),
    ("stages.0.schedule.kind", "cosin", "stages.rl.schedule.kind: 'cosin' is not right"),
    ("stages.0.collect.group_size", 1, "collect.group_size = 1 leaves nothing to compare"),
    ("stages.0.collect.grops", 2, "stages.rl.collect.grops: there is no such key. Did you mean 'groups'?"),
    ("stages.0.collect.staleness", -1, "stages.rl.collect.staleness: -1 is not right"),
    ("stages.0.collect.temperature", 0.0, "stages.rl.collect.temperature: 0.0 is not right"),
    ("stages.0.collect.top_p", 0.9, "allow_truncated_sampling = true"),
    (
        "stages.0.advantage.name",
        "grpoo",
        "stages.rl.advantage.name: there is no advantage 'grpoo'. Did you mean 'grpo'?",
    ),
    ("stages.0.advantage.unknown", 1, "stages.rl.advantage.unknown"),
    ("stages.0.loss", [], "stages.rl.loss"),
    ("stages.0.loss.0.name", "ppo_clp", "Did you mean 'ppo_clip'?"),
    ("stages.0.loss.0.low", "much", "stages.rl.loss"),
    ("stages.0.overlong", {"max_tokens": 10, "window": 20}, "stages.rl.overlong.window"),
    ("stages.1", {**SFT, "name": "rl"}, "two stages are called 'rl'"),
    ("stages.1", {**SFT, "collect": {}}, "stages.warmup.collect: there is no such key"),
]


def put(table: Any, where: str, value: Any) -> None:
    *path, last = where.split(".")
    for part in path:
        table = table[int(part)] if isinstance(table, list) else table.setdefault(part, {})
    if isinstance(table, list) and int(last) == len(table):
        table.append(value)
    elif value is DELETE:
        del table[last]
    else:
        table[int(last) if isinstance(table, list) else last] = value


def test_the_good_recipe_is_good(tmp_path):
    (tmp_path / "good.toml").write_text(tomli_w.dumps(GOOD))
    check(load_recipe(tmp_path / "good.toml"))


def test_there_are_many_kinds_of_wrong_input():
    assert len({where for where, _, _ in WRONG}) >= 40


@pytest.mark.parametrize(("where", "value", "says"), WRONG, ids=[f"{where}={value!r:.30}" for where, value, _ in WRONG])
def test_wrong_input_is_named(tmp_path, where, value, says):
    table = copy.deepcopy(GOOD)
    put(table, where, value)
    (tmp_path / "r.toml").write_text(tomli_w.dumps(table))
    with pytest.raises(StropError) as caught:
        check(load_recipe(tmp_path / "r.toml"))
    message = str(caught.value)
    assert says in message and "\n" not in message and 20 < len(message) < 800, message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed", "--set seed: it has no '='"),
        ("stages.r.steps=2", "there is no stages entry named 'r'. There are: rl"),
        ("stages.rl=2", "it names a whole stage"),
        ("seed.x=2", "seed is a value, not a table"),
        ("stages.rl.stps=2", "Did you mean 'steps'?"),
    ],
)
def test_wrong_overrides_are_named(tmp_path, override, says):
    (tmp_path / "r.toml").write_text(tomli_w.dumps({**GOOD, "seed": 1}))
    with pytest.raises(ConfigError) as caught:
        load_recipe(tmp_path / "r.toml", [override])
    assert says in str(caught.value)


def test_overrides_are_taken(tmp_path):
    (tmp_path / "r.toml").write_text(tomli_w.dumps(GOOD))
    recipe = load_recipe(tmp_path / "r.toml", ["stages.rl.steps=7", "model.name=some/model", "learner.betas=[0.8,0.9]"])
    assert (recipe.stages[0].steps, recipe.model.name, recipe.learner.betas) == (7, "some/model", (0.8, 0.9))


@pytest.mark.parametrize(
    ("content", "says"), [(None, "there is no such file"), (b"a = [", "not valid TOML"), (b"\xff", "can't be read")]
)
def test_recipes_that_are_no_recipes(tmp_path, content, says):
    path = tmp_path / "r.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StropError, match=says):
        load_recipe(path)


FOLDERS = {
    "empty": ({}, "it has no config.json"),
    "no type": ({"config.json": {}}, "has no model_type"),
    "not json": ({"config.json": "{"}, "config.json can't be read"),
    "wrong kind": (
        {"config.json": {"model_type": "bert", "architectures": ["BertModel"]}},
        "not a causal language model",
    ),
    "quantised": ({"config.json": {"model_type": "llama", "quantization_config": {}}}, "quantised"),
    "no weights": ({"config.json": {"model_type": "llama"}}, "holds no weights"),
    "no tokenizer": ({"config.json": {"model_type": "llama"}, "model.safetensors": {}}, "holds no tokenizer"),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_model_folders_that_are_none(tmp_path: Path, kind):
    content, says = FOLDERS[kind]
    for name, value in content.items():
        (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    table = {**GOOD, "model": {"name": str(tmp_path)}}
    (tmp_path / "r.toml").write_text(tomli_w.dumps(table))
    with pytest.raises(StropError, match=says):
        check(load_recipe(tmp_path / "r.toml"))
