"""An environment whose tasks, harness and scoring live in worker processes: the worker acts and scores, strop samples
and records. Its agent is `strop.agents.own_harness.OwnHarness`.
"""

from __future__ import annotations

import asyncio
import json
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.environments.environment import Environment, Session
from strop.environments.workers.pool import ModelAccess, WorkerPool
from strop.errors import AttemptError
from strop.rollouts import FailureKind, Rollout, Scored, Task

_WORKER = Path(__file__).with_name("worker.py")
_ADAPTERS = {
    "verifiers": f"{Path(__file__).with_name('verifiers_adapter.py')}:VerifiersAdapter",
    "verifiers_v1": f"{Path(__file__).with_name('verifiers_v1_adapter.py')}:VerifiersV1Adapter",
}


class WorkerSession(Session):
    """One attempt that a worker makes."""

    environment: WorkerEnvironment

    def __init__(self, environment: WorkerEnvironment, task: Task, seed: int) -> None:
        super().__init__(environment, task, seed)
        self._result: Mapping[str, object] | None = None

    async def act(self, model: ModelAccess) -> None:
        """Let the worker's own harness act on the task, and score it.

        Raises:
            AttemptError: the harness or the scorer broke, or the worker died.
        """
        split, index = str(self.task.data["split"]), int(self.task.data["index"])
        pool = self.environment.pool()
        self._result = await pool.attempt(split, index, model, self.seed)

    async def score(self, rollout: Rollout) -> Scored:
        """What the worker gave."""
        if self._result is None:
            raise AttemptError(FailureKind.SCORER, "the worker gave no result; its agent has to be OwnHarness")
        reward = self._result.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise AttemptError(FailureKind.SCORER, f"the worker gave the reward {reward!r}, which is no finite number")
        metrics = self._result.get("metrics") or {}
        solved = self._result.get("solved")
        assert isinstance(metrics, Mapping)
        return Scored(
            float(reward),
            {str(name): float(value) for name, value in metrics.items()},
            solved if isinstance(solved, bool) else None,
        )


class WorkerEnvironment(Environment):
    """An environment of another Python.

    Args:
        environment: its name, as its adapter knows it.
        python: the interpreter that has it, for example ".venvs/wordle/bin/python".
        adapter: "verifiers" (packages with `load_environment`, verifiers < 0.4), "verifiers_v1" (tasksets, verifiers ≥
            0.4), or "path/to/file.py:Class".
        options: passed to the adapter.
        workers, capacity: processes, and attempts that each makes at once.
        start_seconds: how long a worker may take to load the environment.
    """

    def __init__(
        self,
        environment: str,
        python: str,
        adapter: str = "verifiers",
        options: dict[str, object] | None = None,
        workers: int = 1,
        capacity: int = 64,
        start_seconds: float = 120.0,
    ) -> None:
        self.name = environment
        spec = _ADAPTERS.get(adapter, adapter)
        self._command = [python, str(_WORKER), spec, environment, json.dumps(options or {})]
        self._pool_options: dict[str, Any] = {
            "workers": workers,
            "capacity": capacity,
            "start_seconds": start_seconds,
        }
        self._tasks: dict[str, list[Task]] = {}
        self._pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, WorkerPool] = weakref.WeakKeyDictionary()

    def pool(self) -> WorkerPool:
        """The workers of this event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._pools:
            self._pools[loop] = WorkerPool(self._command, **self._pool_options)
        return self._pools[loop]

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`. The first time, a worker is started to list them."""
        if split not in self._tasks:
            self._tasks[split] = _in_a_thread(
                lambda: WorkerPool(self._command, **{**self._pool_options, "workers": 1}), split, self.name
            )
        return self._tasks[split]

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment.start`."""
        return WorkerSession(self, task, seed)

    async def close(self) -> None:
        """End the workers of this event loop."""
        pool = self._pools.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            await pool.close()


def _in_a_thread(make: Callable[[], WorkerPool], split: str, name: str) -> list[Task]:
    """The tasks of a split, asked of a worker of its own: the caller may be inside an event loop, or not."""
    from concurrent.futures import ThreadPoolExecutor

    async def ask() -> list[Task]:
        pool = make()
        try:
            rows = await pool.tasks(split)
        finally:
            await pool.close()
        return [
            Task(
                id=str(row["id"]),
                environment=name,
                messages=tuple(row["messages"]),
                data={"split": split, "index": index},
                labels={str(key): str(value) for key, value in (row.get("labels") or {}).items()},
            )
            for index, row in enumerate(rows)
        ]

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, ask()).result()
