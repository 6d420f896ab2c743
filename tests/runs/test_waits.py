"""Every wait has a deadline and a reason: stalls are named, and what nobody can end, the watchdog ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from strop.config import parse_recipe
from strop.errors import StallError
from strop.runs.events import read_lines
from strop.runs.run import Run
from strop.runs.waits import LISTED, STALLED, Waits, Watchdog

RECIPE = parse_recipe(
    {
        "name": "test",
        "environment": {"name": "arithmetic"},
        "stages": [{"kind": "rl", "name": "rl", "steps": 4, "schedule": {"learning_rate": 1e-5}}],
    }
)


async def test_a_wait_past_its_deadline_names_itself_and_every_other_one():
    waits = Waits()
    with pytest.raises(StallError) as caught, waits.during("a checkpoint", 60.0, lambda: "3 of 5 files"):
        async with waits.on("the learner", 0.02):
            await asyncio.sleep(60)
    text = str(caught.value)
    assert text.startswith("the learner did not come within 0.02 s.")
    assert "a checkpoint, for 0 s, deadline in 60 s (3 of 5 files)" in text
    assert list(waits) == []


async def test_a_timeout_of_what_is_awaited_is_not_ours():
    with pytest.raises(TimeoutError, match="theirs"):
        async with Waits().on("a reply", 60.0):
            raise TimeoutError("theirs")


def test_only_the_oldest_waits_are_listed():
    waits = Waits()
    for number in range(LISTED + 5):
        waits.begin(f"attempt {number}", 60.0)
    lines = waits.describe().splitlines()
    assert len(lines) == LISTED + 1 and "attempt 0," in lines[0] and lines[-1] == "  - and 5 younger ones"


def _watch(waits: Waits, grace: float) -> tuple[list[str], list[str], threading.Event]:
    warned: list[str] = []
    stopped: list[str] = []
    ended = threading.Event()
    watchdog = Watchdog(waits, warned.append, stopped.append, grace=grace, every=0.01, end=ended.set)
    ended.close = watchdog.close  # type: ignore[attr-defined]
    return warned, stopped, ended


def test_the_watchdog_warns_once_and_then_ends_what_nobody_ended(capfd):
    waits = Waits()
    warned, stopped, ended = _watch(waits, grace=0.1)
    with waits.during("a checkpoint", 0.2):
        assert ended.wait(10)
    assert len(warned) == 1 and warned[0].startswith("Still waiting for a checkpoint")
    assert len(stopped) == 1 and "a checkpoint did not come within 0.2 s" in stopped[0]
    said = capfd.readouterr().err
    assert "Where every thread is" in said and "test_the_watchdog_warns_once" in said


def test_the_watchdog_leaves_alone_what_ends_in_time_or_is_ended_by_others():
    waits = Waits()
    warned, stopped, ended = _watch(waits, grace=0.05)
    with waits.during("an attempt", 0.01, watched=False):
        for _ in range(20):
            with waits.during("a step", 30.0):
                time.sleep(0.01)
    ended.close()  # type: ignore[attr-defined]
    assert (warned, stopped, ended.is_set()) == ([], [], False)


def _stuck(path: Path) -> None:
    """A process whose thread holds a lock for ever, as a deadlocked learner does."""
    run = Run.create(path, RECIPE)
    run.watchdog = Watchdog(run.waits, run.warn, run._stalled, grace=0.1, every=0.02)
    lock = threading.Lock()
    lock.acquire()
    with run.waits.during("the learner's step", 0.1):
        lock.acquire()


def test_a_process_that_is_stuck_ends_with_its_reason_logged_and_is_resumable(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_stuck, args=(tmp_path / "r",))
    process.start()
    process.join(30)
    assert process.exitcode == STALLED
    last = list(read_lines(tmp_path / "r" / "events.jsonl"))[-1]
    assert last["what"] == "stalled" and "the learner's step did not come within 0.1 s" in last["message"]
    Run.resume(tmp_path / "r").close()
