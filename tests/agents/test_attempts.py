"""An attempt always comes back with an ending, and a failure of the system is never a score."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from strop.agents import SingleReply, attempts
from strop.agents.attempts import AttemptRunner
from strop.costs import Ledger
from strop.environments.environment import Environment, Session
from strop.errors import AttemptError, BatchError
from strop.rollouts import Failed, FailureKind, Rollout, Scored, Task
from strop.runs.waits import Waits
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

TASK = Task(id="t", environment="e", messages=({"role": "user", "content": "Go"},))


class Scripted(Environment):
    """Starts, scores and closes as it is told: each is a value, an exception, or a coroutine function."""

    name = "e"

    def __init__(self, start: Any = None, score: Any = None, close: Any = None) -> None:
        self.does = {"start": start, "score": score, "close": close}

    async def do(self, what: str) -> Any:
        does = self.does[what]
        if isinstance(does, BaseException):
            raise does
        return await does() if callable(does) else does

    async def start(self, task: Task, seed: int) -> Session:
        await self.do("start")
        return ScriptedSession(self, task, seed)


class ScriptedSession(Session):
    environment: Scripted

    async def score(self, rollout: Rollout) -> Scored:
        return await self.environment.do("score")

    async def close(self) -> None:
        await self.environment.do("close")


async def forever() -> None:
    await asyncio.sleep(3600)


def runner(
    scripted_sampler: Any, environment: Environment, seconds: float = 30.0, sampler: Any = None
) -> AttemptRunner:
    sampler = sampler or scripted_sampler(["42<|im_end|>"])
    tokenizer = getattr(sampler, "tokenizer", None) or scripted_sampler([]).tokenizer
    return AttemptRunner(
        environment=environment,
        agent=SingleReply(),
        sampler=sampler,
        renderer=renderer_for(tokenizer, "some/folder"),
        params=SamplingParams(max_tokens=50),
        seconds=seconds,
        ledger=Ledger(),
        clock=lambda: 0.0,
        waits=Waits(),
    )


class LostSampler:
    """Fails as it is told."""

    version, max_context = 0, 4096

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def sample(self, prompt: Any, params: Any, *, deadline: float | None = None) -> Any:
        if self.error:
            raise self.error
        await forever()

    async def close(self) -> None: ...


SANDBOX = AttemptError(FailureKind.SANDBOX, "the sandbox died")


@pytest.mark.parametrize(
    ("environment", "kind", "reason"),
    [
        (Scripted(start=SANDBOX), FailureKind.SANDBOX, "the sandbox died"),
        (Scripted(start=KeyError("x")), FailureKind.ENVIRONMENT, "KeyError"),
        (Scripted(start=SystemExit(1)), FailureKind.ENVIRONMENT, "SystemExit"),
        (Scripted(start=TimeoutError("theirs")), FailureKind.ENVIRONMENT, "theirs"),
        (Scripted(start=asyncio.CancelledError()), FailureKind.ENVIRONMENT, "cancelled itself"),
        (Scripted(score=ZeroDivisionError("oops")), FailureKind.SCORER, "oops"),
        (Scripted(score=TimeoutError("slow judge")), FailureKind.SCORER, "slow judge"),
        (Scripted(score=SystemExit(2)), FailureKind.SCORER, "SystemExit"),
        (Scripted(score=None), FailureKind.SCORER, "None instead of a Scored"),
        (Scripted(score=0.0), FailureKind.SCORER, "instead of a Scored"),
        (Scripted(score=Scored(float("nan"))), FailureKind.SCORER, "nan as reward"),
        (Scripted(score=Scored(1.0, {"speed": float("inf")})), FailureKind.SCORER, "inf as speed"),
        (Scripted(score=Scored("1")), FailureKind.SCORER, "'1' as reward"),
        (Scripted(score=SANDBOX), FailureKind.SANDBOX, "the sandbox died"),
    ],
)
async def test_every_failure_of_the_system_has_its_kind_and_no_reward(scripted_sampler, environment, kind, reason):
    rollout = await runner(scripted_sampler, environment).run("g", 0, TASK, 1)
    assert isinstance(rollout.ending, Failed) and rollout.reward is None
    assert rollout.ending.kind is kind and reason in rollout.ending.reason


@pytest.mark.parametrize("part", ["start", "score"])
async def test_our_deadline_ends_an_attempt_wherever_it_hangs(scripted_sampler, part):
    rollout = await runner(scripted_sampler, Scripted(**{part: forever}), seconds=0.05).run("g", 0, TASK, 1)
    assert rollout.ending == Failed(FailureKind.TIMEOUT, "the attempt took longer than 0.05 s")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, FailureKind.TIMEOUT),
        (AttemptError(FailureKind.SAMPLER, "the sampler was lost"), FailureKind.SAMPLER),
        (AttemptError(FailureKind.TIMEOUT, "the deadline passed"), FailureKind.TIMEOUT),
    ],
)
async def test_a_sampler_that_is_lost_or_silent(scripted_sampler, error, kind):
    made = runner(scripted_sampler, Scripted(score=Scored(1.0)), seconds=0.05, sampler=LostSampler(error))
    rollout = await made.run("g", 0, TASK, 1)
    assert isinstance(rollout.ending, Failed) and rollout.ending.kind is kind


async def test_a_session_that_cannot_be_closed_changes_no_ending_and_holds_nobody_up(scripted_sampler, monkeypatch):
    monkeypatch.setattr(attempts, "CLOSE_SECONDS", 0.05)
    for close in (forever, RuntimeError("stuck"), SystemExit(3)):
        rollout = await runner(scripted_sampler, Scripted(score=Scored(1.0), close=close)).run("g", 0, TASK, 1)
        assert rollout.ending == Scored(1.0)
    late = Scripted(score=forever, close=forever)  # past the attempt's own deadline already
    rollout = await runner(scripted_sampler, late, seconds=0.05).run("g", 0, TASK, 1)
    assert isinstance(rollout.ending, Failed) and rollout.ending.kind is FailureKind.TIMEOUT


async def test_whoever_cancels_an_attempt_sees_it_cancelled(scripted_sampler):
    made = runner(scripted_sampler, Scripted(score=forever))
    task = asyncio.create_task(made.run("g", 0, TASK, 1))
    await asyncio.sleep(0.05)
    assert "attempt g/0" in made.waits.describe() and "1 replies" in made.waits.describe()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(made.waits) == []


async def test_bad_input_is_not_retried_as_if_the_system_had_failed(scripted_sampler):
    made = runner(scripted_sampler, Scripted(), sampler=LostSampler(BatchError("the prompt is too long")))
    with pytest.raises(BatchError):
        await made.run("g", 0, TASK, 1)


async def test_scores_of_other_number_types_are_stored_as_plain_numbers(scripted_sampler):
    given = Scored(np.float32(0.5), {"steps": np.int64(3), "clean": True})  # type: ignore[arg-type,dict-item]
    rollout = await runner(scripted_sampler, Scripted(score=given)).run("g", 0, TASK, 1)
    assert rollout.ending == Scored(0.5, {"steps": 3.0, "clean": 1.0})
    assert type(rollout.reward) is float and isinstance(rollout.ending, Scored)
    assert {type(value) for value in rollout.ending.metrics.values()} == {float}
