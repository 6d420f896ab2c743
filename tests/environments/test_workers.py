"""Environments in other processes: their attempts are recorded here, and what breaks there is never a reward."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from strop.agents.attempts import AttemptRunner
from strop.agents.own_harness import OwnHarness
from strop.costs import Ledger
from strop.environments.workers import ModelAccess, WorkerEnvironment, WorkerPool
from strop.errors import AttemptError, EnvironmentProblem
from strop.rollouts import Failed, FailureKind, Scored
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

ADAPTER = f"{Path(__file__).with_name('adapter_of_a_test.py')}:Adapter"
MODEL = ModelAccess("http://127.0.0.1:9", "key", "policy", 1.0, 10)


@pytest.fixture
async def make(scripted_sampler: Callable[..., Any]) -> AsyncIterator[Callable[..., Any]]:
    """Makes an environment and a function that makes attempts at its training tasks."""
    environments = []

    def build(options: dict[str, Any] | None = None, script: Any = None, **more: Any) -> Any:
        environment = WorkerEnvironment("far", sys.executable, ADAPTER, options, **more)
        environments.append(environment)
        sampler = scripted_sampler(script or (lambda number, prompt: "done<|im_end|>"))
        runner = AttemptRunner(
            environment=environment,
            agent=OwnHarness(),
            sampler=sampler,
            renderer=renderer_for(sampler.tokenizer, "some/folder"),
            params=SamplingParams(max_tokens=20),
            seconds=60,
            ledger=Ledger(),
            clock=time.monotonic,
        )

        async def attempt(index: int) -> Any:
            return await runner.run(f"g{index}", 0, environment.tasks("train")[index], seed=1)

        return environment, attempt, sampler

    yield build
    for environment in environments:
        await environment.close()


async def test_attempts_act_there_and_are_recorded_here(make: Callable[..., Any]) -> None:
    environment, attempt, sampler = make(workers=2)
    train, test = environment.tasks("train"), environment.tasks("test")
    assert [task.id for task in test] == ["test-0", "test-1"] and len(train) == 8
    assert train[3].messages == ({"role": "user", "content": "Do 3."},) and train[3].labels == {"n": "3"}
    rollouts = await asyncio.gather(*(attempt(index) for index in range(8)))
    assert len({rollout.ending.metrics["pid"] for rollout in rollouts}) == 2  # both workers had work
    prompts = {tuple(prompt) for prompt in sampler.prompts}
    for rollout in rollouts:
        assert rollout.ending.reward == 1.0 and rollout.ending.solved is True
        (call,) = rollout.calls
        assert tuple(call.prompt) in prompts and sampler.tokenizer.decode(call.tokens) == "done<|im_end|>"


@pytest.mark.parametrize(
    ("wrong", "kind", "reason"),
    [
        ("scorer", FailureKind.SCORER, "nope"),
        ("bug", FailureKind.ENVIRONMENT, "KeyError"),
        ("nan", FailureKind.SCORER, "nan"),
        ("die", FailureKind.ENVIRONMENT, "worker ended"),
    ],
)
async def test_what_breaks_is_a_failure_and_no_reward(
    make: Callable[..., Any], wrong: str, kind: FailureKind, reason: str
) -> None:
    _, attempt, _ = make({"wrong": {"1": wrong}})
    rollout = await attempt(1)
    assert isinstance(rollout.ending, Failed) and rollout.ending.kind is kind and reason in rollout.ending.reason
    assert isinstance((await attempt(2)).ending, Scored)  # a dead worker is replaced


async def test_only_the_dead_workers_attempts_fail(make: Callable[..., Any]) -> None:
    _, attempt, _ = make({"wrong": {"0": "die"}}, workers=2)
    await attempt(7)  # both are up
    endings = [rollout.ending for rollout in await asyncio.gather(*(attempt(index) for index in range(6)))]
    assert isinstance(endings[0], Failed)
    assert sum(isinstance(ending, Scored) for ending in endings) >= 3


async def test_a_worker_that_stands_still_is_dead() -> None:
    options = '{"wrong": {"0": "hang"}}'
    worker = Path(sys.modules[WorkerPool.__module__].__file__ or "").with_name("worker.py")
    pool = WorkerPool([sys.executable, str(worker), ADAPTER, "far", options], silence_seconds=3)
    with pytest.raises(AttemptError, match="silent"):
        await pool.attempt("train", 0, MODEL, 1)
    await pool.close()


async def test_further_attempts_wait_for_a_place(make: Callable[..., Any]) -> None:
    _, attempt, sampler = make(capacity=2)
    waiting: list[int] = []
    sample = sampler.sample

    async def slow(*arguments: Any, **options: Any) -> Any:
        waiting.append(len(waiting))
        at_once = len(waiting)
        await asyncio.sleep(0.2)
        waiting.pop()
        assert at_once <= 2
        return await sample(*arguments, **options)

    sampler.sample = slow
    endings = [rollout.ending for rollout in await asyncio.gather(*(attempt(index) for index in range(6)))]
    assert all(isinstance(ending, Scored) for ending in endings), endings


async def test_a_lost_sampler_is_named_as_the_cause(make: Callable[..., Any]) -> None:
    _, attempt, sampler = make()

    async def lost(*_: Any, **__: Any) -> Any:
        raise AttemptError(FailureKind.SAMPLER, "it broke")

    sampler.sample = lost
    assert (await attempt(0)).ending == Failed(FailureKind.SAMPLER, "it broke")


async def test_an_environment_that_can_not_be_loaded_is_refused(make: Callable[..., Any]) -> None:
    environment, _, _ = make({"breaks_at_start": True})
    with pytest.raises(EnvironmentProblem, match="no such environment"):
        environment.tasks("train")
    unlisted, _, _ = make({"wrong": {"0": "unlisted"}})
    with pytest.raises(EnvironmentProblem, match=r"list the tasks of 'train'.*no such row"):
        unlisted.tasks("train")
    with pytest.raises(EnvironmentProblem, match="can't be started"):
        WorkerEnvironment("far", "/no/such/python", ADAPTER).tasks("train")


async def test_a_cancelled_attempt_is_cancelled_there_too(make: Callable[..., Any]) -> None:
    environment, attempt, sampler = make()
    await attempt(1)
    pool = environment.pool()
    sampler.sample = lambda *_, **__: asyncio.sleep(60)
    flying = asyncio.create_task(attempt(0))
    for _ in range(400):
        await asyncio.sleep(0.01)
        if pool._workers[0].waiting:
            break
    flying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flying
    assert not pool._workers[0].waiting and not pool._workers[0].dead
