"""A whole data source: its rows read, told apart, parsed and rendered, with every problem named by file, row and field.

Training takes rows from here and stops at problems; `strop data check` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from strop.data.examples import Example, RowProblem, TooLong, Wrong
from strop.data.files import RawRow, read_rows
from strop.data.formats import FORMATS, canonical, format_of, parse_row
from strop.data.rendering import Rendered, RowRenderer
from strop.errors import DataError

if TYPE_CHECKING:
    from strop.config import DataSettings

#: Problems that an error shows.
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A good row.

    Attributes:
        file, number: where it is, as in `RowProblem`.
        content: the row as one line of text, the same for equal rows.
        example: what it says.
        rendered: in tokens.
    """

    file: str
    number: int
    content: str
    example: Example
    rendered: Rendered


@dataclass(slots=True)
class Loaded:
    """What is in a data source.

    Attributes:
        format: of its rows, a key of `FORMATS`.
        rows: those that can be trained on.
        problems: what is wrong with the others, row by row.
        too_long: problems among them that are about the number of tokens alone.
    """

    format: str = ""
    rows: list[Row] = field(default_factory=list)
    problems: list[RowProblem] = field(default_factory=list)
    too_long: list[RowProblem] = field(default_factory=list)


def load_rows(settings: DataSettings, render: RowRenderer, tell: Callable[[int], None] = lambda rows: None) -> Loaded:
    """Read, parse and render every row.

    Args:
        settings: the source, and how its rows are understood.
        render: see `RowRenderer`; built by the caller from the same settings.
        tell: told how many rows are done.

    Raises:
        DataError: a file can't be read, or there are no rows at all.
    """
    loaded = Loaded("" if settings.format == "auto" else settings.format)
    for raw in read_rows(Path(settings.path).expanduser(), settings.split):
        if isinstance(raw, RowProblem):
            loaded.problems.append(raw)
        else:
            _add(loaded, raw, settings, render)
        tell(len(loaded.rows) + len(loaded.problems))
    if not loaded.rows and not loaded.problems:
        raise DataError(f"{settings.path}: it has no rows.")
    return loaded


def _add(loaded: Loaded, raw: RawRow, settings: DataSettings, render: RowRenderer) -> None:
    file, number, values = raw
    try:
        loaded.format = loaded.format or format_of(values)
        example = parse_row(values, loaded.format, settings.strings)
        rendered = render(example)
    except Wrong as error:
        problem = RowProblem(file, number, error.field, error.wrong, error.right)
        loaded.problems.append(problem)
        if isinstance(error, TooLong):
            loaded.too_long.append(problem)
        return
    loaded.rows.append(Row(file, number, canonical(values), example, rendered))


def usable_rows(loaded: Loaded, settings: DataSettings, kinds: tuple[str, ...]) -> tuple[list[Row], list[str]]:
    """The rows to train on, and warnings about those that were dropped as the settings say.

    Args:
        loaded: what was read.
        settings: what to do about rows with something wrong.
        kinds: what the stage trains on, among `Format.gives`.

    Raises:
        DataError: rows are wrong and shall not be dropped, none is left, or they are of another kind.
    """
    gives = FORMATS[loaded.format].gives if loaded.format else kinds[0]
    if gives not in kinds:
        raise DataError(
            f"{settings.path}: its rows are {gives} (format {loaded.format}), but the stage trains on "
            f"{' or '.join(kinds)}."
        )
    long = set(map(id, loaded.too_long))
    bad = [p for p in loaded.problems if id(p) not in long and settings.bad_rows == "refuse"]
    bad += [p for p in loaded.too_long if settings.too_long == "refuse"]
    if bad:
        raise DataError("\n".join(_first_few(bad, settings.path)))
    if not loaded.rows:
        raise DataError("\n".join(["no row is left to train on:", *_first_few(loaded.problems, settings.path)]))
    warnings = []
    if dropped := len(loaded.problems):
        about = f" ({len(long)} of them too long)" if long else ""
        warnings.append(f"{settings.path}: {dropped} rows were dropped{about}, as data.bad_rows and data.too_long say")
    if cut := sum(1 for row in loaded.rows if row.rendered.cut):
        warnings.append(f"{settings.path}: {cut} rows were cut at {settings.max_tokens} tokens, as data.too_long says")
    return loaded.rows, warnings


def _first_few(problems: list[RowProblem], path: str) -> Iterator[str]:
    yield from map(str, problems[:SHOWN])
    if len(problems) > SHOWN:
        yield f"… and {len(problems) - SHOWN} more rows: strop data check {path}"
