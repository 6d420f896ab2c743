"""Reading numbers out of what a model wrote, and writing numbers as short as they are."""

from __future__ import annotations

import math
import re

_NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<!\d)\.\d+")
_MINUS = re.compile(r"(?:^|[^\w)\]])[-−]\s?[$€£]?$")


def last_number(text: str) -> float | None:
    """The last number in `text`, or None.

    Only one number counts, the last, so listing many gains nothing. "1,234.5", "$12", "−3" and "12." are read as a
    person would; a minus between two numbers ("12-3") is not a sign. Numbers beyond floating point count as none.
    """
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007  the last one is wanted
        pass
    if found is None:
        return None
    value = float(found[0].replace(",", ""))
    if not math.isfinite(value):
        return None
    return -value if _MINUS.search(text[: found.start()]) else value


def write_number(value: float) -> str:
    """`value` without a trailing ".0", to six decimals."""
    return str(int(value)) if value == int(value) else f"{value:.6f}".rstrip("0").rstrip(".")
