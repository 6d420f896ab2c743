"""Rule 8: every second and every token is in the ledger, and the parts add up to the whole."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.costs import ACTIVITIES, Ledger


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def accounts(ledger: Ledger) -> dict[str, dict[str, float]]:
    return ledger.snapshot()["accounts"]


def test_a_second_of_one_activity_is_its_own() -> None:
    clock = Clock()
    ledger = Ledger(clock, phase="rl")
    with ledger.activity("sampler"):
        clock.now += 3
    clock.now += 2
    assert accounts(ledger) == {"rl": {"sampler": 3.0, "idle": 2.0}}


def test_compute_is_shared_equally_and_waits_count_only_without_it() -> None:
    clock = Clock()
    ledger = Ledger(clock, phase="rl")
    with ledger.activity("tools"), ledger.activity("scoring"):
        clock.now += 4  # two waits: 2 each
        with ledger.activity("sampler"):
            clock.now += 6  # compute alone
            with ledger.activity("learner"):
                clock.now += 2  # two computing: 1 each
    assert accounts(ledger)["rl"] == pytest.approx(
        {"idle": 0.0, "tools": 2.0, "scoring": 2.0, "sampler": 7.0, "learner": 1.0}
    )


def test_many_tasks_inside_one_activity_are_one_activity() -> None:
    clock = Clock()
    ledger = Ledger(clock, phase="rl")

    async def call(seconds: int) -> None:
        with ledger.activity("tools"):
            for _ in range(seconds):
                await asyncio.sleep(0)

    async def main() -> None:
        tasks = [asyncio.create_task(call(n)) for n in (1, 3, 5)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            clock.now += 1
        clock.now += 10

    asyncio.run(main())
    parts = accounts(ledger)["rl"]
    assert parts["idle"] >= 10
    assert 4 <= parts["tools"] <= 8
    assert parts["idle"] + parts["tools"] == clock.now - 100


def test_an_activity_that_raises_is_left() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    with pytest.raises(RuntimeError), ledger.activity("learner"):
        raise RuntimeError
    clock.now += 5
    assert accounts(ledger)["setup"]["idle"] == 5


def test_phases_split_the_time_of_what_is_running() -> None:
    clock = Clock()
    ledger = Ledger(clock, phase="rl")
    with ledger.activity("sampler"):
        clock.now += 1
        with ledger.within("evaluation"):
            clock.now += 2
            ledger.count(sampled=7)
        clock.now += 4
    ledger.count(prompt=1, cached=2, sampled=3, trained=4)
    assert ledger.phase == "rl"
    assert accounts(ledger)["rl"]["sampler"] == 5
    assert accounts(ledger)["evaluation"]["sampler"] == 2
    assert ledger.snapshot()["tokens"] == {
        "evaluation": {"prompt": 0, "cached": 0, "sampled": 7, "trained": 0},
        "rl": {"prompt": 1, "cached": 2, "sampled": 3, "trained": 4},
    }


def test_a_resumed_run_keeps_earlier_seconds_and_leaves_out_the_downtime() -> None:
    clock = Clock()
    first = Ledger(clock, phase="rl")
    with first.activity("sampler"):
        clock.now += 30
    first.count(sampled=10)
    early = json.loads(json.dumps(first.snapshot()))
    clock.now += 5
    kept = json.loads(json.dumps(first.snapshot()))
    clock.now += 1000  # nobody works on the run
    second = Ledger(clock, phase="setup")
    second.restore(early)
    second.restore(kept)  # a later snapshot holds the earlier one
    clock.now += 7
    second.phase = "rl"
    second.count(sampled=5)
    clock.now += 1
    assert second.seconds == 30 + 5 + 7 + 1
    assert accounts(second)["rl"] == {"sampler": 30, "idle": 5 + 1}
    assert second.snapshot()["tokens"]["rl"]["sampled"] == 15


def test_unknown_activities_need_a_kind_and_keep_it() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="knows no activity 'browsing'"):
        ledger.activity("browsing")
    ledger.activity("browsing", "wait")
    ledger.activity("browsing")
    with pytest.raises(ValueError, match="as wait, not as compute"):
        ledger.activity("browsing", "compute")


def test_threads_may_enter_and_leave_at_once() -> None:
    ledger = Ledger()
    names = ["sampler", "learner", "tools", "scoring"]

    def work(name: str) -> None:
        for _ in range(2000):
            with ledger.activity(name):
                ledger.count(sampled=1)

    threads = [threading.Thread(target=work, args=(name,)) for name in names * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = accounts(ledger)["setup"]
    after = accounts(ledger)["setup"]
    assert ledger.snapshot()["tokens"]["setup"]["sampled"] == 16000
    assert {name for name in names if after[name] != before[name]} == set()  # everyone has left
    assert after["idle"] >= before["idle"]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "phase"]),
        st.sampled_from(["sampler", "learner", "tools", "scoring", "attempts"]),
        st.sampled_from(["rl", "evaluation"]),
        st.integers(0, 50),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_the_parts_are_those_of_a_tick_by_tick_count(actions: list[tuple[str, str, str, int]]) -> None:
    clock = Clock()
    ledger = Ledger(clock, phase="rl")
    counts = dict.fromkeys(("sampler", "learner", "tools", "scoring", "attempts"), 0)
    open_contexts: dict[str, list[object]] = {name: [] for name in counts}
    phase, expected = "rl", {}
    for action, name, new_phase, ticks in actions:
        if action == "enter":
            context = ledger.activity(name)
            context.__enter__()
            open_contexts[name].append(context)
            counts[name] += 1
        elif action == "leave" and counts[name]:
            open_contexts[name].pop().__exit__(None, None, None)
            counts[name] -= 1
        elif action == "phase":
            ledger.phase = phase = new_phase
        for _ in range(ticks):  # one tick at a time, by the rule as it is written
            clock.now += 1
            inside = [n for n in counts if counts[n]]
            computing = [n for n in inside if ACTIVITIES[n] == "compute"]
            waiting = [n for n in inside if ACTIVITIES[n] == "wait"]
            payers = computing or waiting or inside or ["idle"]
            for payer in payers:
                expected[phase, payer] = expected.get((phase, payer), 0.0) + 1 / len(payers)
    found = {(p, n): s for p, parts in accounts(ledger).items() for n, s in parts.items() if s}
    assert found == pytest.approx(expected)
    assert ledger.seconds == pytest.approx(clock.now - 100)
