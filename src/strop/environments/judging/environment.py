"""Any environment, scored by a judge: alone, or beside its own scorer."""

from __future__ import annotations

import random
from collections.abc import Sequence

from strop.environments.environment import Demonstration, Environment, Session
from strop.environments.judging.judge import Judge, blend
from strop.rollouts import Rollout, Scored, Task


class Judged(Environment):
    """An environment whose attempts a judge scores. Tasks, tools and demonstrations are the environment's own.

    Args:
        inner: the environment.
        judge: scores what was said. With a weight of 1 the environment's own scorer is not asked.
    """

    def __init__(self, inner: Environment, judge: Judge) -> None:
        self.inner, self.judge, self.name = inner, judge, inner.name

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        return self.inner.tasks(split)

    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        """See `Environment.demonstrations`."""
        return self.inner.demonstrations(count, rng)

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment.start`."""
        session = await self.inner.start(task, seed)
        own = session.score

        async def judged(rollout: Rollout) -> Scored:
            settings = self.judge.settings
            scored = await own(rollout) if settings.weight < 1 else None
            found = await self.judge.score(task, rollout.transcript)
            metrics = {"judge": found.score, **{f"judge_{name}": part for name, part in found.parts.items()}}
            if scored is None:
                return Scored(found.score, metrics, solved=found.score >= settings.solved_at)
            reward = blend(scored.reward, found.score, settings.weight)
            return Scored(reward, {**scored.metrics, **metrics}, scored.solved)

        session.score = judged  # type: ignore[method-assign]  # of this session only
        return session
