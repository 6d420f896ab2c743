"""Supervised fine-tuning on demonstrations: the same learner, one cross-entropy component, the same checkpoints."""

from __future__ import annotations

import random

from strop.agents.metrics import Metrics
from strop.config import SFTSettings
from strop.errors import ConfigError
from strop.learning import Schedule, make_loss, pack_demonstrations
from strop.rollouts import derive_seed
from strop.sampling.rendering import training_example
from strop.training.workshop import Workshop


class SFTUpdate:
    """What a step of demonstrations does to the weights.

    Args:
        stage: the recipe's.
        shop: whose learner it is.

    Raises:
        ConfigError: the environment has no demonstrations.
    """

    def __init__(self, stage: SFTSettings, shop: Workshop) -> None:
        self.stage, self.shop = stage, shop
        self._examples = demonstrations(stage, shop)
        self._loss = make_loss([{"name": "cross_entropy"}])
        self._rate = Schedule(steps=stage.steps, **stage.schedule.model_dump()).at

    async def __call__(self, step: int) -> Metrics:
        """Train on the step's demonstrations; gives its metrics."""
        numbers = batch_numbers(self.stage, len(self._examples), step, self.shop.recipe.seed)
        batch = pack_demonstrations([self._examples[number] for number in numbers])
        learner = self.shop.learner
        metrics = sft_metrics(await self.shop.work(learner.forward_backward, batch, self._loss, 1.0))
        return metrics | await self.shop.work(learner.step, self._rate(step))


async def train_sft(stage: SFTSettings, shop: Workshop, done: int) -> None:
    """Train a stage.

    Args:
        stage: the recipe's.
        shop: what it works with.
        done: steps that the loaded checkpoint holds already.
    """
    update = SFTUpdate(stage, shop)
    for step in range(done, stage.steps):
        shop.run.log_step(stage.name, step, await update(step))
        await shop.evaluate_if_due(stage, step + 1)
        shop.checkpoint_if_due(stage, step + 1)


def sft_metrics(metrics: Metrics) -> Metrics:
    """Without those that compare the learner with the sampler of its tokens: nothing sampled a demonstration."""
    return {name: value for name, value in metrics.items() if name != "entropy" and not name.startswith("mismatch_")}


def demonstrations(stage: SFTSettings, shop: Workshop) -> list[tuple[list[int], list[bool]]]:
    """The stage's examples as tokens and masks: the same ones in every process.

    Raises:
        ConfigError: the environment has none.
    """
    environment = shop.environment(stage)
    drawn = environment.demonstrations(stage.demonstrations, random.Random(shop.seed(stage.name)))
    if not drawn:
        raise ConfigError(
            f"stages.{stage.name}.environment",
            f"{environment.name} has no demonstrations to fine-tune on",
            "Name an environment that writes them, or leave the stage out",
        )
    return [training_example(shop.renderer, demo.messages, demo.task.tools) for demo in drawn]


def batch_numbers(stage: SFTSettings, count: int, step: int, seed: int) -> list[int]:
    """Numbers of the examples that a step trains on: epochs one after another, each in an order of its own."""
    numbers = []
    for place in range(step * stage.batch_size, (step + 1) * stage.batch_size):
        epoch, within = divmod(place, count)
        numbers.append(random.Random(derive_seed(seed, stage.name, "epoch", epoch)).sample(range(count), count)[within])
    return numbers
