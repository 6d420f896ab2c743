"""What judging cost and what it found: judgements that were paid for once are kept, and a budget is never passed.

Both are on disk as soon as they are known, so that a killed run neither forgets what it spent nor pays twice.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from strop.costs import Ledger
from strop.errors import BudgetError


@dataclass(slots=True)
class Bill:
    """One call, while it is made: what it may cost at most, and what it did cost once that is known."""

    most: float
    usd: float | None = None
    prompt: int = 0
    completion: int = 0


class Purse:
    """Spending of one run. Calls that are under way are counted at what they may cost at most.

    Args:
        path: SQLite file of the run; None keeps it in memory.
        ledger: told what was bought.
    """

    def __init__(self, path: Path | None, ledger: Ledger) -> None:
        self._file = _open(path)
        self._file.execute("create table if not exists calls (usd real, prompt integer, completion integer)")
        self.ledger = ledger
        self.spent = float(self._file.execute("select total(usd) from calls").fetchone()[0])
        self._reserved = 0.0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def paying(self, most: float, budget: float | None) -> AsyncIterator[Bill]:
        """Make a call inside. A call whose price isn't known in the end is counted at `most`.

        Args:
            most: dollars that it can cost at most.
            budget: dollars that the run may spend; None is no bound.

        Raises:
            BudgetError: what was spent leaves too little for the call.
        """
        async with self._changed:
            while budget is not None and self.spent + self._reserved + most > budget:
                if not self._reserved:
                    raise BudgetError(
                        f"judging has cost ${self.spent:.4f}, and the next call may cost ${most:.4f}: together more than "
                        f"judge.budget_usd = {budget:g}. Nothing is lost; raise the budget in a copy of the recipe, or "
                        "let fewer attempts be judged."
                    )
                await self._changed.wait()
            self._reserved += most
        bill = Bill(most)
        try:
            yield bill
        finally:
            usd = most if bill.usd is None else bill.usd
            with self._file:
                self._file.execute("insert into calls values (?, ?, ?)", (usd, bill.prompt, bill.completion))
            self.ledger.buy("judge", usd, calls=1, prompt_tokens=bill.prompt, completion_tokens=bill.completion)
            self.spent += usd
            self._reserved -= most
            if self._reserved < 1e-12:  # sums of floats need not come back to 0
                self._reserved = 0.0
            async with self._changed:
                self._changed.notify_all()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Cache:
    """Answers that were given before, by what was asked.

    Args:
        path: SQLite file; None keeps them in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = _open(path)
        self._file.execute("create table if not exists answers (asked text primary key, answer text)")

    def get(self, asked: str) -> str | None:
        """The answer, or None if it was never asked."""
        row = self._file.execute("select answer from answers where asked = ?", (asked,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, asked: str, answer: str) -> None:
        """Keep an answer."""
        with self._file:
            self._file.execute("insert or replace into answers values (?, ?)", (asked, answer))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _open(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(":memory:" if path is None else path, timeout=30.0)
    connection.execute("pragma journal_mode = wal")
    return connection
