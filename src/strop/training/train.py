"""A recipe from beginning to end: check everything, build the workshop, take the stages in turn, sum up."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from strop.agents import make_agent
from strop.config import Recipe, RLSettings, SFTSettings, StageSettings
from strop.costs import price_of, summarise
from strop.environments import load_environment
from strop.errors import ConfigError, RunError
from strop.models.load import check_model, load_model
from strop.rollouts import derive_seed
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.runs.waits import GRACE
from strop.training.health import HealthWatch, check_signals
from strop.training.replay import borrow_batches
from strop.training.workshop import Workshop, check_prompt

if TYPE_CHECKING:
    from strop.models.load import Loaded


def check(recipe: Recipe) -> None:
    """Refuse what can't work, before anything is loaded or written.

    Raises:
        StropError: names the setting, what is wrong and what would be right.
    """
    from strop.learning import Schedule, make_advantage, make_loss

    price_of(recipe.costs.machine, recipe.costs.usd_per_hour)
    check_model(recipe.model.name)
    check_signals(recipe.health)
    if recipe.model.lora is not None:
        _need("peft", "model.lora", "strop[lora]")
    for stage in recipe.stages:
        key = f"stages.{stage.name}"
        asked = recipe.environment_of(stage)
        environment = load_environment(asked.name, asked.options)
        make_agent(asked.agent)
        if not len(environment.tasks("train")):
            raise ConfigError(
                f"{key}.environment", f"{asked.name} has no training tasks", "Choose options that leave some"
            )
        evaluation = recipe.evaluation_of(stage)
        if evaluation.tasks and not len(environment.tasks(evaluation.split)):
            there = f"{asked.name} has no tasks in its split {evaluation.split!r}"
            raise ConfigError(f"{key}.evaluation.split", there, "Name another split, or set evaluation.tasks = 0")
        if stage.schedule.warmup_steps >= stage.steps:
            raise ConfigError(
                f"{key}.schedule.warmup_steps",
                f"{stage.schedule.warmup_steps} leaves none of the {stage.steps} steps at the full rate",
                f"It must be below {stage.steps}",
            )
        Schedule(steps=stage.steps, **stage.schedule.model_dump())
        if isinstance(stage, RLSettings):
            make_advantage(stage.advantage.spec, f"{key}.advantage")
            make_loss([part.spec for part in stage.loss], f"{key}.loss")
            if stage.overlong and stage.overlong.window > stage.overlong.max_tokens:
                raise ConfigError(
                    f"{key}.overlong.window", "it is longer than max_tokens", "It must be at most max_tokens"
                )


def _need(module: str, key: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise ConfigError(key, f"it needs the package {module}", f"Install it: pip install '{extra}'")


def build(run: Run, loaded: Loaded) -> Workshop:
    """The workshop of a run: one copy of the weights that sampler and learner share."""
    import torch

    from strop.learning import EmbeddedLearner
    from strop.models.lora import add_adapter
    from strop.models.policy import Policy
    from strop.sampling.embedded import EmbeddedSampler
    from strop.sampling.rendering import renderer_for

    recipe = run.recipe
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    dtype = None if recipe.model.dtype == "auto" else getattr(torch, recipe.model.dtype)
    model, settings = loaded.model, recipe.learner
    if recipe.model.lora is not None:
        torch.manual_seed(
            derive_seed(recipe.seed, "adapter")
        )  # whoever resumes before a checkpoint begins with the same
        model = add_adapter(model, **recipe.model.lora.model_dump())
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    policy = Policy(model, dtype=dtype)
    learner = EmbeddedLearner(
        policy,
        loaded.tokenizer,
        masters=masters,
        tokens_per_micro_batch=settings.tokens_per_micro_batch,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        epsilon=settings.epsilon,
        max_grad_norm=settings.max_grad_norm,
    )
    sampler = EmbeddedSampler(
        policy,
        loaded.tokenizer,
        slots=recipe.sampler.slots,
        max_context=recipe.sampler.max_context,
        queue_limit=recipe.sampler.queue_limit,
        ledger=run.ledger,
    )
    return Workshop(run, sampler, learner, renderer_for(loaded.tokenizer, loaded.source))


async def train(run: Run) -> dict[str, Any]:
    """Train every stage of the run's recipe that isn't done yet.

    Returns:
        The summary, which is in summary.json too.

    Raises:
        StropError: bad input, a stall, or a run that can't go on; the run is resumable.
    """
    recipe = run.recipe
    check(recipe)
    price = price_of(recipe.costs.machine, recipe.costs.usd_per_hour)

    def tell(what: str, share: float) -> None:
        run.tell("progress", what=what, done=round(100 * share), of=100)

    borrow_batches(run)
    run.watch()
    run.listeners.append(HealthWatch(run).hear)
    with run.ledger.activity("setup"), run.waits.during("setting up", recipe.deadlines.setup_seconds):
        tell(f"loading {recipe.model.name}", 0.0)
        shop = build(run, load_model(recipe.model.name, progress=tell))
        for stage in recipe.stages:
            environment = shop.environment(stage)
            for split in ("train", recipe.evaluation_of(stage).split):
                for task in list(environment.tasks(split)[:8]):
                    check_prompt(task, shop.renderer, recipe.sampler.max_context)
        checkpoint = run.newest_whole_checkpoint()
        if checkpoint:
            shop.load(checkpoint.path)
    run.log("run", what="ready", price=price.as_record(), from_checkpoint=checkpoint.path.name if checkpoint else None)
    try:
        await _stages(run, shop, (checkpoint.stage, checkpoint.step) if checkpoint else None)
    except BaseException:
        run.ending()
        raise
    finally:
        with run.waits.during("the sampler to close", GRACE):
            await shop.sampler.close()
        run.log("cost", ledger=run.ledger.snapshot())
    summary = summarise(RunRecord(run.path))
    run.finish(summary)
    return summary


async def _stages(run: Run, shop: Workshop, reached: tuple[str, int] | None) -> None:
    recipe = run.recipe
    names = [stage.name for stage in recipe.stages]
    first = names.index(reached[0]) if reached else 0
    if not reached:
        await shop.evaluate(recipe.stages[0], "start", "", 0)
    for before, stage in list(zip([recipe.stages[0], *recipe.stages], recipe.stages, strict=False))[first:]:
        if isinstance(stage, SFTSettings) and not shop.trains:
            continue
        done = reached[1] if reached and reached[0] == stage.name else 0
        run.ledger.phase = stage.name
        if done == 0 and _scored_on(recipe, before) != _scored_on(recipe, stage):
            await shop.evaluate(stage, f"{stage.name} start", stage.name, 0)  # what it gains is seen from here
        if done < stage.steps:
            run.log("stage", stage=stage.name, what="began", step=done)
            began = time.monotonic()
            if done == 0:
                shop.learner.begin_stage()
            await _trainer(stage)(stage, shop, done)
            run.log("stage", stage=stage.name, what="ended", step=stage.steps, seconds=time.monotonic() - began)
        await shop.evaluate(stage, stage.name, stage.name, stage.steps)


def _scored_on(recipe: Recipe, stage: StageSettings) -> tuple[object, ...]:
    """What decides which tasks a stage is scored on, and how."""
    asked = recipe.evaluation_of(stage)
    return recipe.environment_of(stage), asked.tasks, asked.split, asked.attempts, asked.temperature


def _trainer(stage: StageSettings) -> Callable[[Any, Workshop, int], Awaitable[None]]:
    if isinstance(stage, RLSettings):
        from strop.training.rl import train_rl

        return train_rl
    if isinstance(stage, SFTSettings):
        from strop.training.sft import train_sft

        return train_sft
    raise RunError(f"stage {stage.name!r} is of a kind that this version can't train")
