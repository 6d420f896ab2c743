"""Rows of JSONL, JSON and Parquet files, of folders of them, and of what the `datasets` library saves to disk.

A row that can't be read is a problem of that row; a file that can't be, an error. What rows mean is in `formats`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strop.data.examples import RowProblem
from strop.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
#: Names that a split's files begin with, where folders hold several.
SPLITS = ("train", "validation", "valid", "dev", "test")
RawRow = tuple[str, int, dict[str, Any]]


def read_rows(path: Path, split: str = "") -> Iterator[RawRow | RowProblem]:
    """File name, number (from 1; a JSONL file's line) and values of every row, or what is wrong with it.

    Args:
        path: a file, or a folder.
        split: of a folder with several; "" takes "train", or the only one.

    Raises:
        DataError: there is no such file or split, or a file can't be read at all.
    """
    for file in data_files(path, split):
        reader = {".jsonl": _jsonl, ".json": _json, ".parquet": _parquet, ".arrow": _arrow}[file.suffix]
        try:
            yield from reader(file)
        except OSError as error:
            raise DataError(f"{file}: it can't be read ({error.strerror or error}).") from error


def data_files(path: Path, split: str = "") -> list[Path]:
    """The files that a path and a split stand for, in order of their names; errors as in `read_rows`."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"{path}: files of this kind aren't read. Known are {', '.join(SUFFIXES)}.")
        if split:
            raise DataError(f"{path}: it is one file, which has no split {split!r}. Leave data.split out.")
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: there is no such file or folder. Name a JSONL, JSON or Parquet file.")
    inside = sorted(file for file in path.rglob("*") if _holds_rows(file))
    by_split: dict[str, list[Path]] = {}
    for file in inside:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    if not by_split:
        raise DataError(f"{path}: the folder holds no data. Known are files that end in {', '.join(SUFFIXES)}.")
    chosen = split or ("train" if "train" in by_split else next(iter(by_split)))
    if chosen not in by_split or (not split and len(by_split) > 1 and chosen != "train"):
        wrong = f"it has no split {split!r}" if split else "it has several splits, and none is called train"
        raise DataError(f"{path}: {wrong}. Set data.split to one of: {', '.join(filter(None, by_split))}.")
    return by_split[chosen]


def _holds_rows(file: Path) -> bool:
    """`datasets` keeps notes about the rows in JSON files beside them."""
    notes = ("dataset_info.json", "state.json", "dataset_dict.json", "dataset_infos.json")
    return file.is_file() and file.suffix in SUFFIXES and file.name not in notes and not file.name.startswith("cache-")


def _split_of(file: Path) -> str:
    """By the folder that a file is in, or by how its name begins; "" if neither tells."""
    if len(file.parts) > 1 and file.parts[0] != "data":
        return file.parts[0]
    return next((name for name in SPLITS if file.name == name + file.suffix or file.name.startswith(f"{name}-")), "")


def _jsonl(file: Path) -> Iterator[RawRow | RowProblem]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield _parsed(file.name, number, line)


def _parsed(name: str, number: int, line: bytes) -> RawRow | RowProblem:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return RowProblem(name, number, "", f"byte {error.start + 1} is not valid UTF-8", "Save the file as UTF-8")
    except RecursionError:
        return RowProblem(name, number, "", "it is nested too deeply", "Rows are objects of a few levels")
    except ValueError as error:
        return RowProblem(name, number, "", f"it is not valid JSON ({error})", "Every line is one JSON object")
    return _object(name, number, value)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _object(name: str, number: int, value: Any) -> RawRow | RowProblem:
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(value), "a single value")
        return RowProblem(name, number, "", f"it is {kind}", "Every row is an object")
    return name, number, _without_nan(value)


def _json(file: Path) -> Iterator[RawRow | RowProblem]:
    try:
        whole = json.loads(file.read_bytes().decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: it is not valid JSON ({error}). One object a line is a .jsonl file.") from error
    if not isinstance(whole, list):
        raise DataError(f"{file}: it is not a list of rows. One object a line is a .jsonl file.")
    for number, value in enumerate(whole, 1):
        yield _object(file.name, number, value)


def _parquet(file: Path) -> Iterator[RawRow | RowProblem]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield _object(file.name, number, row)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: it is not a whole Parquet file ({_first_line(error)}). Copy it again.") from error


def _arrow(file: Path) -> Iterator[RawRow | RowProblem]:
    """`datasets` writes Arrow's stream format."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as stream:
            number = 0
            for batch in stream:
                for row in batch.to_pylist():
                    number += 1
                    yield _object(file.name, number, row)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: it is not a whole Arrow file ({_first_line(error)}). Copy it again.") from error


def _without_nan(value: dict[str, Any]) -> dict[str, Any]:
    """Tables made by pandas write a missing value as NaN."""
    return {key: None if isinstance(inner, float) and math.isnan(inner) else inner for key, inner in value.items()}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
