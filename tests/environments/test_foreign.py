"""An attempt that another framework makes ends as one of ours does, and what breaks in it is never a score."""

from __future__ import annotations

import json

import pytest

from strop.environments import Environment, Session, ToolOutcome, load_environment
from strop.environments.foreign import ForeignAttempt
from strop.errors import AttemptError
from strop.rollouts import FailureKind, Rollout, Scored, Task

TASK = Task("t", "one", ({"role": "user", "content": "Go."},))


class One(Environment):
    """What its session's tool and scorer do is what it is made with."""

    name = "one"

    def __init__(self, tool: object, score: object = 1.0) -> None:
        self.tool, self.reward, self.seen = tool, score, list[Rollout]()

    async def start(self, task: Task, seed: int) -> Session:
        environment = self

        class Own(Session):
            async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
                if isinstance(environment.tool, Exception):
                    raise environment.tool
                return environment.tool

            async def score(self, rollout: Rollout) -> Scored:
                environment.seen.append(rollout)
                if isinstance(environment.reward, Exception):
                    raise environment.reward
                return Scored(environment.reward)

        return Own(self, task, seed)


async def test_what_was_said_reaches_the_scorer_with_its_errors_marked() -> None:
    environment = One(ToolOutcome("busy", error="timeout"))
    attempt = await ForeignAttempt.open(environment, TASK, 3)
    assert await attempt.call("look", '{"x": 1}') == "busy"
    malformed = await attempt.call("look", "{")
    said = [
        {"role": "assistant", "content": ""},
        {"role": "tool", "tool_call_id": "a", "content": "busy"},
        {"role": "tool", "tool_call_id": "b", "content": malformed},
        {"role": "tool", "tool_call_id": "c", "content": "fine"},
        {"role": "assistant", "content": "busy"},
    ]
    assert (await attempt.score(said, 3)).reward == 1.0
    (rollout,) = environment.seen
    assert rollout.transcript[0] == TASK.messages[0] and rollout.member == 3
    assert [message.get("error") for message in rollout.transcript] == [
        None, None, "timeout", "malformed call", None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("tool", "reward", "kind"),
    [
        (AttemptError(FailureKind.SANDBOX, "gone"), 1.0, FailureKind.SANDBOX),
        (KeyError("x"), 1.0, FailureKind.TOOL),
        (ToolOutcome("ok"), ValueError("no file"), FailureKind.SCORER),
        (ToolOutcome("ok"), float("nan"), FailureKind.SCORER),
    ],
)
async def test_what_breaks_is_a_failure(tool: object, reward: object, kind: FailureKind) -> None:
    attempt = await ForeignAttempt.open(One(tool, reward), TASK)
    if isinstance(tool, Exception):
        with pytest.raises(AttemptError):
            await attempt.call("look", {})
    with pytest.raises(AttemptError) as failure:  # also if the framework went on after the tool broke
        await attempt.score([{"role": "assistant", "content": "x"}])
    assert failure.value.kind is kind


async def test_attempts_at_a_task_have_seeds_of_their_own() -> None:
    environment = load_environment("shopkeeper", {"train_tasks": 1})
    task = environment.tasks("train")[0]
    opened = [await ForeignAttempt.open(environment, task, number) for number in (0, 0, 1)]
    seeds = [attempt._session.seed for attempt in opened]
    assert seeds[0] == seeds[1] != seeds[2]
    arguments = json.dumps({"item": "pears"})
    name = task.tools[0]["function"]["name"]
    assert await opened[0].call(name, arguments) == await opened[1].call(name, arguments)
