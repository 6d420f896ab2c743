"""Attempts packed for the report's page: what its script needs to list them and show them turn by turn, as JSON.

A long run has more than a page can hold, so every file has its share of the room and fills it with whole groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from strop.rollouts import Group
from strop.runs.reading import Attempt, RolloutFile, RunRecord
from strop.runs.show import labels_of
from strop.runs.turns import TokenText, Turn, token_texts, turns

#: Most files of attempts on one page.
MOST_FILES = 100


class _Texts:
    """Texts by number, each once: members of a group share their prompts, and tool answers repeat."""

    def __init__(self) -> None:
        self.list: list[str] = []
        self.characters = 0
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.list)
            self.list.append(text)
            self.characters += len(text)
        return self._numbers[text]


def packed_attempts(run: RunRecord, room: int) -> str:
    """JSON to stand inside a <script> element.

    Args:
        run: the run.
        room: about how many characters it may take; every file that is taken gives one group at least.
    """
    texts = _Texts()
    token_text = token_texts(run.path / "checkpoints")
    files = _spread(run.rollout_files)
    packed: list[list[dict[str, Any]]] = []
    used = 0
    for number, file in enumerate(files, start=1):
        rows: list[dict[str, Any]] = []
        for members in _groups(run.attempts(file)):
            group = [_pack(attempt, index, texts, token_text) for index, attempt in members]
            used += len(json.dumps(group))
            rows += group
            if used + texts.characters > room * number / len(files):
                break
        packed.append(rows)
    data = {
        "files": [file.label for file in files],
        "made": run.attempt_counts["made"],
        "texts": texts.list,
        "attempts": packed,
    }
    # A "<" could let a transcript end the script element.
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")


def _spread(files: list[RolloutFile]) -> list[RolloutFile]:
    """All files, or of too many the evaluations and evenly spaced steps, the first and the last among them."""
    steps = [file for file in files if file.evaluation is None]
    most = max(2, MOST_FILES - (len(files) - len(steps)))
    if len(steps) <= most:
        return files
    kept = {steps[round(number * (len(steps) - 1) / (most - 1))].path for number in range(most)}
    return [file for file in files if file.evaluation is not None or file.path in kept]


def _groups(attempts: list[Attempt]) -> Iterator[list[tuple[int, Attempt]]]:
    members: list[tuple[int, Attempt]] = []
    last: Group | None = None
    for index, attempt in enumerate(attempts):
        if last is not None and attempt.group.id != last.id:
            yield members
            members = []
        members.append((index, attempt))
        last = attempt.group
    if members:
        yield members


def _pack(attempt: Attempt, index: int, texts: _Texts, token_text: TokenText | None) -> dict[str, Any]:
    rollout = attempt.rollout
    return {
        "n": index,
        "id": rollout.id,
        "task": attempt.group.task.id,
        "label": labels_of(attempt.group.task),
        "reward": rollout.reward,
        "solved": attempt.solved,
        "failure": attempt.failure,
        "used": attempt.used,
        "cut": rollout.truncated,
        "tokens": rollout.sampled_tokens,
        "seconds": round(rollout.ended - rollout.started, 2),
        "tries": rollout.tries,
        "metrics": {name: round(value, 4) for name, value in attempt.metrics.items()},
        "turns": [_pack_turn(turn, texts, token_text) for turn in turns(attempt)],
    }


def _pack_turn(turn: Turn, texts: _Texts, token_text: TokenText | None) -> dict[str, Any]:
    packed: dict[str, Any] = {"role": turn.role, "text": texts.number(turn.text)}
    if turn.name:
        packed["name"] = turn.name
    if turn.error:
        packed["error"] = turn.error
    if turn.tools:
        packed["tools"] = [[use.name, use.arguments, use.problem] for use in turn.tools]
    if turn.call is not None:
        versions = turn.call.versions
        packed["call"] = [len(turn.call.tokens), turn.call.cached, min(versions, default=0), max(versions, default=0)]
        if token_text is not None:
            packed["tokens"] = [texts.number(token_text(token)) for token in turn.call.tokens]
            packed["percent"] = [round(100 * math.exp(min(0.0, logprob))) for logprob in turn.call.logprobs]
    return packed
