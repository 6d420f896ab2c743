"""The shopkeeper: its faults are the task's, every one can be recovered from, and only the right answer is rewarded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.agents import ToolLoop
from strop.environments.environment import Demonstration
from strop.environments.shopkeeper import Shopkeeper
from strop.environments.shopkeeper.questions import KINDS, draw_question, draw_table
from strop.environments.shopkeeper.tools import TOOLS, Workbench, draw_faults
from strop.errors import ConfigError
from strop.rollouts import Message, Rollout, Scored, Task
from strop.sampling.conversation import Conversation
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

Make = Callable[..., Any]
TABLE = {"apple": {"price": 37, "stock": 20, "weight": 450}, "Oslo": {"distance": 310}}


async def attempt(task: Task, environment: Shopkeeper, sampler: Any) -> tuple[Rollout, Scored]:
    rollout = Rollout(id="g/0", task_id=task.id, environment=environment.name, member=0, seed=7)
    session = await environment.start(task, rollout.seed)
    renderer = renderer_for(sampler.tokenizer, "some/folder")
    params = SamplingParams(max_tokens=300)
    conversation = Conversation(sampler, renderer, rollout, params, tools=task.tools)
    await ToolLoop(max_turns=40).run(task, session, conversation)
    return rollout, await session.score(rollout)


def spoken(messages: tuple[Message, ...]) -> list[str]:
    """What the assistant says in a conversation, as a sampler would say it."""
    texts = []
    for message in messages:
        if message["role"] == "assistant":
            calls = [call["function"] for call in message.get("tool_calls", ())]
            written = "".join(
                f'<tool_call>{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}</tool_call>'
                for call in calls
            )
            texts.append(f"{message['content']}{written}<|im_end|>")
    return texts


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.6])
async def test_the_scripted_policy_solves_every_task_through_the_real_loop(rate: float, scripted_sampler: Make) -> None:
    environment = Shopkeeper(fault_rate=rate)
    met = 0.0
    for demonstration in environment.demonstrations(60, random.Random(3)):
        sampler = scripted_sampler(spoken(demonstration.messages))
        rollout, scored = await attempt(demonstration.task, environment, sampler)
        assert scored.reward == 1.0 and scored.solved, rollout.transcript
        # The tools say in the attempt what they say in the demonstration.
        said = [message["content"] for message in rollout.transcript if message["role"] == "tool"]
        assert said == [message["content"] for message in demonstration.messages if message["role"] == "tool"]
        assert scored.metrics["errors_recovered"] == scored.metrics["errors_met"]
        assert scored.metrics["malformed_calls"] == scored.metrics["rejected_calls"] == 0
        assert scored.metrics["tool_calls"] == len(said) == scored.metrics["turns"] - 1
        met += scored.metrics["errors_met"]
    assert (met > 0) == (rate > 0)


def test_demonstrations_may_meet_more_failures_than_attempts_do() -> None:
    def failures(demonstrations: list[Demonstration]) -> int:
        contents = [
            str(message["content"]) for d in demonstrations for message in d.messages if message["role"] == "tool"
        ]
        return sum(content.startswith("error") for content in contents)

    plain, taught = Shopkeeper(fault_rate=0.1), Shopkeeper(fault_rate=0.1, demonstration_fault_rate=0.5)
    few, many = (each.demonstrations(100, random.Random(1)) for each in (plain, taught))
    assert failures(many) > 2 * failures(few) > 0
    assert taught.tasks("train")[7] == plain.tasks("train")[7] and taught.tasks("test")[7] == plain.tasks("test")[7]
    with pytest.raises(ConfigError, match="demonstration_fault_rate"):
        Shopkeeper(demonstration_fault_rate=0.7)


def test_train_and_test_ask_nothing_in_common() -> None:
    environment = Shopkeeper(train_tasks=3000, test_tasks=500)
    train = {json.dumps(task.data["plan"]) for task in environment.tasks("train")}
    test = {json.dumps(task.data["plan"]) for task in environment.tasks("test")}
    assert len(test) > 300 and not train & test
    other = {json.dumps(task.data["plan"]) for task in Shopkeeper(seed=5, test_tasks=500).tasks("test")}
    assert not train & other  # whatever the seed


def test_tasks_are_the_same_in_every_reading_and_plain_data() -> None:
    for index in (0, 7, -1):
        task, again = (Shopkeeper(seed=2).tasks("train")[index] for _ in range(2))
        assert task == again
        assert json.loads(json.dumps(dict(task.data))) == dict(task.data)
    assert Shopkeeper(fault_rate=0.1).tasks("train")[0].id != Shopkeeper(fault_rate=0.6).tasks("train")[0].id


def test_answers_are_right_by_hand() -> None:
    """Each kind of question, its answer worked out here from the table and the question's own words."""
    formulas: dict[str, Callable[[list[int], dict[str, Any]], float]] = {
        "bill": lambda n, t: n[0] * t["a"]["price"],
        "change": lambda n, t: max(n) - min(n) * t["a"]["price"],
        "total": lambda n, t: n[0] * t["a"]["price"] + n[1] * t["b"]["price"],
        "weight": lambda n, t: n[0] * t["a"]["weight"] / 1000,
        "trips": lambda n, t: n[0] * t["town"]["distance"] * 1000,
        "load": lambda n, t: (n[0] * t["a"]["weight"] + n[1] * t["b"]["weight"]) / 1000,
        "refill": lambda n, t: max(n) - (min(n) - t["a"]["stock"]) * t["a"]["price"],
    }
    seen = set()
    for task in list(Shopkeeper(train_tasks=400).tasks("train")):
        text, kind = task.messages[0]["content"], task.labels["kind"]
        numbers = [int(word) for word in text.replace(",", " ").split() if word.isdigit()]
        goods = sorted((name for name in task.data["table"] if name in text), key=text.index)
        table = {key: task.data["table"][name] for key, name in zip("ab", goods, strict=False)}
        table["town"] = next(facts for facts in task.data["table"].values() if "distance" in facts)
        if kind == "stock value":
            expected: float = table["a"]["price"] * table["a"]["stock"]
        else:
            expected = formulas[kind](numbers, table)
        assert task.data["answer"] == pytest.approx(expected), text
        seen.add(kind)
    assert seen == {*formulas, "stock value"}


