"""Faults over any environment: drawn from the seed, bounded, and told apart from failures of the system."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from strop.environments import Environment, Session, ToolOutcome, load_environment
from strop.environments.faults import KINDS, Faults
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, Rollout, Scored, Task


class Counter(Environment):
    """One tool that counts its calls; the score is that number."""

    name = "counter"

    def tasks(self, split: str) -> Sequence[Task]:
        return [Task("one", "counter", ({"role": "user", "content": "count"},))]

    async def start(self, task: Task, seed: int) -> Session:
        return CounterSession(self, task, seed)


class CounterSession(Session):
    count = 0
    closed = False

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        if name == "break":
            raise AttemptError(FailureKind.SANDBOX, "it died")
        self.count += 1
        return ToolOutcome(f"called {self.count} times")

    async def score(self, rollout: Rollout) -> Scored:
        return Scored(float(self.count), {"own": 1.0}, solved=True)

    async def close(self) -> None:
        self.closed = True


def faulty(**options: object) -> Faults:
    return load_environment("faults", {"environment": f"{__file__}:Counter", **options})  # type: ignore[return-value]


async def errors(environment: Faults, seed: int, calls: int) -> list[str | None]:
    session = await environment.start(environment.tasks("train")[0], seed)
    return [(await session.call("count", {})).error for _ in range(calls)]


async def score(session: Session) -> Scored:
    return await session.score(Rollout("r", "one", "counter", 0, 1))


async def test_without_a_rate_nothing_changes() -> None:
    environment = faulty(rate=0.0)
    assert environment.name == "counter" and environment.tasks("train")[0].id == "one"
    session = await environment.start(environment.tasks("train")[0], 1)
    assert (await session.call("count", {})).content == "called 1 times"
    assert await score(session) == Scored(1.0, {"own": 1.0, "faults_met": 0.0}, solved=True)


async def test_the_seed_decides_what_goes_wrong() -> None:
    environment = faulty(rate=0.5, most=1000)
    assert await errors(environment, 1, 50) == await errors(environment, 1, 50)
    assert await errors(environment, 1, 50) != await errors(environment, 2, 50)


async def test_the_rate_is_met_and_every_kind_occurs() -> None:
    seen = await errors(faulty(rate=0.3, most=100_000), 7, 4000)
    met = [error for error in seen if error]
    assert 0.27 < len(met) / len(seen) < 0.33 and set(met) == set(KINDS)


async def test_an_attempt_meets_no_more_than_its_bound() -> None:
    seen = await errors(faulty(rate=1.0, most=3), 1, 10)
    assert [error is not None for error in seen] == [True] * 3 + [False] * 7


@pytest.mark.parametrize(
    ("kind", "ran"), [("timeout", 1), ("truncated", 1), ("transient", 0), ("killed", 0), ("disk full", 0)]
)
async def test_some_faults_lose_the_answer_and_some_the_work(kind: str, ran: int) -> None:
    environment = faulty(rate=1.0, most=1, kinds=[kind])
    session = await environment.start(environment.tasks("train")[0], 1)
    outcome = await session.call("count", {})
    assert outcome.error == kind and "called 1 times" not in outcome.content
    assert (await score(session)).reward == ran


async def test_recovery_is_a_later_call_that_goes_well() -> None:
    environment = faulty(rate=1.0, most=2, kinds=["transient"])
    session = await environment.start(environment.tasks("train")[0], 1)
    await session.call("count", {})
    assert (await score(session)).metrics["fault_recovery"] == 0.0
    await session.call("other", {})
    await session.call("count", {})
    assert (await score(session)).metrics == {
        "own": 1.0,
        "faults_met": 2.0,
        "faults_met_transient": 2.0,
        "fault_recovery": 0.5,
    }


async def test_failures_of_the_system_pass_through_and_closing_reaches_the_inner_attempt() -> None:
    environment = faulty(rate=0.0)
    session = await environment.start(environment.tasks("train")[0], 1)
    with pytest.raises(AttemptError):
        await session.call("break", {})
    await session.close()
    assert session._inner.closed  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{"rate": 1.5}, {"kinds": ["lightning"]}, {"kinds": []}, {"most": -1}])
def test_settings_that_can_not_be_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        faulty(**options)
