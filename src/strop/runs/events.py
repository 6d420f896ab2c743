"""The event log: events.jsonl, append-only, a checksum on every line. The one stream that every sink reads."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from strop.errors import RunError

Event = dict[str, Any]


class BadLine(NamedTuple):
    """A line that isn't what was written."""

    number: int
    why: str


def encode_line(event: Event) -> str:
    """One event as a line: JSON with a CRC-32 of everything before it as the last key."""
    text = json.dumps(event, separators=(",", ":"), allow_nan=True, default=float)
    return f'{text[:-1]},"crc":{zlib.crc32(text.encode())}}}\n'


def decode_line(line: str) -> Event:
    """The event of a line.

    Raises:
        ValueError: the line was cut short or changed.
    """
    event: Event = json.loads(line)
    at = line.rfind(',"crc":')
    if at < 0 or not isinstance(event, dict):
        raise ValueError("it has no checksum")
    if zlib.crc32((line[:at] + "}").encode()) != event.pop("crc"):
        raise ValueError("its checksum differs")
    return event


def read_lines(path: Path) -> Iterator[Event | BadLine]:
    """Every line of an event log or journal: its event, or what is wrong with it. A missing file has none."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                if not raw.endswith(b"\n"):
                    raise ValueError("it is cut short")
                yield decode_line(raw.decode())
            except ValueError as error:
                yield BadLine(number, str(error))


class LineLog:
    """Appends checksummed lines to a file. A line cut short by a kill is removed when the log is opened again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = _cut_unfinished_line(path)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise RunError(f"{path} can't be opened for writing ({error.strerror}).") from error

    def append(self, event: Event, *, flush: bool = False) -> None:
        """Append one event in a single write; `flush` waits until it is on disk.

        Raises:
            RunError: the disk is full.
        """
        data = encode_line(event).encode()
        try:
            written = os.write(self._file, data)
            if written != len(data):
                raise OSError(28, "No space left on device")
            if flush:
                os.fsync(self._file)
        except OSError as error:
            raise RunError(
                f"{self.path} can't be written ({error.strerror}). Free space, then resume; nothing finished is lost."
            ) from error

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _cut_unfinished_line(path: Path) -> int:
    """Cut bytes after the last newline; returns how many."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        with path.open("r+b") as file:
            file.truncate(end)
    return len(data) - end


def now() -> float:
    """Seconds since the epoch: the `time` of events."""
    return time.time()
