"""Agents: what they say to the model, what they leave to the environment, and what counts as the system's failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from strop.agents import SingleReply, ToolLoop
from strop.environments.environment import Environment, Session, ToolOutcome
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, FinishReason, Rollout, Task
from strop.sampling.conversation import Conversation
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

Make = Callable[..., Any]
END = "<|im_end|>"
TASK = Task(id="t", environment="e", messages=({"role": "user", "content": "Go"},))


def call(name: str, **arguments: Any) -> str:
    import json

    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


class Recording(Session):
    """Keeps what was called; tools behave as their names say."""

    def __init__(self) -> None:
        super().__init__(Environment(), TASK, seed=0)
        self.log: list[str] = []

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        self.log.append(f"{name} begins")
        if name == "slow":
            await asyncio.sleep(0.01)
        if name == "broken":
            raise KeyError("lost")
        if name == "lost":
            raise AttemptError(FailureKind.SANDBOX, "the sandbox died")
        self.log.append(f"{name} ends")
        return ToolOutcome("", error="timeout") if name == "late" else ToolOutcome(f"{name} {arguments}")


async def attempt(agent: Any, sampler: Any) -> tuple[Rollout, Recording]:
    rollout = Rollout(id="g/0", task_id="t", environment="e", member=0, seed=7)
    renderer = renderer_for(sampler.tokenizer, "some/folder")
    session = Recording()
    await agent.run(TASK, session, Conversation(sampler, renderer, rollout, SamplingParams(max_tokens=500)))
    return rollout, session


async def test_a_single_reply_is_one_call(scripted_sampler: Make) -> None:
    sampler = scripted_sampler([f"Done{END}"])
    rollout, _ = await attempt(SingleReply(max_tokens=3), sampler)
    assert [message["content"] for message in rollout.transcript] == ["Go", "Don"]
    assert rollout.truncated and sampler.params[0].max_tokens == 3


async def test_the_loop_goes_on_until_a_reply_without_a_call(scripted_sampler: Make) -> None:
    rollout, session = await attempt(ToolLoop(), scripted_sampler([call("a", x=1) + END, call("b") + END, f"42{END}"]))
    assert session.log == ["a begins", "a ends", "b begins", "b ends"]
    assert [message["role"] for message in rollout.transcript] == ["user", *("assistant", "tool") * 2, "assistant"]
    assert rollout.transcript[2] == {"role": "tool", "tool_call_id": "call_1", "name": "a", "content": "a {'x': 1}"}
    assert [call.parent for call in rollout.calls] == [None, 0, 1]
    assert set(rollout.seconds) == {"sampler", "tools"}


async def test_calls_of_one_reply_run_in_order_or_together(scripted_sampler: Make) -> None:
    script = [call("slow") + call("fast") + END, f"42{END}"]
    _, session = await attempt(ToolLoop(), scripted_sampler(script))
    assert session.log == ["slow begins", "slow ends", "fast begins", "fast ends"]
    rollout, session = await attempt(ToolLoop(parallel_calls=True), scripted_sampler(script))
    assert session.log == ["slow begins", "fast begins", "fast ends", "slow ends"]
    assert [message.get("name") for message in rollout.transcript[2:4]] == ["slow", "fast"]


async def test_a_malformed_call_can_be_recovered_from(scripted_sampler: Make) -> None:
    sampler = scripted_sampler([f"<tool_call>oops</tool_call>{call('a')}{END}", call("a") + END, f"42{END}"])
    rollout, session = await attempt(ToolLoop(), sampler)
    told, answered = rollout.transcript[2:4]
    assert told["error"] == "malformed call" and "invalid json" in told["content"]
    assert "error" not in answered and session.log.count("a ends") == 2
    assert rollout.transcript[-1]["content"] == "42"


async def test_a_tools_error_is_marked_for_the_environment(scripted_sampler: Make) -> None:
    rollout, _ = await attempt(ToolLoop(), scripted_sampler([call("late") + END, f"42{END}"]))
    assert rollout.transcript[2]["error"] == "timeout"


async def test_the_budget_of_turns_ends_the_attempt(scripted_sampler: Make) -> None:
    rollout, session = await attempt(ToolLoop(max_turns=2), scripted_sampler([call("a") + END] * 2))
    assert len(rollout.calls) == 2
    assert session.log.count("a ends") == 2 and rollout.transcript[-1]["role"] == "tool"


async def test_a_cut_off_reply_runs_nothing(scripted_sampler: Make) -> None:
    rollout, session = await attempt(ToolLoop(), scripted_sampler([call("a") + " and then"]))
    assert rollout.calls[0].finish_reason is FinishReason.LENGTH and session.log == []


async def test_too_many_calls_are_refused_readably(scripted_sampler: Make) -> None:
    rollout, session = await attempt(
        ToolLoop(max_calls_per_reply=2), scripted_sampler([call("a") * 4 + END, f"42{END}"])
    )
    assert session.log.count("a ends") == 2
    assert [message.get("error") for message in rollout.transcript[2:6]] == [None, None, *["too many calls"] * 2]


@pytest.mark.parametrize("parallel", [False, True])
async def test_a_bug_in_a_tool_is_the_systems_failure(scripted_sampler: Make, parallel: bool) -> None:
    agent = ToolLoop(parallel_calls=parallel)
    with pytest.raises(AttemptError, match="broken raised KeyError") as caught:
        await attempt(agent, scripted_sampler([call("slow") + call("broken") + END]))
    assert caught.value.kind is FailureKind.TOOL
    with pytest.raises(AttemptError, match="the sandbox died") as caught:
        await attempt(agent, scripted_sampler([call("slow") + call("lost") + END]))
    assert caught.value.kind is FailureKind.SANDBOX


def test_impossible_settings_are_refused() -> None:
    for make in (lambda: ToolLoop(max_turns=0), lambda: ToolLoop(max_calls_per_reply=-1), lambda: SingleReply(0)):
        with pytest.raises(ConfigError, match="at least 1"):
            make()
