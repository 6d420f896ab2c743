"""Training on attempts: attempt, score, update, publish, over and over. Reinforcement learning and distillation.

The loop does not know its algorithm: the recipe names what turns rewards into advantages, what the loss is, and whether
teachers score the tokens. Synchronous and asynchronous collection are the same lines; `collect.staleness` is the
difference. Attempts that are stored already come by the same lines as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from strop.agents.metrics import Metrics
from strop.config import AttemptsSettings, DistillSettings
from strop.learning import Batch, Schedule, apart, has_variance, make_advantage, make_loss, pack
from strop.rollouts import Group
from strop.training.collector import Collector
from strop.training.metrics import batch_metrics
from strop.training.rewards import shaped_rewards
from strop.training.stored import StoredAttempts, stored_metrics
from strop.training.teachers import Teachers
from strop.training.workshop import Workshop

#: Metrics of how rewards differ within groups.
_SPREAD = ("reward_std_in_group", "groups_without_variance")


class RLUpdate:
    """What a batch of groups does to the weights: advantages, loss, gradient, step. The same for a stored batch.

    Args:
        stage: the recipe's.
        shop: whose learner it is.
    """

    def __init__(self, stage: AttemptsSettings, shop: Workshop) -> None:
        self.stage, self.shop = stage, shop
        self._advantage = make_advantage(stage.advantage.spec)
        self._loss = make_loss([part.spec for part in stage.loss])
        self._rate = Schedule(steps=stage.steps, **stage.schedule.model_dump()).at
        self._rewards = partial(shaped_rewards, overlong=stage.overlong)
        self._teachers = Teachers(stage, shop) if isinstance(stage, DistillSettings) and stage.teachers else None

    def batch(self, groups: Sequence[Group]) -> Batch:
        """The groups as the learner takes them, but for what teachers say. No baseline mixes environments."""
        masked = self.stage.collect.mask_truncated
        advantage = apart(self._advantage, [group.task.environment for group in groups])
        return pack(groups, advantage, rewards=self._rewards, mask_truncated=masked)

    async def __call__(self, groups: Sequence[Group], step: int) -> Metrics:
        """Train on the groups; gives the step's metrics."""
        learner, work = self.shop.learner, self.shop.work
        metrics, batch = batch_metrics(groups, self.shop.version), self.batch(groups)
        temperature = self.stage.collect.temperature
        if self._teachers:
            batch = await self._teachers(batch, groups, temperature)
        if batch.teaches or (self._own_targets and batch.mask.any()):
            metrics |= await work(learner.forward_backward, batch, self._loss, temperature)
            metrics |= await work(learner.step, self._rate(step))  # publishes: every token keeps its own version
        else:
            self.shop.run.warn(
                f"step {step + 1}: no group has any variance in its rewards, so there was nothing to learn from"
            )
        if not self._compares:  # what groups say of rewards says nothing about what is learnt
            metrics = {name: metrics[name] for name in metrics if name not in _SPREAD}
        return stored_metrics(metrics) if _is_stored(self.stage) else metrics

    @property
    def _compares(self) -> bool:
        """Whether the loss learns from how members of a group differ in reward."""
        return any(part.scales_with_advantage for _, _, part in self._loss.components)

    @property
    def _own_targets(self) -> bool:
        """Whether the loss has something to learn from where no reward stands out from its group's."""
        return isinstance(self.stage, DistillSettings) and not self._loss.scales_with_advantage


async def train_rl(stage: AttemptsSettings, shop: Workshop, done: int) -> int:
    """Train a stage; gives its number of steps.

    Args:
        stage: the recipe's.
        shop: what it works with.
        done: steps that the loaded checkpoint holds already. Batches stored after it are trained on again, unsampled.
    """
    run, update = shop.run, RLUpdate(stage, shop)
    async with collector_of(stage, shop) as collector:
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
    return stage.steps


def collector_of(stage: AttemptsSettings, shop: Workshop) -> Collector | StoredAttempts:
    """Where a stage's batches come from: attempts that are made, or stored ones."""
    if isinstance(stage, DistillSettings) and stage.stored:
        return StoredAttempts(shop.run, stage, shop.seed(stage.name, "order"))
    tasks = shop.tasks(stage)
    seed = shop.seed(stage.name)
    return Collector(shop.run, stage.name, tasks, stage.collect, seed, drop_reason(stage), tasks.observe)


def _is_stored(stage: AttemptsSettings) -> bool:
    return isinstance(stage, DistillSettings) and stage.stored is not None


def drop_reason(stage: AttemptsSettings):  # type: ignore[no-untyped-def]
    """Which groups are left out of training, and why: those without variance, if the recipe says so."""

    def drop(group: Group) -> str | None:
        return None if has_variance(group.rewards) or not stage.collect.dynamic_sampling else "no variance"

    return drop
