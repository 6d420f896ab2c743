"""An environment of strop as one of verifiers < 0.4: `vf.load_environment("strop.environments.exports.verifiers", …)`.

A failure of the system (a dead sandbox, a scorer that raised) is the rollout's error there, and not a reward of 0.
"""

from __future__ import annotations

import itertools
from typing import Any

import verifiers as vf
from datasets import Dataset

from strop.environments.environment import Environment
from strop.environments.foreign import ForeignAttempt
from strop.environments.registry import load_environment as load
from strop.errors import AttemptError
from strop.rollouts import FailureKind, Task

_ERRORS = {FailureKind.SANDBOX: vf.SandboxError, FailureKind.TOOL: vf.ToolCallError}


def load_environment(
    environment: str,
    options: dict[str, object] | None = None,
    train_tasks: int = 1000,
    test_tasks: int = 200,
    max_turns: int = 8,
) -> Any:
    """The environment.

    Args:
        environment: a built-in name, "package.module:Class", or "path/to/file.py:Class".
        options: of its class.
        train_tasks, test_tasks: the first so many tasks of each split.
        max_turns: replies of one attempt.
    """
    made = load(environment, options)
    return StropEnvironment(made, {"train": train_tasks, "test": test_tasks}, max_turns)


class StropEnvironment(vf.MultiTurnEnv):
    """Its tools run and its scorer scores in this process."""

    def __init__(self, environment: Environment, sizes: dict[str, int], max_turns: int) -> None:
        self._environment = environment
        self._splits = {split: list(itertools.islice(environment.tasks(split), size)) for split, size in sizes.items()}
        self._numbers = itertools.count()
        super().__init__(
            dataset=Dataset.from_list(self._rows("train")),
            eval_dataset=Dataset.from_list(self._rows("test")) if self._splits["test"] else None,
            rubric=vf.Rubric(funcs=[_reward, _solved], weights=[1.0, 0.0]),
            max_turns=max_turns,
        )

    def _rows(self, split: str) -> list[dict[str, Any]]:
        """Rows name their tasks; tools, which differ from task to task, are set when an attempt begins."""
        return [
            {
                "prompt": [dict(message) for message in task.messages],
                "answer": "",
                "example_id": number,
                "info": {"split": split, "number": number},
            }
            for number, task in enumerate(self._splits[split])
        ]

    def _task(self, state: Any) -> Task:
        return self._splits[str(state["info"]["split"])][int(state["info"]["number"])]

    async def setup_state(self, state: Any) -> Any:
        """See `vf.MultiTurnEnv`: opens the attempt."""
        task = self._task(state)
        state["tool_defs"] = [_tool(tool["function"]) for tool in task.tools]
        try:
            state["strop"] = await ForeignAttempt.open(self._environment, task, next(self._numbers))
        except AttemptError as error:
            raise _error(error) from error
        return await super().setup_state(state)

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        """See `vf.MultiTurnEnv`: runs the calls of the last reply."""
        results = []
        for call in messages[-1].tool_calls or ():
            try:
                content = await state["strop"].call(call.name, call.arguments)
            except AttemptError as error:
                raise _error(error) from error
            results.append(vf.ToolMessage(role="tool", content=content, tool_call_id=call.id))
        return results

    @vf.stop
    async def replied_without_a_call(self, state: Any) -> bool:
        """Whether the model is done."""
        steps = state["trajectory"]
        return bool(steps) and not getattr(steps[-1]["completion"][-1], "tool_calls", None)

    @vf.cleanup
    async def score_and_close(self, state: Any) -> None:
        """Score the attempt while its session is open; a failure becomes the rollout's error."""
        attempt = state.pop("strop", None)
        if attempt is None:
            return
        try:
            if state.get("error") is None:
                await self.render_completion(state)
                state["strop_scored"] = await attempt.score([_plain(message) for message in state["completion"]])
        except AttemptError as error:
            state["error"] = _error(error)
        finally:
            await attempt.close()


def _reward(state: Any) -> float:
    """The reward; of a failed attempt there is none, and its error says why."""
    return float(state["strop_scored"].reward) if "strop_scored" in state else 0.0


def _solved(state: Any) -> float:
    return float(bool("strop_scored" in state and state["strop_scored"].solved))


def _error(error: AttemptError) -> Any:
    return _ERRORS.get(error.kind, vf.InfraError)(str(error))


def _tool(function: dict[str, Any]) -> Any:
    return vf.Tool(
        name=function["name"],
        description=function.get("description", ""),
        parameters=function.get("parameters") or {"type": "object", "properties": {}},
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message of theirs as the chat API writes it."""
    said = dict(message) if isinstance(message, dict) else message.model_dump(exclude_none=True)
    if calls := said.get("tool_calls"):
        said["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in calls
        ]
    said["content"] = said.get("content") or ""
    return said