@given(seed=st.integers(0, 10_000), steps=st.sampled_from(sorted(KINDS)))
def test_a_plan_has_as_many_calls_as_its_difficulty_says(seed: int, steps: int) -> None:
    rng = random.Random(seed)
    assert len(draw_question(draw_table(rng), steps, rng).plan) == steps


@given(seed=st.integers(0, 10_000), rate=st.floats(0, 0.6))
def test_no_tool_fails_three_times_in_a_row(seed: int, rate: float) -> None:
    for faults in draw_faults(rate, random.Random(seed)).values():
        assert all(None in faults[at : at + 3] for at in range(len(faults) - 2))


def test_the_rate_of_faults_is_the_one_asked_for() -> None:
    drawn = [
        fault for seed in range(400) for faults in draw_faults(0.25, random.Random(seed)).values() for fault in faults
    ]
    # 14,400 draws; a third failure in a row is not allowed, which takes 0.25³-odd off the rate.
    assert sum(fault is not None for fault in drawn) / len(drawn) == pytest.approx(0.24, abs=0.015)


def bench(**faults: list[str | None]) -> Workbench:
    return Workbench(TABLE, faults)


def test_what_the_tools_say() -> None:
    tools = bench()
    said = [
        tools.call("lookup", {"item": "Apples", "field": "price"}),
        tools.call("lookup", {"item": "apple", "field": "stock"}),
        tools.call("lookup", {"item": "Oslo", "field": "distance"}),
        tools.call("calculate", {"expression": "(3 + 4)*2.5 - 1/2"}),
        tools.call("convert", {"value": 1980, "from": "g", "to": "kg"}),
        tools.call("convert", {"value": "3700", "from": "cents", "to": "dollars"}),
    ]
    assert [outcome.content for outcome in said] == [
        "37 dollars",
        "20 in stock",
        "310 km",
        "17",
        "1.98 kg",
        "37 dollars",
    ]
    assert all(outcome.error is None for outcome in said) and tools.rejected == 0


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("buy", {}),
        ("lookup", {}),
        ("lookup", {"item": 3, "field": "price"}),
        ("lookup", {"item": "pear", "field": "price"}),
        ("lookup", {"item": "apple", "field": "distance"}),
        ("calculate", {"expression": "__import__('os').getcwd()"}),
        ("calculate", {"expression": "9**9**9"}),
        ("calculate", {"expression": "1/0"}),
        ("calculate", {"expression": "3 dollars"}),
        ("calculate", {"expression": "(" * 150}),
        ("calculate", {"expression": "9" * 150}),
        ("calculate", {"expression": 12}),
        ("convert", {"value": "many", "from": "g", "to": "kg"}),
        ("convert", {"value": float("nan"), "from": "g", "to": "kg"}),
        ("convert", {"value": 3, "from": "g", "to": "km"}),
        ("convert", {"value": 3, "from": ["g"], "to": {}}),
    ],
)
def test_senseless_calls_are_rejected_readably(name: str, arguments: dict[str, object]) -> None:
    tools = bench(lookup=["busy"], calculate=["busy"], convert=["busy"])
    outcome = tools.call(name, arguments)
    assert outcome.error in ("unknown tool", "bad arguments") and outcome.content.startswith("error: ")
    assert (tools.rejected, tools.met, tools.calls) == (1, 0, {})  # the tool's faults are for calls that make sense


def test_every_member_of_a_group_meets_the_same_faults_at_the_nth_call() -> None:
    faults: dict[str, list[str | None]] = {"lookup": ["timeout", "busy"], "calculate": [None, "malformed"]}
    asks = [("lookup", {"item": "apple", "field": "price"}), ("calculate", {"expression": "1234+1"})]
    orders = [asks * 2, [asks[0]] * 2 + [asks[1]] * 2, [asks[1]] * 2 + [asks[0]] * 2]
    for order in orders:
        tools = bench(**faults)
        met: dict[str, list[str | None]] = {"lookup": [], "calculate": []}
        for name, arguments in order:
            met[name].append(tools.call(name, arguments).error)
        assert met == faults


