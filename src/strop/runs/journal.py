"""The journal: attempts that finished before their batch was complete, so that a kill loses none of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from strop.rollouts import Rollout
from strop.runs.events import BadLine, LineLog, encode_line, read_lines
from strop.runs.files import written_whole
from strop.runs.store import rollout_dict, rollout_from_dict


class Entry(NamedTuple):
    """A finished attempt: number of its group, the step its group was begun at, and what it was."""

    group: int
    begun: int
    rollout: Rollout


class Journal:
    """Append-only file of finished attempts.

    Args:
        path: the file; what an earlier process left there is in `found`, damaged lines in `damaged`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[Entry] = []
        self.damaged: list[BadLine] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._log = LineLog(path)
        for line in read_lines(path):
            if isinstance(line, BadLine):
                self.damaged.append(line)
            else:
                self.found.append(Entry(line["group"], line["begun"], rollout_from_dict(line["rollout"])))

    def append(self, entry: Entry) -> None:
        """Keep a finished attempt."""
        self._log.append(_line(entry))

    def keep_only(self, entries: Iterable[Entry]) -> None:
        """Forget every attempt but these: the others are in a stored batch now."""
        self._log.close()
        with written_whole(self.path) as beside, beside.open("w", encoding="utf-8") as file:
            file.writelines(encode_line(_line(entry)) for entry in entries)
        self._log = LineLog(self.path)

    def close(self, *, remove: bool = False) -> None:
        """Close the file; `remove` it once everything in it is stored elsewhere."""
        self._log.close()
        if remove:
            self.path.unlink(missing_ok=True)


def _line(entry: Entry) -> dict[str, Any]:
    return {"group": entry.group, "begun": entry.begun, "rollout": rollout_dict(entry.rollout)}
