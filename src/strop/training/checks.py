"""What is refused before anything is loaded or written: settings that can't work, each named with what would be right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from urllib.parse import urlsplit

from strop.agents import make_agent
from strop.config import (
    AttemptsSettings,
    DistillSettings,
    EnvironmentSettings,
    ExamplesSettings,
    JudgeSettings,
    PreferenceSettings,
    Recipe,
    RewardSettings,
    SFTSettings,
    StageSettings,
)
from strop.costs import price_of
from strop.environments import Environment, load_environment
from strop.environments.judging import key_of
from strop.errors import ConfigError
from strop.models.load import check_model
from strop.runs.reading import open_run
from strop.training.health import check_signals
from strop.training.stored import stored_groups
from strop.training.tasks import Curriculum


def check(recipe: Recipe) -> None:
    """Refuse what can't work, before anything is loaded or written.

    Raises:
        StropError: names the setting, what is wrong and what would be right.
    """
    from strop.learning import Schedule

    price_of(recipe.costs.machine, recipe.costs.usd_per_hour)
    check_model(recipe.model.name)
    check_signals(recipe.health)
    if recipe.model.lora is not None:
        _need("peft", "model.lora", "strop[lora]")
    if recipe.learner.moments == "8bit":
        _need("bitsandbytes", "learner.moments", "strop[low-memory]")
    for stage in recipe.stages:
        key = f"stages.{stage.name}"
        for environment in recipe.environments_of(stage):
            _check_environment(recipe, stage, environment, key)
        if stage.schedule.warmup_steps >= stage.steps:
            raise ConfigError(
                f"{key}.schedule.warmup_steps",
                f"{stage.schedule.warmup_steps} leaves none of the {stage.steps} steps at the full rate",
                f"It must be below {stage.steps}",
            )
        Schedule(steps=stage.steps, **stage.schedule.model_dump())
        if isinstance(stage, AttemptsSettings):
            _check_attempts(recipe, stage, key)
        if isinstance(stage, ExamplesSettings):
            _check_examples(recipe, stage, key)


def _check_environment(recipe: Recipe, stage: StageSettings, asked: EnvironmentSettings, key: str) -> None:
    environment = load_environment(asked.name, asked.options)
    make_agent(asked.agent)
    if not len(environment.tasks("train")):
        raise ConfigError(f"{key}.environment", f"{asked.name} has no training tasks", "Choose options that leave some")
    if asked.judge:
        _check_judge(asked.judge, environment, f"{key}.environment.judge")
    evaluation = recipe.evaluation_of(stage)
    if evaluation.tasks and not len(environment.tasks(evaluation.split)):
        there = f"{asked.name} has no tasks in its split {evaluation.split!r}"
        raise ConfigError(f"{key}.evaluation.split", there, "Name another split, or set evaluation.tasks = 0")


def _check_judge(asked: JudgeSettings, environment: Environment, key: str) -> None:
    if urlsplit(asked.url).scheme not in ("http", "https"):
        raise ConfigError(f"{key}.url", f"{asked.url!r} is no address", "For example http://127.0.0.1:8000/v1")
    key_of(asked)
    data = environment.tasks("train")[0].data
    if asked.reference and not isinstance(data.get(asked.reference), str):
        wrong = f"tasks have no text {asked.reference!r} in their data"
        raise ConfigError(f"{key}.reference", wrong, f"They have: {', '.join(sorted(data)) or 'nothing'}")


def _check_attempts(recipe: Recipe, stage: AttemptsSettings, key: str) -> None:
    from strop.learning import make_advantage, make_loss

    make_advantage(stage.advantage.spec, f"{key}.advantage")
    loss = make_loss([part.spec for part in stage.loss], f"{key}.loss")
    if stage.overlong and stage.overlong.window > stage.overlong.max_tokens:
        raise ConfigError(f"{key}.overlong.window", "it is longer than max_tokens", "It must be at most max_tokens")
    teachers = isinstance(stage, DistillSettings) and stage.teachers
    if "teacher_logprobs" in loss.needs and not teachers:
        raise ConfigError(
            f"{key}.loss", "it needs a teacher, and the stage has none", "Name teachers in a distill stage"
        )
    if teachers and "teacher_logprobs" not in loss.needs:
        raise ConfigError(f"{key}.teachers", "no component of the loss learns from them", 'Add {name = "reverse_kl"}')
    if stage.collect.group_size == 1 and any(part.scales_with_advantage for _, _, part in loss.components):
        wrong = "it is 1, but a component of the loss learns from how members of a group differ in reward"
        raise ConfigError(f"{key}.collect.group_size", wrong, "It should be at least 2")
    for environment in stage.environments:
        if environment.curriculum:
            tasks = load_environment(environment.name, environment.options).tasks("train")
            Curriculum(environment.curriculum, tasks, recipe.seed)
    if isinstance(stage, DistillSettings):
        _check_distillation(recipe, stage, key)


def _check_examples(recipe: Recipe, stage: ExamplesSettings, key: str) -> None:
    """What can be told of given examples without the model's tokenizer; their rows are looked at before any step."""
    from strop.data.files import data_files
    from strop.training.preference import preference_loss
    from strop.training.reward import reward_loss

    if isinstance(stage, PreferenceSettings):
        preference_loss(stage)
    if isinstance(stage, RewardSettings):
        reward_loss(stage)
        if recipe.model.lora is not None:
            raise ConfigError("model.lora", "a reward model is trained whole", "Leave the table out")
    if stage.data is not None:
        data_files(Path(stage.data.path).expanduser(), stage.data.split)
        most = stage.data.max_tokens * (1 if isinstance(stage, SFTSettings) else 2)
        if most > recipe.learner.tokens_per_micro_batch:
            wrong = f"an example may have {most} tokens, more than learner.tokens_per_micro_batch"
            raise ConfigError(f"{key}.data.max_tokens", wrong, f"Lower it, or raise that to {most}")
    if stage.validation is not None and stage.validation.path:
        data_files(Path(stage.validation.path).expanduser())
    if isinstance(stage, PreferenceSettings | RewardSettings) and stage.attempts is not None:
        stored_groups(open_run(stage.attempts.run), stage.attempts.stage)


def _check_distillation(recipe: Recipe, stage: DistillSettings, key: str) -> None:
    from strop.training.teachers import check_teachers

    check_teachers(recipe, stage)
    if stage.stored and stage.stored.run:
        stored_groups(open_run(stage.stored.run), stage.stored.stage)
    elif stage.stored:
        before = [other.name for other in recipe.stages if isinstance(other, AttemptsSettings)]
        before = before[: before.index(stage.name)]
        if stage.stored.stage not in before:
            wrong = f"{stage.stored.stage!r} is no stage before {stage.name} that makes attempts"
            raise ConfigError(f"{key}.stored.stage", wrong, f"There are: {', '.join(before) or 'none'}")


def _need(module: str, key: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ConfigError(key, f"it needs the package {module}", f"Install it: pip install '{extra}'")