def test_a_malformed_answer_does_not_give_the_number_away() -> None:
    outcome = bench(calculate=["malformed"]).call("calculate", {"expression": "1234+1"})
    assert outcome.error == "malformed" and "1235" not in outcome.content
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(outcome.content)


def recoveries() -> Iterator[tuple[str, list[tuple[str, dict[str, object]]], int]]:
    price: tuple[str, dict[str, object]] = ("lookup", {"item": "apple", "field": "price"})
    yield "the same call again", [price, price], 1
    yield "converting what came back", [price, ("convert", {"value": 3700, "from": "cents", "to": "dollars"})], 1
    yield "calculating it", [price, ("calculate", {"expression": "3700/100"})], 1
    yield "another fact", [price, ("lookup", {"item": "apple", "field": "stock"})], 0
    yield "another number", [price, ("calculate", {"expression": "3700*3"})], 0
    yield "going on regardless", [price], 0


@pytest.mark.parametrize(
    ("calls", "recovered"), [case[1:] for case in recoveries()], ids=[case[0] for case in recoveries()]
)
def test_an_error_is_recovered_from_when_the_number_is_had(
    calls: list[tuple[str, dict[str, object]]], recovered: int
) -> None:
    tools = bench(lookup=["wrong unit"])
    outcome, *_ = [tools.call(name, arguments) for name, arguments in calls]
    assert (outcome.content, outcome.error) == ("3700 cents", "wrong unit")
    assert (tools.met, tools.recovered) == (1, recovered)


def test_an_error_can_be_recovered_from_once() -> None:
    tools = bench(lookup=["busy", "timeout"])
    for _ in range(4):
        tools.call("lookup", {"item": "apple", "field": "price"})
    assert (tools.met, tools.recovered) == (2, 2)


@pytest.mark.parametrize(
    ("final", "reward"),
    [
        ("It is 111 dollars.", 1.0),
        ("3 apples cost $111.00", 1.0),
        ("111", 1.0),
        ("It is 112 dollars.", 0.0),
        ("Maybe 109, 110, 111, 112 or 113.", 0.0),  # the last number counts, and only it
        ("I don't know.", 0.0),
        ("", 0.0),
        ('111 <tool_call>{"name": "calculate", "arguments": {"expression": "3*37"}}</tool_call>', 0.0),
    ],
)
async def test_only_the_right_final_answer_is_rewarded(final: str, reward: float, scripted_sampler: Make) -> None:
    data = {"answer": 111.0, "table": TABLE, "faults": {}}
    task = Task("t", "shopkeeper", ({"role": "user", "content": "What do 3 apples cost?"},), TOOLS, data)
    sampler = scripted_sampler(lambda number, prompt: f"{final}<|im_end|>")
    environment = Shopkeeper()
    session = await environment.start(task, 0)
    rollout = Rollout(id="g/0", task_id="t", environment="shopkeeper", member=0, seed=7)
    renderer = renderer_for(sampler.tokenizer, "some/folder")
    conversation = Conversation(sampler, renderer, rollout, SamplingParams(max_tokens=200), tools=TOOLS)
    await ToolLoop(max_turns=1).run(task, session, conversation)
    assert (await session.score(rollout)).reward == reward


async def test_a_final_message_that_was_cut_off_is_none(scripted_sampler: Make) -> None:
    data = {"answer": 111.0, "table": TABLE, "faults": {}}
    task = Task("t", "shopkeeper", ({"role": "user", "content": "What do 3 apples cost?"},), TOOLS, data)
    _, scored = await attempt(task, Shopkeeper(), scripted_sampler(["It is 111"]))
    assert scored.reward == 0.0


async def test_malformed_and_senseless_calls_are_counted_apart(scripted_sampler: Make) -> None:
    data = {"answer": 111.0, "table": TABLE, "faults": {}}
    task = Task("t", "shopkeeper", ({"role": "user", "content": "What do 3 apples cost?"},), TOOLS, data)
    script = [
        "<tool_call>{price of apples}</tool_call><|im_end|>",
        '<tool_call>{"name": "price", "arguments": {}}</tool_call><|im_end|>',
        '<tool_call>{"name": "calculate", "arguments": {"expression": "3*37"}}</tool_call><|im_end|>',
        "111<|im_end|>",
    ]
    _, scored = await attempt(task, Shopkeeper(), scripted_sampler(script))
    assert scored.metrics == {
        **{"tool_calls": 1.0, "malformed_calls": 1.0, "rejected_calls": 1.0},
        **{"errors_met": 0.0, "errors_recovered": 0.0, "turns": 4.0},
    }


@pytest.mark.parametrize("options", [{"steps": [5]}, {"steps": []}, {"fault_rate": 0.7}, {"fault_rate": -0.1}])
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"environment.options.{next(iter(options))}"):
        Shopkeeper(**options)
