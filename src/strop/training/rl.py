"""Reinforcement learning: attempt, score, update, publish, over and over.

The loop does not know its algorithm: the recipe names what turns rewards into advantages and what the loss is.
Synchronous and asynchronous collection are the same lines; `collect.staleness` is the difference.
"""

from __future__ import annotations

from functools import partial

from strop.config import RLSettings
from strop.learning import Schedule, has_variance, make_advantage, make_loss, pack
from strop.rollouts import Group
from strop.training.collector import Collector
from strop.training.metrics import batch_metrics
from strop.training.rewards import shaped_rewards
from strop.training.workshop import Workshop


async def train_rl(stage: RLSettings, shop: Workshop, done: int) -> None:
    """Train a stage.

    Args:
        stage: the recipe's.
        shop: what it works with.
        done: steps that the loaded checkpoint holds already. Batches stored after it are trained on again, unsampled.
    """
    run, learner = shop.run, shop.learner
    advantage, loss = make_advantage(stage.advantage.spec), make_loss([part.spec for part in stage.loss])
    rate = Schedule(steps=stage.steps, **stage.schedule.model_dump()).at
    rewards = partial(shaped_rewards, overlong=stage.overlong)
    source, seed = shop.tasks(stage), shop.seed(stage.name)
    async with Collector(run, stage.name, source, stage.collect, seed, drop_reason(stage)) as collector:
        for step in range(done, stage.steps):
            groups = await collector.next_batch(step)  # on disk by now
            metrics = batch_metrics(groups, shop.version)
            batch = pack(groups, advantage, rewards=rewards, mask_truncated=stage.collect.mask_truncated)
            if batch.teaches:
                metrics |= await shop.work(learner.forward_backward, batch, loss, stage.collect.temperature)
                metrics |= await shop.work(learner.step, rate(step))  # publishes: every token keeps its own version
                metrics |= shop.canary.heard()  # of the update before
                shop.canary.ask()
            else:
                run.warn(f"step {step + 1}: no group has any variance in its rewards, so there was nothing to learn from")
            collector.stepped(step)
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
