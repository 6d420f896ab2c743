"""An environment of strop as a task of inspect_ai: `inspect eval strop/environments/exports/inspect_ai.py@strop_task -T …`.

Its session lives in the solver and is scored there; inspect's scorer reports it. A failure of the system is the
sample's error, and not a score of 0.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from inspect_ai import Task as InspectTask
from inspect_ai import task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageTool, ChatMessageUser, get_model
from inspect_ai.scorer import Score, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, TaskState, solver
from inspect_ai.tool import ToolInfo, ToolParams

from strop.environments.environment import Environment
from strop.environments.foreign import ForeignAttempt
from strop.environments.registry import load_environment
from strop.rollouts import Message, Task

_KINDS: dict[str, Any] = {"system": ChatMessageSystem, "developer": ChatMessageSystem, "user": ChatMessageUser}


@task
def strop_task(
    environment: str,
    options: dict[str, object] | None = None,
    split: str = "test",
    tasks: int = 200,
    max_turns: int = 8,
) -> InspectTask:
    """The task.

    Args:
        environment: a built-in name, "package.module:Class", or "path/to/file.py:Class".
        options: of its class.
        split: whose tasks are the samples.
        tasks: the first so many.
        max_turns: replies of one attempt.
    """
    made = load_environment(environment, options)
    listed = list(itertools.islice(made.tasks(split), tasks))
    samples = [_sample(found, number) for number, found in enumerate(listed)]
    return InspectTask(
        dataset=MemoryDataset(samples, name=made.name),
        solver=_attempt(made, listed, max_turns),
        scorer=strop_scorer(),
    )


def _sample(found: Task, number: int) -> Sample:
    messages = [_KINDS[message["role"]](content=message["content"]) for message in found.messages]
    return Sample(input=messages, target="", id=found.id, metadata={"number": number, "labels": dict(found.labels)})


@solver
def _attempt(environment: Environment, listed: list[Task], max_turns: int) -> Any:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        found = listed[int(state.metadata["number"])]
        tools = [_tool(tool["function"]) for tool in found.tools]
        said: list[Message] = []
        attempt = await ForeignAttempt.open(environment, found, state.epoch)
        try:
            for _ in range(max_turns):
                state.output = await get_model().generate(state.messages, tools=tools)
                reply = state.output.message
                state.messages.append(reply)
                said.append(_written(reply))
                if not reply.tool_calls:
                    break
                for call in reply.tool_calls:
                    arguments = call.arguments if call.parse_error is None else None
                    content = await attempt.call(call.function, arguments)
                    state.messages.append(
                        ChatMessageTool(content=content, tool_call_id=call.id, function=call.function)
                    )
                    said.append({"role": "tool", "tool_call_id": call.id, "content": content})
            scored = await attempt.score(said)
        finally:
            await attempt.close()
        state.metadata["strop"] = {
            "reward": scored.reward,
            "solved": scored.solved,
            "metrics": dict(scored.metrics),
        }
        return state

    return solve


@scorer(metrics=[mean(), stderr()])
def strop_scorer() -> Any:
    """Reports the environment's own score: the reward; what else it counted is in the score's metadata."""

    async def score(state: TaskState, target: Target) -> Score:
        found = state.metadata["strop"]
        return Score(value=found["reward"], answer=state.output.completion, metadata=found)

    return score


def _tool(function: dict[str, Any]) -> ToolInfo:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolInfo(
        name=function["name"],
        description=function.get("description", ""),
        parameters=ToolParams.model_validate({"additionalProperties": False, **parameters}),
    )


def _written(reply: ChatMessageAssistant) -> Message:
    """A reply as the chat API writes it."""
    message: Message = {"role": "assistant", "content": reply.text}
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": json.dumps(call.arguments)},
            }
            for call in reply.tool_calls
        ]
    return message
