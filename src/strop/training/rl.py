"""Reinforcement learning: attempt, score, update, publish, over and over.

The loop does not know its algorithm: the recipe names what turns rewards into advantages and what the loss is.
Synchronous and asynchronous collection are the same lines; `collect.staleness` is the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from strop.agents.metrics import Metrics
from strop.config import RLSettings
from strop.learning import Batch, Schedule, has_variance, make_advantage, make_loss, pack
from strop.rollouts import Group
from strop.training.collector import Collector
from strop.training.metrics import batch_metrics
from strop.training.rewards import shaped_rewards
from strop.training.workshop import Workshop


class RLUpdate:
    """What a batch of groups does to the weights: advantages, loss, gradient, step. The same for a stored batch.

    Args:
        stage: the recipe's.
        shop: whose learner it is.
    """

    def __init__(self, stage: RLSettings, shop: Workshop) -> None:
        self.stage, self.shop = stage, shop
        self._advantage = make_advantage(stage.advantage.spec)
        self._loss = make_loss([part.spec for part in stage.loss])
        self._rate = Schedule(steps=stage.steps, **stage.schedule.model_dump()).at
        self._rewards = partial(shaped_rewards, overlong=stage.overlong)

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The groups as the learner takes them."""
        masked = self.stage.collect.mask_truncated
        return pack(groups, self._advantage, rewards=self._rewards, mask_truncated=masked)

    async def __call__(self, groups: Sequence[Group], step: int) -> Metrics:
        """Train on the groups; gives the step's metrics."""
        learner, work = self.shop.learner, self.shop.work
        metrics, batch = batch_metrics(groups, self.shop.version), self.batch(groups)
        if batch.teaches:
            metrics |= await work(learner.forward_backward, batch, self._loss, self.stage.collect.temperature)
            metrics |= await work(learner.step, self._rate(step))  # publishes: every token keeps its own version
        else:
            self.shop.run.warn(
                f"step {step + 1}: no group has any variance in its rewards, so there was nothing to learn from"
            )
        return metrics


async def train_rl(stage: RLSettings, shop: Workshop, done: int) -> None:
    """Train a stage.

    Args:
        stage: the recipe's.
        shop: what it works with.
        done: steps that the loaded checkpoint holds already. Batches stored after it are trained on again, unsampled.
    """
    run, update = shop.run, RLUpdate(stage, shop)
    source, seed = shop.tasks(stage), shop.seed(stage.name)
    async with Collector(run, stage.name, source, stage.collect, seed, drop_reason(stage)) as collector:
        for step in range(done, stage.steps):
            groups = await collector.next_batch(step)  # on disk by now
            if shop.trains:
                metrics = await update(groups, step)
                metrics |= shop.canary.heard()  # of the update before
                shop.canary.ask()
            collector.stepped(step)
            if shop.trains:
                run.log_step(stage.name, step, metrics)
                await shop.evaluate_if_due(stage, step + 1)
            if step + 1 == stage.steps:
                await collector.abandon()  # before the last checkpoint: a resume from there doesn't come back here
            shop.checkpoint_if_due(stage, step + 1)


def drop_reason(stage: RLSettings):  # type: ignore[no-untyped-def]
    """Which groups are left out of training, and why: those without variance, if the recipe says so."""

    def drop(group: Group) -> str | None:
        return None if has_variance(group.rewards) or not stage.collect.dynamic_sampling else "no variance"

    return drop
