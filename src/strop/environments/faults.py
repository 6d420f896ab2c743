"""Faults as a wrapper over any environment: its tools time out, fail for a moment, lose output, die or fill the disk.

What goes wrong is drawn from the attempt's seed, so members of a group meet faults of their own and a run can be
replayed. The agent may recover: faults that pass are gone at the next try. How often it did is a metric.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from strop.environments.environment import Demonstration, Environment, ProgramResult, Session, ToolOutcome
from strop.environments.registry import load_environment
from strop.errors import ConfigError
from strop.rollouts import Rollout, Scored, Task, derive_seed
from strop.sandboxes.sandbox import Sandbox

#: What the agent reads instead of the tool's answer.
_SAYS = {
    "timeout": "The tool did not answer in time. It may or may not have run.",
    "transient": "503 Service Unavailable: try again.",
    "killed": "The process was killed (signal 9).",
    "disk full": "OSError: [Errno 28] No space left on device",
}
#: Faults after which the tool has done its work all the same.
_AFTER = {"timeout", "truncated"}
KINDS = (*_SAYS, "truncated")


class Faults(Environment):
    """Another environment with faults in its tools.

    Args:
        environment: its name, import path or file, as a recipe would give it.
        options: of that environment.
        rate: probability that a call meets a fault.
        kinds: which faults, drawn evenly: "timeout" (the tool ran, its answer is lost), "transient" (it did not run),
            "truncated" (half its answer is lost), "killed" and "disk full" (it did not run).
        most: faults that one attempt meets at most; without a bound an attempt might never get through.
    """

    def __init__(
        self,
        environment: str,
        options: dict[str, object] | None = None,
        rate: float = 0.2,
        kinds: Sequence[str] = KINDS,
        most: int = 3,
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ConfigError(
                "environment.options.kinds", f"{unknown or 'none'} can't be met", f"Some of {', '.join(KINDS)}"
            )
        if not 0 <= rate <= 1:
            raise ConfigError("environment.options.rate", f"it is {rate}", "A probability from 0 to 1")
        if most < 0:
            raise ConfigError("environment.options.most", f"it is {most}", "0 or more")
        self.inner = load_environment(environment, options)
        self.name = self.inner.name
        self.rate, self.kinds, self.most = rate, tuple(kinds), most

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment`: those of the inner one, unchanged."""
        return self.inner.tasks(split)

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment`."""
        return FaultySession(self, task, seed, await self.inner.start(task, seed))

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        """See `Environment`."""
        return await self.inner.score(task, rollout)

    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        """See `Environment`: those of the inner one."""
        return self.inner.demonstrations(count, rng)


class FaultySession(Session):
    """One attempt's tools, some of whose calls go wrong, and whether the agent got over it."""

    def __init__(self, environment: Faults, task: Task, seed: int, inner: Session) -> None:
        super().__init__(environment, task, seed)
        self._faults, self._inner = environment, inner
        self._rng = random.Random(derive_seed("faults", seed))
        self._met: dict[str, int] = {}
        self._hurt: set[str] = set()  # tools whose last call met a fault
        self._recovered = 0

    @property
    def sandbox(self) -> Sandbox | None:  # type: ignore[override]
        """The inner attempt's sandbox."""
        return self._inner.sandbox

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        """See `Session`. The draws do not depend on what is called, so a replay with other words meets the same."""
        strikes, kind = self._rng.random() < self._faults.rate, self._rng.choice(self._faults.kinds)
        if not strikes or sum(self._met.values()) >= self._faults.most:
            outcome = await self._inner.call(name, arguments)
            if outcome.error is None and name in self._hurt:
                self._hurt.discard(name)
                self._recovered += 1
            return outcome
        self._met[kind] = self._met.get(kind, 0) + 1
        self._hurt.add(name)
        done = await self._inner.call(name, arguments) if kind in _AFTER else None
        if kind == "truncated" and done is not None:
            half = done.content[: len(done.content) // 2]
            return ToolOutcome(f"{half}\n[output truncated]", error="truncated")
        return ToolOutcome(_SAYS[kind], error=kind)

    async def program_ended(self, result: ProgramResult) -> None:
        """See `Session`."""
        await self._inner.program_ended(result)

    async def score(self, rollout: Rollout) -> Scored:
        """See `Session`: the inner score, with what was met and how much of it was got over.

        A tool counts as got over when a later call of it goes well; `fault_recovery` is absent where nothing was met.
        """
        scored = await self._inner.score(rollout)
        met = sum(self._met.values())
        metrics: dict[str, float] = {"faults_met": float(met)}
        metrics |= {f"faults_met_{kind.replace(' ', '_')}": float(count) for kind, count in sorted(self._met.items())}
        if met:
            metrics["fault_recovery"] = self._recovered / (self._recovered + len(self._hurt))
        return Scored(scored.reward, _joined(scored.metrics, metrics), scored.solved)

    async def close(self) -> None:
        """See `Session`."""
        await self._inner.close()


def _joined(inner: Mapping[str, float], own: Mapping[str, float]) -> dict[str, float]:
    """Both; the inner environment's own word counts where names meet."""
    return {**own, **inner}
