"""A recipe from beginning to end: check everything, build the workshop, take the stages in turn, sum up."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from strop.config import DistillSettings, ExamplesSettings, ExpertSettings, Recipe
from strop.costs import price_of, summarise
from strop.errors import ConfigError
from strop.models.load import load_model
from strop.rollouts import derive_seed
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.runs.waits import GRACE
from strop.training.chain import train_stages
from strop.training.checks import check
from strop.training.examples import gather
from strop.training.health import HealthWatch
from strop.training.replay import borrow_batches
from strop.training.teachers import check_teachers
from strop.training.workshop import Workshop, check_prompt

if TYPE_CHECKING:
    from torch import Tensor

    from strop.models.load import Loaded
    from strop.models.policy import Policy

__all__ = ["build", "check", "fresh_weights", "train"]


def build(run: Run, loaded: Loaded) -> Workshop:
    """The workshop of a run: one copy of the weights that sampler and learner share."""
    import torch

    from strop.learning import EmbeddedLearner
    from strop.models.policy import Policy
    from strop.sampling.embedded import EmbeddedSampler
    from strop.sampling.rendering import renderer_for

    recipe = run.recipe
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    dtype = None if recipe.model.dtype == "auto" else getattr(torch, recipe.model.dtype)
    model, settings = _as_trained(loaded.model, recipe), recipe.learner
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    policy = Policy(model, dtype=dtype)
    experts = _expert_settings(recipe, policy)
    learner = EmbeddedLearner(
        policy,
        loaded.tokenizer,
        masters=masters,
        tokens_per_micro_batch=settings.tokens_per_micro_batch,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        epsilon=settings.epsilon,
        max_grad_norm=settings.max_grad_norm,
        recompute=settings.activation_checkpointing,
        moments=settings.moments,
        replay_experts=experts.replay,
        balance=experts.balance,
    )
    sampler = EmbeddedSampler(
        policy,
        loaded.tokenizer,
        slots=recipe.sampler.slots,
        max_context=recipe.sampler.max_context,
        queue_limit=recipe.sampler.queue_limit,
        ledger=run.ledger,
    )
    renderer = renderer_for(loaded.tokenizer, loaded.source)
    return Workshop(run, sampler, learner, renderer, loaded.tokenizer, partial(fresh_weights, recipe))


def _as_trained(model: Any, recipe: Recipe) -> Any:
    """A model as the recipe trains it: with a router that stays, or an adapter, if it asks for one."""
    if recipe.model.experts and recipe.model.experts.router == "frozen":
        from strop.models.experts import find_experts

        layout = find_experts(model)
        for parameter in layout.parameters() if layout else ():
            parameter.requires_grad_(False)
    if recipe.model.lora is None:
        return model
    import torch

    from strop.models.lora import add_adapter

    torch.manual_seed(derive_seed(recipe.seed, "adapter"))  # whoever resumes before a checkpoint begins with the same
    return add_adapter(model, **recipe.model.lora.model_dump())


def _expert_settings(recipe: Recipe, policy: Policy) -> ExpertSettings:
    """The recipe's settings for experts.

    Raises:
        ConfigError: it has some, but the model has no experts.
    """
    if recipe.model.experts and policy.experts is None:
        wrong = f"{recipe.model.name} has no experts"
        raise ConfigError("model.experts", wrong, "Leave the table out, or name a mixture-of-experts model")
    return recipe.model.experts or ExpertSettings()


def fresh_weights(recipe: Recipe) -> dict[str, Tensor]:
    """Weights of the recipe's model as a run begins with them, fp32, by parameter name."""
    model = _as_trained(load_model(recipe.model.name).model, recipe)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


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
            for environment in shop.environments(stage).values():
                for split in ("train", recipe.evaluation_of(stage).split):
                    for task in list(environment.tasks(split)[:8]):
                        check_prompt(task, shop.renderer, recipe.sampler.max_context)
            if isinstance(stage, DistillSettings):
                check_teachers(recipe, stage, shop.tokenizer)
            if isinstance(stage, ExamplesSettings) and shop.trains:
                gather(stage, shop)
        checkpoint = run.newest_whole_checkpoint()
        if checkpoint:
            shop.load(checkpoint.path)
    run.log("run", what="ready", price=price.as_record(), from_checkpoint=checkpoint.path.name if checkpoint else None)
    try:
        await train_stages(run, shop, (checkpoint.stage, checkpoint.step) if checkpoint else None)
    except BaseException:
        run.ending()
        raise
    finally:
        with run.waits.during("the sampler to close", GRACE):
            await shop.close()
        run.log("cost", ledger=run.ledger.snapshot())
    summary = summarise(RunRecord(run.path))
    run.finish(summary)
    return summary
