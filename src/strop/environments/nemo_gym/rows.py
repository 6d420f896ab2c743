"""Rows of NeMo Gym data sets: a file's lines as tasks, and a task as a row.

Only `responses_create_params` is needed in a row; all else belongs to the resources server and goes to it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.environments.nemo_gym.items import items_of, messages_of, tools_of, written_tools
from strop.errors import DataError
from strop.rollouts import Task

#: Where rows have their id, in the order in which NeMo Gym looks for it.
IDS = ("task_id", "problem_id", "instance_id")
#: What a row may ask of the model's API without any effect on a strop run: sampling is the recipe's.
_IGNORED = {
    *("temperature", "top_p", "max_output_tokens", "metadata", "model", "store", "stream", "user", "reasoning"),
    *("parallel_tool_calls", "include", "truncation", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("stream_options", "top_logprobs", "max_tool_calls", "background"),
}
_HONOURED = {"input", "instructions", "tools"}


def read_tasks(path: Path, environment: str, split: str) -> list[Task]:
    """The tasks that a file's rows are.

    Args:
        path: JSON lines.
        environment, split: what they are tasks of.

    Raises:
        DataError: no file, no row, or a row that can't be attempted; names the line.
    """
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Rows of NeMo Gym are JSON lines.")
    tasks: list[Task] = []
    seen: set[str] = set()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                task = task_of(json.loads(line), len(tasks), environment, split)
            except (ValueError, TypeError) as error:
                raise DataError(f"{path}, line {number}: {error}.") from None
            if task.id in seen:
                raise DataError(f"{path}, line {number}: the id {task.id!r} was there before; each row needs its own.")
            seen.add(task.id)
            tasks.append(task)
    if not tasks:
        raise DataError(f"{path}: it holds no row.")
    return tasks


def task_of(row: Any, index: int, environment: str, split: str) -> Task:
    """A row as a task. Raises ValueError that says what can't be read or honoured."""
    if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
        raise ValueError('it has no object "responses_create_params"')
    asked = {name: value for name, value in row["responses_create_params"].items() if value not in (None, [], {})}
    if unknown := sorted(set(asked) - _IGNORED - _HONOURED - {"tool_choice"}):
        raise ValueError(f"responses_create_params.{unknown[0]} can't be honoured here")
    if asked.get("tool_choice", "auto") != "auto":
        raise ValueError(f'tool_choice is {asked["tool_choice"]!r}; the loop of tools leaves it to the model ("auto")')
    messages = messages_of(row["responses_create_params"].get("input") or [])
    if instructions := asked.get("instructions"):
        messages.insert(0, {"role": "system", "content": str(instructions)})
    if not messages:
        raise ValueError("its input is empty: only an agent of NeMo Gym's own knows what to ask")
    name = next((str(row[key]) for key in IDS if isinstance(row.get(key), str | int)), f"{split}-{index}")
    return Task(
        id=name,
        environment=environment,
        messages=tuple(messages),
        tools=tools_of(asked.get("tools")),
        data={"row": row, "index": index},
    )


def agent_of(row: Mapping[str, Any]) -> str | None:
    """Name of the agent (and so of the resources server behind it) that a row asks for."""
    reference = row.get("agent_ref")
    name = reference.get("name") if isinstance(reference, Mapping) else None
    return name if isinstance(name, str) else None


def row_of(task: Task, split: str, agent: str | None = None) -> dict[str, Any]:
    """A task of strop as a row; what only the scorer may see is not in it.

    Args:
        task: of the environment that is served.
        split: it is of.
        agent: name of the agent in NeMo Gym's configuration that is to attempt it.
    """
    asked: dict[str, Any] = {"input": written_input(task.messages)}
    if task.tools:
        asked["tools"] = written_tools(task.tools)
    row: dict[str, Any] = {"responses_create_params": asked, "task_id": task.id, "split": split}
    if task.labels:
        row["labels"] = dict(task.labels)
    if agent is not None:
        row["agent_ref"] = {"type": "responses_api_agents", "name": agent}
    return row


def written_input(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A task's messages as input items."""
    return items_of([dict(message) for message in messages], "input")
