"""The shopkeeper's tools in sandboxes: the same answers to the byte, refused where there are none, mended where one dies."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from strop.agents import ToolLoop
from strop.environments.environment import Session
from strop.environments.registry import load_environment
from strop.environments.shopkeeper import Shopkeeper
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, Rollout, Task
from strop.sampling.conversation import Conversation
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams
from strop.sandboxes import SandboxesUnavailable, probe


@pytest.fixture(scope="module")
def sandboxed() -> Shopkeeper:
    if probe().tier not in ("namespaces", "rootless"):
        pytest.skip("no sandboxes here")
    return Shopkeeper(tools="sandbox", fault_rate=0.4)


@pytest.fixture
async def sessions(sandboxed: Shopkeeper) -> AsyncIterator[tuple[Session, Session]]:
    """The same attempt twice, with its tools here and in a sandbox."""
    task = sandboxed.tasks("train")[3]
    here, there = await Shopkeeper(fault_rate=0.4).start(task, 1), await sandboxed.start(task, 1)
    yield here, there
    await here.close()
    await there.close()


def calls(rng: random.Random, table: dict[str, Any]) -> Iterator[tuple[str, dict[str, object]]]:
    """Calls as a model writes them: right ones, wrong ones, and some that are hardly calls."""
    odd = [None, True, 3, -0.5, 1e300, float("nan"), "", "x" * 300, "ü'\"\\\n\0", "\ud800", [1, [2]], {"a": {}}]
    names = [*table, "Apples", "PEARS", "Oslo", *odd]
    expressions = [
        "3*37", "(3 + 4)*2.5 - 1/2", "7/3", "1e14*5", "1e15", "0.1+0.2", "1/0", "9**9", "__import__('os')", "(" * 150,
        "-" * 190 + "1", "9" * 150, "1_000*2", "0x10", "1j", "3 dollars", "\x00", "٣*2", *odd,
    ]  # fmt: skip
    units = ["g", "kg", "km", "m", "cents", "dollars", *odd]
    for _ in range(120):
        kind = rng.choice(["lookup", "calculate", "convert", "buy"])
        yield kind, {
            "item": rng.choice(names), "field": rng.choice(["price", "stock", "weight", "distance", *odd]),
            "expression": rng.choice(expressions), "value": rng.choice([1980, "3700", 0.1, 1e14, 12345.678901, *odd]),
            "from": rng.choice(units), "to": rng.choice(units),
        }  # fmt: skip
    yield "lookup", {}


async def test_answers_are_the_same_to_the_byte(sessions: tuple[Session, Session]) -> None:
    here, there = sessions
    for name, arguments in calls(random.Random(5), here.task.data["table"]):
        expected, got = await here.call(name, arguments), await there.call(name, arguments)
        assert expected == got and repr(expected) == repr(got), (name, arguments)
    assert asdict(here.workbench) == asdict(there.workbench)  # type: ignore[attr-defined]


async def test_a_conversation_is_the_same_token_by_token(
    sandboxed: Shopkeeper, scripted_sampler: Callable[..., Any]
) -> None:
    for demonstration in Shopkeeper(fault_rate=0.4).demonstrations(4, random.Random(3)):
        script = [
            f'<tool_call>{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}</tool_call><|im_end|>'
            for message in demonstration.messages
            for call in [part["function"] for part in message.get("tool_calls", ())]
        ]
        final = str(demonstration.messages[-1]["content"])
        rollouts = [
            await attempt(environment, demonstration.task, scripted_sampler([*script, f"{final}<|im_end|>"]))
            for environment in (Shopkeeper(fault_rate=0.4), sandboxed)
        ]
        seen = [json.dumps([r.transcript, [[c.prompt, c.tokens] for c in r.calls]], default=list) for r in rollouts]
        assert seen[0] == seen[1] and len(rollouts[0].calls) > 2


async def attempt(environment: Shopkeeper, task: Task, sampler: Any) -> Rollout:
    rollout = Rollout(id="g/0", task_id=task.id, environment=environment.name, member=0, seed=7)
    session = await environment.start(task, rollout.seed)
    try:
        params = SamplingParams(max_tokens=300)
        renderer = renderer_for(sampler.tokenizer, "some/folder")
        await ToolLoop(max_turns=40).run(
            task, session, Conversation(sampler, renderer, rollout, params, tools=task.tools)
        )
        assert (await session.score(rollout)).solved
    finally:
        await session.close()
    return rollout


async def test_attempts_share_interpreters_and_the_loop_turns_meanwhile(sandboxed: Shopkeeper) -> None:
    tasks = sandboxed.tasks("train")
    opened = [await sandboxed.start(tasks[number], number) for number in range(12)]
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(turn())
    said = await asyncio.gather(*(s.call("convert", {"value": 9, "from": "g", "to": "m"}) for s in opened * 3))
    ticker.cancel()
    assert {outcome.content for outcome in said} == {
        "error: can convert dollars and cents, g and kg, km and m"
    } and turns > len(said)
    for session in opened:
        await session.close()


async def test_a_sandbox_that_dies_is_a_failure_and_the_next_call_finds_another(
    sandboxed: Shopkeeper, sessions: tuple[Session, Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, there = sessions
    await there.call("buy", {})
    tools, pool = sandboxed.sandboxed, there._pool  # type: ignore[attr-defined]
    assert tools is not None
    for sandbox, _ in tools._interpreters[pool].idle:
        await sandbox.destroy()
    with pytest.raises(AttemptError) as failed:
        await there.call("buy", {})
    assert failed.value.kind is FailureKind.SANDBOX
    assert (await there.call("buy", {})).error == "unknown tool"


def test_where_there_are_none_it_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def no(*arguments: object) -> None:
        raise SandboxesUnavailable("no control group can be made")

    monkeypatch.setattr("strop.sandboxes.pool.LocalPool.start", no)
    with pytest.raises(ConfigError, match=r"environment\.options\.tools.*no control group.*strop doctor"):
        load_environment("shopkeeper", {"tools": "sandbox"})
    with pytest.raises(ConfigError, match=r"environment\.options\.tools"):
        load_environment("shopkeeper", {"tools": "elsewhere"})
    chosen = load_environment("shopkeeper", {"tools": "auto"})
    assert chosen.sandboxed is None  # type: ignore[attr-defined]
    assert "no control group can be made" in chosen.notices[0] and "strop doctor" in chosen.notices[0]


def test_auto_takes_a_sandbox_where_there_is_one() -> None:
    chosen = load_environment("shopkeeper", {"tools": "auto"})
    assert chosen.sandboxed is not None and not chosen.notices  # type: ignore[attr-defined]
