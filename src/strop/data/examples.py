"""What a row of a data file can be: a conversation, a text, a pair of answers, or a judged answer. Plain data.

How rows of the known formats become these is in `formats`; how these become tokens, in `rendering`.
"""

from __future__ import annotations

from dataclasses import dataclass

from strop.rollouts import Message, ToolSpec


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and which of them are learnt.

    Attributes:
        messages: as the OpenAI API writes them, keys without a value left out.
        trained: for each, whether its tokens are to be learnt; true for assistants' messages only.
        tools: what the assistant may call.
    """

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    tools: tuple[ToolSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text that is no chat: after the prompt, which may be empty, the rest is learnt up to its end."""

    prompt: str
    text: str


Answer = Conversation | PlainText


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to the same prompt, the first preferred."""

    chosen: Answer
    rejected: Answer


@dataclass(frozen=True, slots=True)
class Judged:
    """An answer, and whether it is a good one."""

    answer: Answer
    desirable: bool


Example = Conversation | PlainText | Pair | Judged


@dataclass(frozen=True, slots=True)
class RowProblem:
    """What is wrong with a row.

    Attributes:
        file: its name, without folders.
        row: its number, from 1; the line of a JSONL file.
        field: which part of it, such as "messages[2].content"; "" for the row as a whole.
        wrong, right: what is wrong, and what would be right.
    """

    file: str
    row: int
    field: str
    wrong: str
    right: str

    def __str__(self) -> str:
        place = f"{self.file} row {self.row}"
        return f"{place}{', ' if self.field else ''}{self.field}: {self.wrong}. {self.right}."


class Wrong(ValueError):
    """A field is wrong; the reader adds file and row."""

    def __init__(self, field: str, wrong: str, right: str) -> None:
        self.field, self.wrong, self.right = field, wrong, right
        super().__init__(f"{field}: {wrong}. {right}.")


class TooLong(Wrong):
    """The row has too many tokens; nothing else is wrong with it."""
