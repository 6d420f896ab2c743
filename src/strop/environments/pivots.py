"""Turns cut from agents' trajectories, each a task of its own: read what came before, act once, and be scored by what was
done there. Trained one turn at a time, without tools, sandboxes or waiting.

Such stages before reinforcement learning in the full environment are known as pivot RL. What is scored here is whether
the action is one that a good trajectory took at this place; what it would have led to is not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from strop.data import Conversation, RowProblem, parse_row
from strop.data.examples import Wrong
from strop.data.files import read_rows
from strop.data.formats import format_of
from strop.environments.drawn import is_held_out
from strop.environments.environment import Demonstration, Environment
from strop.errors import ConfigError, EnvironmentProblem
from strop.rollouts import Message, Rollout, Scored, Task, ToolSpec
from strop.runs.reading import open_run


class Trajectory(NamedTuple):
    """What an agent did from beginning to end.

    Attributes:
        name: tells it from others.
        task: tells the split: all turns of a task are in the same one.
        messages, tools: the conversation, and what could be called in it.
    """

    name: str
    task: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec]


#: What an assistant did in a turn: calls in order, each a name and its arguments, or else a text.
Action = dict[str, Any]


class Pivots(Environment):
    """Single turns of stored trajectories.

    Solved is a turn whose calls are those of a trajectory at the same place: the same tools in the same order, their
    arguments equal as JSON values. Where trajectories that read the same went on differently, each way counts. All turns
    of a task are in the same split.

    Args:
        run: directory of a run whose attempts are cut up; or
        path: a data file of conversations with tool calls, in any format that `strop data check` knows.
        stage: whose attempts; "" takes every stage's. Attempts of evaluations are never taken.
        reward_above: only attempts that were rewarded with more; without it, only those that solved their task.
        texts: whether turns without a call are taken too. Their texts must be equal, case and spaces aside.
        arguments: "equal", or "any" where the right tool is enough.
        longest: turns before which there are more messages are left out.

    Raises:
        ConfigError: not one source is given, or nothing in it can be used.
    """

    name = "pivots"

    def __init__(
        self,
        run: str = "",
        path: str = "",
        stage: str = "",
        reward_above: float | None = None,
        texts: bool = False,
        arguments: Literal["equal", "any"] = "equal",
        longest: int = 64,
    ) -> None:
        if bool(run) == bool(path):
            raise ConfigError("environment.options", "turns are cut from a run or from a file", "Give run or path")
        self.texts, self.arguments, self.longest = texts, arguments, longest
        found = _of_run(run, stage, reward_above) if run else _of_file(Path(path))
        self._tasks: dict[str, list[Task]] = {"train": [], "test": []}
        for task, held_out in self._cut(found):
            self._tasks["test" if held_out else "train"].append(task)
        if not self._tasks["train"]:
            raise ConfigError(
                "environment.options",
                f"there is no turn to train on in {run or path}",
                "Ask for less (reward_above, texts, stage), or name another source",
            )

    def _cut(self, trajectories: Iterator[Trajectory]) -> Iterator[tuple[Task, bool]]:
        """One task for every place that trajectories came to, and whether it is held out."""
        places: dict[str, tuple[Trajectory, list[Message], list[Action]]] = {}
        for trajectory in trajectories:
            for turn, message in enumerate(trajectory.messages[: self.longest + 1]):
                action = action_of(message) if message.get("role") == "assistant" and turn else None
                if action is None or not (action["calls"] or self.texts):
                    continue
                before = [_plain(earlier) for earlier in trajectory.messages[:turn]]
                key = json.dumps([before, list(trajectory.tools)], sort_keys=True)
                accepted = places.setdefault(key, (trajectory, before, []))[2]
                if action not in accepted:
                    accepted.append(action)
        for trajectory, before, accepted in places.values():
            label = accepted[0]["calls"][0]["name"] if accepted[0]["calls"] else "reply"
            task = Task(
                id=f"{trajectory.name}#{len(before)}",
                environment=self.name,
                messages=tuple(before),
                tools=tuple(trajectory.tools),
                data={"accepted": accepted},
                labels={"action": label},
            )
            yield task, is_held_out(trajectory.task)

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        if split not in self._tasks:
            raise EnvironmentProblem(f'There is no split {split!r}: known are "train" and "test".')
        return self._tasks[split]

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        """1 if the turn is one that was taken here, else 0."""
        action = action_of(rollout.transcript[-1])
        accepted: list[Action] = task.data["accepted"]
        solved = action is not None and any(self._same(action, other) for other in accepted)
        tools = [call["name"] for call in action["calls"]] if action else []
        right_tool = any(tools and tools == [call["name"] for call in other["calls"]] for other in accepted)
        return Scored(float(solved), {"right_tool": float(right_tool), "readable": float(action is not None)}, solved)

    def _same(self, one: Action, other: Action) -> bool:
        if one["calls"] or other["calls"]:
            if self.arguments == "equal":
                return bool(one["calls"] == other["calls"])
            return [call["name"] for call in one["calls"]] == [call["name"] for call in other["calls"]]
        return _folded(one["text"]) == _folded(other["text"])

    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        """The turns as they were taken."""
        drawn = [rng.choice(self._tasks["train"]) for _ in range(count)]
        return [Demonstration(task, (*task.messages, _message(task.data["accepted"][0]))) for task in drawn]


def action_of(message: Message) -> Action | None:
    """What an assistant's message does; None if a call in it can't be read."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        try:
            read = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            return None
        if call.get("problem") or not isinstance(read, dict):
            return None
        calls.append({"name": function["name"], "arguments": read})
    return {"calls": calls, "text": str(message.get("content") or "")}


def _message(action: Action) -> Message:
    made: Message = {"role": "assistant", "content": action["text"]}
    if action["calls"]:
        made["tool_calls"] = [
            {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for number, call in enumerate(action["calls"], 1)
        ]
    return made


def _plain(message: Mapping[str, Any]) -> Message:
    """A message without what only records have beside it."""
    return {key: value for key, value in message.items() if key not in ("error", "weight")}


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _of_run(name: str, stage: str, reward_above: float | None) -> Iterator[Trajectory]:
    """The good attempts of a run's stages; those whose history was rewritten aren't one conversation and are left out."""
    run = open_run(name)
    for file in run.rollout_files:
        if file.evaluation is not None or stage not in ("", file.stage):
            continue
        for attempt in run.attempts(file):
            reward = attempt.rollout.reward
            good = attempt.solved if reward_above is None else reward is not None and reward > reward_above
            if good and not attempt.rollout.forks:
                task = attempt.group.task
                yield Trajectory(attempt.rollout.id, task.id, attempt.rollout.transcript, task.tools)


def _of_file(path: Path) -> Iterator[Trajectory]:
    """The conversations of a data file."""
    for raw in read_rows(path):
        if isinstance(raw, RowProblem):
            raise ConfigError("environment.options.path", str(raw), "Mend the row, or leave it out")
        file, number, row = raw
        try:
            parsed = parse_row(row, format_of(row))
        except Wrong as error:
            problem = RowProblem(file, number, error.field, error.wrong, error.right)
            raise ConfigError("environment.options.path", str(problem), "") from None
        if isinstance(parsed, Conversation):
            yield Trajectory(f"{file}:{number}", f"{file}:{number}", parsed.messages, parsed.tools)
