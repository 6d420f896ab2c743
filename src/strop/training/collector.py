"""The collector: keeps attempts in flight, and hands out batches of groups that are on disk before they are returned.

One collector is both the synchronous and the asynchronous loop: `staleness` bounds how many steps may lie between the
step at which a group was begun and the step that trains on it; at 0 every group of a batch was begun for it. What an
attempt is lives in `agents.attempts`; what a batch is made into, in `learning`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from strop.agents.attempts import Runner
from strop.config import CollectSettings
from strop.errors import RunError
from strop.rollouts import Failed, FailureKind, Group, Rollout, Scored, Task
from strop.runs.journal import Entry, Journal
from strop.runs.run import Run
from strop.runs.store import read_groups, read_state, trained, write_groups

#: Seconds that cancelled attempts get to end; one that swallows its cancellation is left behind.
HALT_SECONDS = 30.0
#: How many of the last tries decide whether too many fail.
FAILURE_WINDOW = 64


class TaskSource(Protocol):
    """Which task a group attempts, and how: a function of its number and of what stored batches hold that are older
    than the step at which it is begun, so that order survives a kill.
    """

    def __call__(self, number: int, step: int) -> tuple[Task, Runner]: ...


@dataclass(slots=True)
class _Open:
    """A group in the making, or ready and not yet taken."""

    number: int
    begun: int  # the step at which it was begun: a bound on the age of its oldest token
    task: Task
    runner: Runner
    members: dict[int, Rollout] = field(default_factory=dict)
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    making: dict[int, Rollout] = field(default_factory=dict)  # as far as each one's latest try has come
    ended: bool = False
    timer: asyncio.TimerHandle | None = None


class Collector:
    """Collects the batches of one stage. An asynchronous context manager.

    Args:
        run: where batches, journal and events go.
        stage: the stage's name.
        source: task and runner of each group, by number.
        settings: sizes, staleness, deadlines, retries.
        seed: of the stage; attempts' seeds derive from it.
        drop: reason to leave a complete group out of training (DAPO's dynamic sampling), or None to keep it.
        observe: given a step and every group that ended for it; what it gives (JSON values) is stored with the batch,
            under "measured".
    """

    def __init__(
        self,
        run: Run,
        stage: str,
        source: TaskSource,
        settings: CollectSettings,
        seed: int,
        drop: Callable[[Group], str | None] = lambda group: None,
        observe: Callable[[int, Sequence[Group]], Mapping[str, Any]] = lambda step, groups: {},
    ) -> None:
        self.run, self.stage, self.source, self.settings, self.seed, self.drop = (
            run,
            stage,
            source,
            settings,
            seed,
            drop,
        )
        self.observe = observe
        self._step = 0  # that the next batch is for
        self._next = 0  # number of the next group
        self._open: dict[int, _Open] = {}
        self._left_out: list[tuple[Group, str]] = []  # ended since the last batch, not trained on
        self._replaced = 0
        self._pending: deque[tuple[_Open, int, int]] = deque()  # (group, member, try) waiting for a place in flight
        self._in_flight = 0
        self._recent: deque[Failed | None] = deque(maxlen=FAILURE_WINDOW)
        self._changed = asyncio.Event()
        self._broken: BaseException | None = None
        self._closed = False
        self._journal = Journal(run.path / "rollouts" / f"{stage}.journal")
        self._carried: dict[
            int, int
        ] = {}  # groups that were open when the last stored batch was taken, and their steps
        self._resuming = True

    async def __aenter__(self) -> Collector:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._halt()
        self._journal.close()

    async def _halt(self) -> None:
        """Cancel what is under way."""
        self._closed = True
        self._pending.clear()
        tasks = [task for group in self._open.values() for task in group.running.values()]
        for group in self._open.values():
            if group.timer:
                group.timer.cancel()
        for task in tasks:
            task.cancel()
        if tasks and (stuck := (await asyncio.wait(tasks, timeout=HALT_SECONDS))[1]):
            self.run.warn(f"{len(stuck)} attempts did not end within {HALT_SECONDS:g} s of being cancelled")

    async def next_batch(self, step: int) -> list[Group]:
        """The groups that `step` trains on: stored ones if the step was collected before, else new ones.

        Returns:
            At most `settings.groups` groups in the order of their numbers, on disk by now; fewer (down to none) if
            dynamic sampling ran out of replacements.

        Raises:
            StallError: no batch came within `stall_seconds`.
            RunError: too large a share of attempts failed, or the batch can't be stored.
        """
        path = self.run.batch_path(self.stage, step)
        if path.exists():
            self._read_state(path)
            return trained(read_groups(path))
        self._begin_step(step)
        async with self.run.waits.on(
            f"a batch for {self.stage} step {step + 1}", self.settings.stall_seconds, self.describe
        ):
            while (batch := self._take(step)) is None:
                self._changed.clear()
                await self._changed.wait()
                if self._broken is not None:
                    raise self._broken
        self._store(step, batch)
        return [self._group(group) for group in batch]

    def describe(self) -> str:
        """What is under way, for people who wait."""
        members = sum(len(group.members) for group in self._open.values())
        ready = sum(group.ended for group in self._open.values())
        return (
            f"{ready} of {self.settings.groups} groups ready, {len(self._open) - ready} open with {members} attempts "
            f"finished, {self._in_flight} in flight, {len(self._pending)} waiting for a place"
        )

    def stepped(self, step: int) -> None:
        """The update of `step` is made: groups for later steps may begin (asynchronous collection)."""
        self._step = max(self._step, step + 1)
        if self.settings.staleness and not self._closed:
            self._admit()

    async def abandon(self) -> None:
        """End the stage: what is under way is cancelled, and recorded with that ending beside what had finished.

        Call it before the stage's last checkpoint: whoever resumes from there never comes back here.
        """
        self._closed = True  # what an earlier process left unfinished is taken up, and no attempt started
        self._take_up(self._step)
        await self._halt()
        for group in self._open.values():
            for member in range(self.settings.group_size + self.settings.oversample):
                if member not in group.members:
                    ending = FailureKind.CANCELLED, "the stage ended"
                    group.members[member] = self._unfinished(group, member, *ending)
        path = self.run.path / "rollouts" / f"{self.stage}-rest.parquet"
        rest = [(self._group(group), "the stage ended") for group in self._open.values()] + self._left_out
        if path.exists():  # an earlier process came this far, but not to the checkpoint
            self.run.check_batch(path)
        elif rest:
            write_groups(path, rest, {})
            self.run.batch_stored(path)
        self._open.clear()
        self._journal.close(remove=True)

    # -- groups -----------------------------------------------------------------------------------------------------

    def _begin_step(self, step: int) -> None:
        self._step = step
        self._take_up(step)
        self._admit()

    def _read_state(self, path: Path) -> None:
        """Where an earlier process was when it stored a batch: what was begun, and what was open."""
        self.run.check_batch(path)
        state = read_state(path)
        self._next = state["next"]
        self._carried = {int(number): begun for number, begun in state["open"].items()}

    def _take_up(self, step: int) -> None:
        """Go on with what an earlier process left: groups that were open, and attempts that had finished."""
        if not self._resuming:
            return
        if step and not self._next:  # no stored batch was read: the checkpoint is younger than all of them
            self._read_state(self.run.batch_path(self.stage, step - 1))
        found: dict[int, list[Entry]] = {}
        for entry in self._journal.found:
            found.setdefault(entry.group, []).append(entry)
        for number, begun in self._carried.items():
            self._begin(number, begun, found.pop(number, []))
        for number in range(self._next, max(found, default=-1) + 1):
            entries = found.get(number, [])
            self._begin(number, entries[0].begun if entries else step, entries)
            self._next = number + 1
        self._journal.found, self._resuming = [], False
        for line in self._journal.damaged:
            self.run.warn(
                f"{self._journal.path.name} line {line.number} is damaged ({line.why}); that attempt is made again"
            )

    def _may_admit(self) -> bool:
        """Whether the bounds on staleness and on replacements let another group begin."""
        return (
            not self._resuming
            and len(self._open) < (self.settings.staleness + 1) * self.settings.groups
            and self._replaced <= self.settings.max_replacement_rounds * self.settings.groups
        )

    def _admit(self) -> None:
        while not self._closed and self._may_admit():
            self._next += 1
            self._begin(self._next - 1, self._step)

    def _begin(self, number: int, begun: int, finished: Sequence[Entry] = ()) -> None:
        task, runner = self.source(number, begun)
        group = self._open[number] = _Open(number, begun, task, runner)
        group.members = {entry.rollout.member: entry.rollout for entry in finished}
        wanted = range(self.settings.group_size + self.settings.oversample)
        self._pending.extend((group, member, 1) for member in wanted if member not in group.members)
        self._end_if_complete(group)
        self._fill()

    def _fill(self) -> None:
        """Start attempts while there is a place in flight."""
        while self._pending and self._in_flight < self.settings.in_flight and not self._closed:
            group, member, tries = self._pending.popleft()
            if group.ended:
                continue
            if group.timer is None:
                loop = asyncio.get_running_loop()
                group.timer = loop.call_later(self.settings.group_seconds, self._guarded, self._cut, group)
            self._in_flight += 1
            group.running[member] = asyncio.create_task(self._attempt(group, member, tries))

    async def _attempt(self, group: _Open, member: int, tries: int) -> None:
        try:
            rollout = await group.runner.run(
                self._id(group), member, group.task, self.seed, tries, lambda it: group.making.update({member: it})
            )
            self._finished(group, rollout)
        except Exception as error:  # bad input, a full disk or a bug: no retry would mend it
            self._stop(error)
        finally:
            self._in_flight -= 1
            group.running.pop(member, None)
            if not self._closed:
                asyncio.get_running_loop().call_soon(self._guarded, self._fill)

    def _finished(self, group: _Open, rollout: Rollout) -> None:
        """An attempt came to its ending: retry it, or keep it."""
        if group.ended:
            return  # in the same moment in which its group was complete without it; it is recorded as that
        failed = rollout.ending if isinstance(rollout.ending, Failed) else None
        self._watch_failures(failed)
        if failed and rollout.tries <= self.settings.retries:
            self._pending.append((group, rollout.member, rollout.tries + 1))
            return
        self._record(group, rollout)
        if not self._closed:
            self._end_if_complete(group)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        """Run a callback of the event loop, which would swallow its exception and leave `next_batch` waiting."""
        try:
            function(*arguments)
        except Exception as error:
            self._stop(error)

    def _record(self, group: _Open, rollout: Rollout) -> None:
        group.members[rollout.member] = rollout
        self._journal.append(Entry(group.number, group.begun, rollout))

    def _end_if_complete(self, group: _Open) -> None:
        scored = sum(isinstance(rollout.ending, Scored) for rollout in group.members.values())
        everyone = self.settings.group_size + self.settings.oversample
        if scored >= self.settings.group_size or len(group.members) == everyone:
            self._end(group, FailureKind.CANCELLED, "its group was complete without it")

    def _cut(self, group: _Open) -> None:
        """The group's deadline passed: go on with the members it has."""
        seconds = self.settings.group_seconds
        self._end(group, FailureKind.TIMEOUT, f"its group took longer than {seconds:g} s")

    def _end(self, group: _Open, kind: FailureKind, reason: str) -> None:
        """The group is complete: ready to be trained on, or left out and replaced."""
        if group.ended:
            return
        group.ended = True
        if group.timer:
            group.timer.cancel()
        for task in list(group.running.values()):
            task.cancel()
        for member in range(self.settings.group_size + self.settings.oversample):
            if member not in group.members:
                self._record(group, self._unfinished(group, member, kind, reason))
        complete = self._group(group)
        fewest = min(2, self.settings.group_size)  # one alone has no baseline
        scored = len(list(complete.scored()))
        why = f"fewer than {fewest} of its members were scored" if scored < fewest else self.drop(complete)
        if why:
            del self._open[group.number]
            self._left_out.append((complete, why))
            self._replaced += 1
            self._admit()
        self._changed.set()

    def _take(self, step: int) -> list[_Open] | None:
        """The groups to train on now, or None while they aren't ready.

        Oldest first. A group that would pass the bound on staleness if it were left for later is waited for: after
        this batch, at most `ahead * groups` of those that are due within `ahead` steps may be left.
        """
        waiting = sorted(self._open.values(), key=lambda group: (group.begun, group.number))
        chosen = [group for group in waiting if group.ended][: self.settings.groups]
        for ahead in range(self.settings.staleness + 1):
            due = [group for group in waiting if group.begun <= step + ahead - self.settings.staleness]
            left = [group for group in due if group not in chosen]
            excess = len(left) - ahead * self.settings.groups
            ready = [group for group in left if group.ended]
            if excess > len(ready):
                return None
            chosen += ready[: max(0, excess)]
        unfinished = any(not group.ended for group in waiting) or self._may_admit()
        if len(chosen) < self.settings.groups and unfinished:
            return None
        return sorted(chosen, key=lambda group: group.number)

    def _store(self, step: int, batch: list[_Open]) -> None:
        for group in batch:
            del self._open[group.number]
        ended = [(self._group(group), "trained") for group in batch] + self._left_out
        state = {
            "next": self._next,
            "open": {str(group.number): group.begun for group in self._open.values()},
            "measured": self.observe(step, [group for group, _ in ended]),
        }
        path = self.run.batch_path(self.stage, step)
        with self.run.ledger.activity("records"):
            write_groups(path, ended, state)
            self.run.batch_stored(path)
            self._journal.keep_only(
                Entry(group.number, group.begun, rollout)
                for group in self._open.values()
                for rollout in group.members.values()
            )
        self._left_out, self._replaced = [], 0

    # -- small things -----------------------------------------------------------------------------------------------

    def _id(self, group: _Open) -> str:
        return f"{self.stage}-{group.number:06d}"

    def _group(self, group: _Open) -> Group:
        return Group(self._id(group), group.task, [group.members[m] for m in sorted(group.members)], group.begun)

    def _unfinished(self, group: _Open, member: int, kind: FailureKind, reason: str) -> Rollout:
        """The record of an attempt that we ended, as far as it came."""
        empty = Rollout(f"{self._id(group)}/{member}", group.task.id, group.task.environment, member, 0)
        so_far = group.making.get(member, empty)
        calls, transcript, seconds = list(so_far.calls), list(so_far.transcript), dict(so_far.seconds)
        ended = self.run.clock if so_far.started else 0.0
        return replace(
            so_far, calls=calls, transcript=transcript, seconds=seconds, ended=ended, ending=Failed(kind, reason)
        )

    def _watch_failures(self, failed: Failed | None) -> None:
        """Stop the run when too large a share of tries fails: it would train on what happens to be left."""
        self._recent.append(failed)
        failures = [failure for failure in self._recent if failure is not None]
        if len(self._recent) < FAILURE_WINDOW // 4 or len(failures) <= self.settings.max_failed_share * len(
            self._recent
        ):
            return
        (kind, reason), count = Counter((failure.kind.value, failure.reason) for failure in failures).most_common(1)[0]
        self._stop(
            RunError(
                f"{len(failures)} of the last {len(self._recent)} attempts failed for reasons of the system, more than "
                f"collect.max_failed_share = {self.settings.max_failed_share:g} allows. Most often ({count}): {kind}: "
                f"{reason}. Mend that and resume; nothing that finished is lost."
            )
        )

    def _stop(self, error: Exception) -> None:
        self._broken = self._broken or error
        self._changed.set()
