"""The ledger: what every second of the machine and every token was for.

Each instant of wall time goes to exactly one account, so the accounts add up to the whole by construction. What a
second costs is in `strop.costs.prices`, what it all means in `strop.costs.report`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

Kind = Literal["compute", "wait", "background"]

#: Which kinds go first: a slice of time belongs to the first kind of which anything runs.
PRECEDENCE: tuple[Kind, ...] = ("compute", "wait", "background")

#: Activities and their kinds. Compute keeps the machine busy; a wait is counted only while nothing computes; what is
#: in the background, while nothing else is known to run.
ACTIVITIES: dict[str, Kind] = {
    "setup": "compute",  # loading models, building environments
    "sampler": "compute",  # prefill and decoding
    "learner": "compute",  # forward, backward, optimizer
    "teacher": "compute",  # teachers' log-probabilities in distillation
    "packing": "compute",  # rollouts into batches
    "weights": "compute",  # publishing a new version
    "checkpoint": "compute",  # saving and checksumming
    "records": "compute",  # writing rollouts and events
    "environment": "wait",  # starting and closing sessions
    "tools": "wait",
    "scoring": "wait",
    "sandbox": "wait",
    "attempts": "background",  # attempts are under way: rendering, parsing, passing things on
}

IDLE = "idle"
TOKEN_KINDS = ("prompt", "cached", "sampled", "trained")


@dataclass(slots=True, eq=False)
class _Activity(AbstractContextManager[None]):
    """One activity, entered by any number of tasks and threads at once. Stateless between enter and leave."""

    ledger: Ledger
    name: str
    rank: int  # place of its kind in PRECEDENCE
    inside: int = 0

    def __enter__(self) -> None:
        # Only the first one in and the last one out change who a slice of time belongs to; the rest just count.
        with self.ledger._lock:
            self.inside += 1
            if self.inside == 1:
                self.ledger._charge()
                self.ledger._running.append(self)
                self.ledger._choose_payers()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.ledger._lock:
            self.inside -= 1
            if self.inside == 0:
                self.ledger._charge()
                self.ledger._running.remove(self)
                self.ledger._choose_payers()


class Ledger:
    """Accounts of wall time, each a (phase, activity), and counts of tokens by phase.

    A slice of time in which compute activities run is divided equally among them; a slice in which only waits run,
    among those, and so for the background; a slice in which nothing runs is "idle". Several tasks inside one activity
    are one activity.

    Entering and leaving is thread-safe, holds over awaits, and takes well under 2 µs:

        with ledger.activity("tools"):
            outcome = await session.call(name, arguments)

    Args:
        clock: seconds that never go back.
        phase: what the run begins with, for example "setup".
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, phase: str = "setup") -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._activities: dict[str, _Activity] = {}
        self._running: list[_Activity] = []
        self._seconds: dict[tuple[str, str], float] = {}
        self._tokens: dict[str, dict[str, int]] = {}
        self._bought: dict[str, dict[str, float]] = {}
        self._earlier: dict[str, Any] = {}
        self._phase = phase
        self._payers: tuple[str, ...] = (IDLE,)
        self._charged_until = clock()

    def activity(self, name: str, kind: Kind | None = None) -> AbstractContextManager[None]:
        """The context in which `name` runs. Keep the returned object where it is entered often.

        Args:
            name: one of `ACTIVITIES`, or a new one with its kind.
            kind: for a new activity, one of `PRECEDENCE`.

        Raises:
            ValueError: the name is new and has no kind, or it is known as the other kind.
        """
        known = self._activities.get(name)
        if known is None or (kind is not None and PRECEDENCE[known.rank] != kind):
            known = self._register(name, kind)
        return known

    def _register(self, name: str, kind: Kind | None) -> _Activity:
        with self._lock:
            known = PRECEDENCE[self._activities[name].rank] if name in self._activities else ACTIVITIES.get(name)
            chosen = kind or known
            if chosen is None:
                raise ValueError(
                    f"The ledger knows no activity {name!r}: use one of {', '.join(ACTIVITIES)}, or give its kind, "
                    f"one of {', '.join(PRECEDENCE)}."
                )
            if known is not None and chosen != known:
                raise ValueError(f"The ledger knows activity {name!r} as {known}, not as {chosen}: use another name.")
            return self._activities.setdefault(name, _Activity(self, name, PRECEDENCE.index(chosen)))

    def _charge(self) -> None:
        """Give the time since the last change to those who had the machine. Lock held."""
        now = self._clock()
        share = (now - self._charged_until) / len(self._payers)
        for name in self._payers:
            account = (self._phase, name)
            self._seconds[account] = self._seconds.get(account, 0.0) + share
        self._charged_until = now

    def _choose_payers(self) -> None:
        """Who has the machine from now on. Lock held."""
        payers: list[str] = []
        best = len(PRECEDENCE)
        for activity in self._running:
            if activity.rank < best:
                best, payers = activity.rank, []
            if activity.rank == best:
                payers.append(activity.name)
        self._payers = tuple(payers) or (IDLE,)

    @property
    def phase(self) -> str:
        """What the run is doing as a whole: "setup", "warmup", "rl", "evaluation" …"""
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        with self._lock:
            self._charge()
            self._phase = phase

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Be in another phase for a while, for example "evaluation" in the middle of "rl"."""
        before, self.phase = self._phase, phase
        try:
            yield
        finally:
            self.phase = before

    def count(self, *, prompt: int = 0, cached: int = 0, sampled: int = 0, trained: int = 0) -> None:
        """Count tokens in the present phase.

        Args:
            prompt: prompt tokens that were computed (prefilled).
            cached: prompt tokens whose keys and values were reused.
            sampled: tokens that were sampled.
            trained: tokens that carried loss in a backward pass.
        """
        with self._lock:
            counts = self._tokens.setdefault(self._phase, dict.fromkeys(TOKEN_KINDS, 0))
            counts["prompt"] += prompt
            counts["cached"] += cached
            counts["sampled"] += sampled
            counts["trained"] += trained

    def buy(self, what: str, usd: float, **counts: float) -> None:
        """Book what is paid for beside the machine, in the present phase.

        Args:
            what: for example "judge"; accounts are called "judge_usd", "judge_calls" …
            usd: what it cost.
            counts: what was had for it.
        """
        with self._lock:
            account = self._bought.setdefault(self._phase, {})
            for name, number in {"usd": usd, **counts}.items():
                account[f"{what}_{name}"] = account.get(f"{what}_{name}", 0.0) + number

    @property
    def bought(self) -> float:
        """Dollars paid beside the machine so far, earlier processes included."""
        return bought_usd(self.snapshot()["bought"])

    @property
    def seconds(self) -> float:
        """Wall seconds so far, earlier processes of a resumed run included: the sum of all accounts."""
        return sum(sum(parts.values()) for parts in self.snapshot()["accounts"].values())

    def snapshot(self) -> dict[str, Any]:
        """Everything so far, as JSON values: {"accounts": {phase: {activity: seconds}}, "tokens": {phase: {…}}, "bought":
        {phase: {"judge_usd": …}}}.
        """
        with self._lock:
            self._charge()
            mine: dict[str, dict[str, float]] = {}
            for (phase, name), seconds in self._seconds.items():
                mine.setdefault(phase, {})[name] = seconds
            return {
                "accounts": _sum(self._earlier.get("accounts", {}), mine),
                "tokens": _sum(self._earlier.get("tokens", {}), self._tokens),
                "bought": _sum(self._earlier.get("bought", {}), self._bought),
            }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Go on from what earlier processes of this run recorded. The time since then counts nowhere.

        Args:
            snapshot: the last one of the process before, which holds those before it; replaces one restored earlier.
        """
        with self._lock:
            self._earlier = dict(snapshot)


def bought_usd(bought: Mapping[str, Mapping[str, float]], phase: str | None = None) -> float:
    """Dollars in a snapshot's "bought", of one phase or of all."""
    return sum(
        number
        for name, account in bought.items()
        if phase in (None, name)
        for key, number in account.items()
        if key.endswith("_usd")
    )


def _sum(one: Mapping[str, Mapping[str, Any]], other: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Two tables of numbers added up."""
    total = {phase: dict(row) for phase, row in one.items()}
    for phase, row in other.items():
        into = total.setdefault(phase, {})
        for name, number in row.items():
            into[name] = into.get(name, 0) + number
    return total
