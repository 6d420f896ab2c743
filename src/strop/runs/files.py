"""Files that are whole or not there: written beside, flushed to disk, renamed into place, checked by hash."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from strop.errors import RunError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Write to the path that is yielded; it becomes `path` when the block ends well, and goes away otherwise.

    Works for a file or, if the block makes one, a folder (which must not exist yet at `path`).

    Raises:
        RunError: the disk is full or the folder can't be written; whatever was at `path` stays as it was.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield beside
        flush_to_disk(beside)
        beside.replace(path)
        flush_to_disk(path.parent)
    except OSError as error:
        _remove(beside)
        raise RunError(
            f"{path} can't be written ({error.strerror or error}). Free space or mend the folder's permissions, then "
            f"resume; what was written before is whole."
        ) from error
    except BaseException as error:
        _remove(beside)
        if type(error).__name__ == "SafetensorError" and "os error" in str(error):  # what the system refused, wrapped
            raise RunError(
                f"{path} can't be written ({error}). Free space, then resume; what was before is whole."
            ) from error
        raise


def remove_folder(path: Path) -> None:
    """Remove a folder so that a kill in the middle leaves no half of it under its name."""
    if path.exists():
        gone = path.with_name(f".{path.name.strip('.')}.{os.getpid()}.part")
        path.replace(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def flush_to_disk(path: Path) -> None:
    """fsync a file, or a folder and everything in it."""
    if path.is_dir():
        for child in path.iterdir():
            if child.is_file():
                flush_to_disk(child)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole."""
    with written_whole(path) as beside:
        beside.write_text(json.dumps(value, indent=2, sort_keys=False) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what a killed process left half-written under `folder`; returns what it was."""
    leftovers = [path for path in folder.rglob(".*.part") if not any(p.name.endswith(".part") for p in path.parents)]
    for path in leftovers:
        _remove(path)
    return leftovers
