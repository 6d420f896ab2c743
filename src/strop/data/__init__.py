"""Training data from files: rows to examples, examples to tokens, and what is wrong with which row."""

from strop.data.examples import Conversation, Example, Judged, Pair, PlainText, RowProblem
from strop.data.formats import FORMATS, parse_row
from strop.data.load import Loaded, Row, load_rows, usable_rows
from strop.data.rendering import Rendered, RowRenderer

__all__ = [
    "FORMATS",
    "Conversation",
    "Example",
    "Judged",
    "Loaded",
    "Pair",
    "PlainText",
    "Rendered",
    "Row",
    "RowProblem",
    "RowRenderer",
    "load_rows",
    "parse_row",
    "usable_rows",
]
