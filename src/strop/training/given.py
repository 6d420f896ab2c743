"""Training on given examples: one loop for demonstrations, preferences and reward models.

The same learner, the same checkpoints; what an update is made of differs, and is in `sft`, `preference` and `reward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from strop.agents.metrics import Metrics
from strop.config import ExamplesSettings, PreferenceSettings, RewardSettings
from strop.data import Rendered
from strop.learning import Batch, Loss, Schedule
from strop.training.examples import batch_numbers, gather, log_examples
from strop.training.preference import PreferenceUpdate
from strop.training.reward import RewardUpdate
from strop.training.sft import SFTUpdate
from strop.training.validation import Validation

if TYPE_CHECKING:
    from strop.training.workshop import Workshop


class Update(Protocol):
    """What a step of a stage with examples does to the weights."""

    loss: Loss

    async def batch(self, examples: Sequence[Rendered]) -> Batch:
        """A batch of examples, with everything that the loss needs beyond what the learner finds by itself."""
        ...


async def update_of(stage: ExamplesSettings, shop: Workshop, done: int) -> Update:
    """What a step of the stage does, ready for the step after `done`."""
    if isinstance(stage, PreferenceSettings):
        update = PreferenceUpdate(stage, shop)
        await update.prepare(done)
        return update
    if isinstance(stage, RewardSettings):
        return RewardUpdate(stage, shop.tokenizer.pad_token_id)
    return SFTUpdate()


async def train_given(stage: ExamplesSettings, shop: Workshop, done: int) -> int:
    """Train a stage to its end, or until held-out examples say that it is over.

    Args:
        stage: the recipe's.
        shop: what it works with.
        done: steps that the loaded checkpoint holds already.

    Returns:
        The steps that were made in all.
    """
    update = await update_of(stage, shop, done)
    watched = Validation(stage, shop, update.loss, update.batch)
    if not done:
        log_examples(stage, shop)
        await watched.measure_if_due(0)
    steps = done
    while steps < stage.steps and not watched.over(steps):
        shop.run.log_step(stage.name, steps, await train_step(update, stage, shop, steps))
        steps += 1
        await watched.measure_if_due(steps)
        await shop.evaluate_if_due(stage, steps)
        ends = steps == stage.steps or watched.over(steps)
        if ends:
            watched.go_back(steps)
        if ends or (stage.checkpoints.every and steps % stage.checkpoints.every == 0):
            shop.checkpoint(stage, steps, spare=(watched.best(steps),))
    return steps


async def train_step(update: Update, stage: ExamplesSettings, shop: Workshop, step: int) -> Metrics:
    """Train on the step's examples; gives its metrics."""
    examples = gather(stage, shop).trained
    numbers = batch_numbers(stage, len(examples), step, shop.recipe.seed)
    batch = await update.batch([examples[number] for number in numbers])
    metrics = given_metrics(await shop.work(shop.learner.forward_backward, batch, update.loss, 1.0))
    rate = Schedule(steps=stage.steps, **stage.schedule.model_dump()).at(step)
    return metrics | await shop.work(shop.learner.step, rate)


def given_metrics(metrics: Metrics) -> Metrics:
    """Without those that compare the learner with the sampler of its tokens: nothing sampled these examples."""
    return {name: value for name, value in metrics.items() if name != "entropy" and not name.startswith("mismatch_")}
