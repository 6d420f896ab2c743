"""The collector against the rules: every attempt comes out once, staleness stays in its bound, order survives kills.

The attempts here are scripted (no model): what is driven is the real collector with its real files.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.config import CollectSettings, parse_recipe
from strop.errors import RunError, StallError
from strop.rollouts import Failed, FailureKind, FinishReason, Group, ModelCall, Rollout, Scored, Task, derive_seed
from strop.runs.run import Run
from strop.runs.store import read_groups
from strop.training.collector import Collector
from strop.training.metrics import batch_metrics

RECIPE = {
    "name": "test",
    "environment": {"name": "arithmetic"},
    "stages": [{"kind": "rl", "name": "rl", "steps": 4, "schedule": {"learning_rate": 1e-5}}],
}


@dataclass
class ScriptedRunner:
    """Attempts that take a random time, fail at a rate, and are a function of their seed and the weight version."""

    failing: float = 0.0
    slowest: float = 0.002
    version: int = 0
    chaos: random.Random = field(default_factory=lambda: random.Random(0))
    started: Counter[str] = field(default_factory=Counter)
    scored: Counter[str] = field(default_factory=Counter)

    async def run(self, group_id: str, member: int, task: Task, seed: int, tries: int = 1, begun=lambda it: None):
        rollout = Rollout(f"{group_id}/{member}", task.id, task.environment, member, 0, tries=tries)
        rollout.seed = derive_seed(seed, rollout.id)
        begun(rollout)
        self.started[rollout.id] += 1
        draw = random.Random(rollout.seed)
        tokens = [draw.randrange(100) for _ in range(draw.randint(1, 5))]
        versions = []
        for _ in tokens:
            await asyncio.sleep(self.chaos.random() * self.slowest / len(tokens))
            versions.append(self.version)
        logprobs = [-0.5] * len(tokens)
        rollout.calls.append(ModelCall(None, [1, 2, 3], tokens, logprobs, versions, FinishReason.STOP))
        if self.chaos.random() < self.failing:
            rollout.ending = Failed(FailureKind.SANDBOX, "the sandbox died")
        else:
            rollout.ending = Scored(float(draw.randint(0, 1)), {"length": float(len(tokens))}, None)
            self.scored[rollout.id] += 1
        return rollout


def source_of(runner: ScriptedRunner):
    def source(number: int, _: int) -> tuple[Task, ScriptedRunner]:
        return Task(f"task-{number % 7}", "scripted", ({"role": "user", "content": str(number)},)), runner

    return source


def no_variance(group: Group) -> str | None:
    return "no variance" if len(set(group.rewards)) < 2 else None


def identity(groups: list[Group]) -> list[tuple[str, int, tuple[int, ...], float | None]]:
    """What a batch is, times aside."""
    return [(r.id, r.seed, tuple(r.calls[0].tokens if r.calls else ()), r.reward) for g in groups for r in g.rollouts]


async def collect(run: Run, runner: ScriptedRunner, settings: CollectSettings, steps: int, drop=no_variance) -> list:
    batches = []
    async with Collector(run, "rl", source_of(runner), settings, 5, drop) as collector:
        for step in range(steps):
            batch = await collector.next_batch(step)
            batches.append(batch)
            await asyncio.sleep(runner.chaos.random() * 0.002)  # the learner works
            runner.version = step + 1
            collector.stepped(step)
        await collector.abandon()
    return batches


def every_attempt(run: Run) -> list[Rollout]:
    return [r for f in (run.path / "rollouts").glob("*.parquet") for g, _ in read_groups(f) for r in g.rollouts]


COLLECT = {"groups": 3, "group_size": 3, "in_flight": 7, "retries": 2, "max_failed_share": 1.0}


@given(
    staleness=st.integers(0, 3),
    groups=st.integers(1, 4),
    in_flight=st.integers(1, 20),
    failing=st.sampled_from([0.0, 0.2, 0.5]),
    oversample=st.integers(0, 2),
    chaos=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_staleness_stays_in_its_bound_and_every_attempt_comes_out_once(
    tmp_path_factory, staleness, groups, in_flight, failing, oversample, chaos
):
    run = Run.create(tmp_path_factory.mktemp("run") / "r", parse_recipe(RECIPE))
    runner = ScriptedRunner(failing, chaos=random.Random(chaos))
    asked = {"staleness": staleness, "groups": groups, "in_flight": in_flight, "oversample": oversample}
    settings = CollectSettings(**{**COLLECT, **asked})
    batches = asyncio.run(collect(run, runner, settings, 6))
    for step, batch in enumerate(batches):
        for rollout in (r for group in batch for r in group.rollouts):
            ages = [step - version for call in rollout.calls for version in call.versions]
            assert all(0 <= age <= staleness for age in ages), (step, rollout)
    attempts = every_attempt(run)
    assert all(rollout.ending is not None for rollout in attempts)
    assert max(Counter(rollout.id for rollout in attempts).values()) == 1
    by_group = Counter(rollout.id.split("/")[0] for rollout in attempts)
    assert set(by_group.values()) == {settings.group_size + oversample}
    assert set(runner.started) <= {rollout.id for rollout in attempts}
    run.close()


@given(chaos=st.integers(0, 10**6), failing=st.sampled_from([0.0, 0.3]), in_flight=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_synchronous_batches_do_not_depend_on_who_finishes_first(tmp_path_factory, chaos, failing, in_flight):
    settings = CollectSettings(**{**COLLECT, "retries": 30, "in_flight": in_flight})
    seen = []
    for runner in (ScriptedRunner(), ScriptedRunner(failing, chaos=random.Random(chaos))):
        run = Run.create(tmp_path_factory.mktemp("run") / "r", parse_recipe(RECIPE))
        seen.append([identity(batch) for batch in asyncio.run(collect(run, runner, settings, 4))])
        run.close()
    assert seen[0] == seen[1]


@given(
    chaos=st.integers(0, 10**6),
    staleness=st.integers(0, 2),
    kills=st.lists(st.floats(0.001, 0.05), min_size=1, max_size=3),
    failing=st.sampled_from([0.0, 0.3]),
)
@settings(max_examples=40, deadline=None)
def test_what_finished_before_a_kill_is_taken_up_and_not_made_again(tmp_path_factory, chaos, staleness, kills, failing):
    """Whatever is killed and however often: nothing is made twice, and staleness stays in its bound."""
    settings = CollectSettings(**{**COLLECT, "staleness": staleness, "retries": 30})
    whole = Run.create(tmp_path_factory.mktemp("run") / "r", parse_recipe(RECIPE))
    expected = asyncio.run(collect(whole, ScriptedRunner(), settings, 4))
    path, finished = tmp_path_factory.mktemp("run") / "r", Counter()
    Run.create(path, parse_recipe(RECIPE)).close()

    async def until_killed(run: Run, runner: ScriptedRunner, seconds: float) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await collect(run, runner, settings, 4)
                raise TimeoutError  # it was done before the kill

    for number, seconds in enumerate(kills):
        run, runner = Run.resume(path), ScriptedRunner(failing, chaos=random.Random(chaos + number))
        asyncio.run(until_killed(run, runner, seconds))
        run.close()
        assert not finished & runner.started, "an attempt that had finished was made again"
        finished += runner.scored
    again, after = Run.resume(path), ScriptedRunner(failing, chaos=random.Random(chaos + 9))
    batches = asyncio.run(collect(again, after, settings, 4))
    assert not finished & after.started, "an attempt that had finished was made again"
    if staleness == 0:
        assert [identity(b) for b in batches] == [identity(b) for b in expected]
    for step, batch in enumerate(batches):
        ages = [step - v for g in batch for r in g.rollouts for call in r.calls for v in call.versions]
        assert all(0 <= age <= staleness for age in ages)
    assert max(Counter(rollout.id for rollout in every_attempt(again)).values()) == 1
    again.close()


def test_asynchronous_at_staleness_0_is_synchronous(tmp_path):
    """`stepped` may be called at any time: with a bound of 0 nothing begins before the step it is for."""
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))
    runner = ScriptedRunner()

    async def watch() -> None:
        async with Collector(run, "rl", source_of(runner), CollectSettings(**COLLECT), 5) as collector:
            for step in range(3):
                await collector.next_batch(step)
                begun = sum(runner.started.values())
                await asyncio.sleep(0.01)
                collector.stepped(step)
                await asyncio.sleep(0.01)
                assert sum(runner.started.values()) == begun
                runner.version = step + 1

    asyncio.run(watch())
    run.close()


async def test_a_run_in_which_most_attempts_fail_stops_with_a_diagnosis(tmp_path):
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))
    settings = CollectSettings(**{**COLLECT, "max_failed_share": 0.5, "retries": 5})
    with pytest.raises(RunError, match="sandbox: the sandbox died"):
        await collect(run, ScriptedRunner(failing=0.9), settings, 4)
    run.close()


async def test_failed_members_are_left_out_and_the_group_goes_on(tmp_path):
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))
    settings = CollectSettings(**{**COLLECT, "retries": 0})
    batches = await collect(run, ScriptedRunner(failing=0.3), settings, 4, drop=lambda group: None)
    rewards = [reward for batch in batches for group in batch for reward in group.rewards]
    assert None in rewards and all(len(list(g.scored())) >= 2 for b in batches for g in b)
    run.close()


async def test_a_straggler_does_not_hold_its_group_for_ever(tmp_path):
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))

    class Stuck(ScriptedRunner):
        async def run(self, group_id, member, task, seed, tries=1, begun=None):
            if member == 1:
                await asyncio.sleep(3600)
            return await super().run(group_id, member, task, seed, tries, begun)

    settings = CollectSettings(**{**COLLECT, "group_seconds": 0.1})
    (batch,) = await collect(run, Stuck(), settings, 1, drop=lambda group: None)
    for group in batch:
        assert group.rollouts[1].ending == Failed(FailureKind.TIMEOUT, "its group took longer than 0.1 s")
        assert len(list(group.scored())) == 2
    run.close()


async def test_a_wait_without_end_says_what_it_waits_for(tmp_path):
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))
    settings = CollectSettings(**{**COLLECT, "stall_seconds": 0.05})
    with pytest.raises(StallError, match=r"a batch for rl step 1.*0 of 3 groups ready.*7 in flight"):
        await collect(run, ScriptedRunner(slowest=3600.0), settings, 1)
    run.close()


async def test_a_damaged_batch_is_named(tmp_path):
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))
    await collect(run, ScriptedRunner(), CollectSettings(**COLLECT), 2)
    run.close()
    path: Path = run.batch_path("rl", 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    again = Run.resume(run.path)
    with pytest.raises(RunError, match=r"rl-000001\.parquet is damaged"):
        await collect(again, ScriptedRunner(), CollectSettings(**COLLECT), 3)
    again.close()


@pytest.mark.parametrize("staleness", [0, 2])
async def test_a_checkpoint_that_is_younger_than_every_batch_does_not_begin_groups_anew(tmp_path, staleness):
    """Resumed at a step whose batch isn't stored yet, a collector has read no batch: it must know what was begun."""
    settings = CollectSettings(**{**COLLECT, "staleness": staleness})
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))
    async with Collector(run, "rl", source_of(ScriptedRunner()), settings, 5) as collector:
        for step in range(2):
            await collector.next_batch(step)
            collector.stepped(step)
    run.close()
    again = Run.resume(tmp_path / "r")
    async with Collector(again, "rl", source_of(ScriptedRunner(version=2)), settings, 5) as collector:
        await collector.next_batch(2)
        await collector.abandon()
    ids = Counter(rollout.id for rollout in every_attempt(again))
    assert max(ids.values()) == 1
    again.close()


@pytest.mark.parametrize("where", ["journal", "drop", "deadline"])
async def test_an_error_in_the_machinery_ends_the_wait_instead_of_hanging_it(tmp_path, monkeypatch, where):
    """It happens in a task or a callback of the event loop, which would swallow it."""
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))

    def broken(*_: object) -> None:
        raise RunError("the disk is full")

    settings = CollectSettings(**{**COLLECT, "group_seconds": 0.05 if where == "deadline" else 60.0})
    if where == "journal":
        monkeypatch.setattr("strop.runs.journal.Journal.append", broken)
    if where == "deadline":
        monkeypatch.setattr(Collector, "_cut", broken)
    slowest = 3600.0 if where == "deadline" else 0.002
    with pytest.raises(RunError, match="the disk is full"):
        drop = broken if where == "drop" else no_variance
        await asyncio.wait_for(collect(run, ScriptedRunner(slowest=slowest), settings, 1, drop), 20)
    run.close()


async def test_an_attempt_that_ignores_its_cancellation_holds_nobody_up(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))
    monkeypatch.setattr("strop.training.collector.HALT_SECONDS", 0.05)
    let_go = asyncio.Event()

    class Stubborn(ScriptedRunner):
        async def run(self, group_id, member, task, seed, tries=1, begun=None):
            while member == 1 and not let_go.is_set():
                try:
                    await let_go.wait()
                except asyncio.CancelledError:
                    continue
            return await super().run(group_id, member, task, seed, tries, begun)

    settings = CollectSettings(**{**COLLECT, "groups": 1, "group_seconds": 0.1})
    batches = await asyncio.wait_for(collect(run, Stubborn(), settings, 1, lambda group: None), 20)
    assert batches[0][0].rollouts[1].reward is None
    let_go.set()
    await asyncio.sleep(0.05)
    run.close()


async def test_oversampling_takes_the_first_to_finish_and_counts_who_was_cut_off(tmp_path):
    """The named choice with its bias: who is slow is left out, and the metrics say how many were."""
    run = Run.create(tmp_path / "r", parse_recipe(RECIPE))

    class Slow(ScriptedRunner):
        async def run(self, group_id, member, task, seed, tries=1, begun=None):
            if member == 0:  # a long attempt: seven tokens in one reply, and it isn't done
                rollout = Rollout(f"{group_id}/0", task.id, task.environment, 0, seed, started=1e-9)
                rollout.calls.append(ModelCall(None, [1], [2] * 7, [-0.5] * 7, [0] * 7, FinishReason.STOP))
                begun(rollout)
                await asyncio.sleep(3600)
            return await super().run(group_id, member, task, seed, tries, begun)

    settings = CollectSettings(**{**COLLECT, "groups": 2, "oversample": 1})
    (batch,) = await asyncio.wait_for(collect(run, Slow(), settings, 1, lambda group: None), 20)
    for group in batch:
        assert [rollout.reward is None for rollout in group.rollouts] == [True, False, False, False]
    metrics = batch_metrics(batch, 0)
    assert (metrics["attempts"], metrics["cut_off"], metrics["failed"]) == (8.0, 2.0, 2.0)
    assert metrics["cut_off_tokens"] == 7.0 > 5.0 >= metrics["tokens_per_attempt"]
    assert metrics["cut_off_seconds"] > 0
    for group in batch:
        assert group.rollouts[0].ended > group.rollouts[0].started and group.rollouts[0].sampled_tokens == 7
    run.close()
