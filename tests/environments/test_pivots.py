"""Turns cut from trajectories: what is cut, which actions count, and that nothing of what is asked for is shown."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from strop.environments import load_environment
from strop.environments.drawn import is_held_out
from strop.environments.pivots import Pivots, action_of
from strop.errors import ConfigError
from strop.rollouts import Failed, FailureKind, Group, Message, Rollout, Scored, Task
from strop.runs.events import LineLog
from strop.runs.store import write_groups

TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "add"))


def call(name: str, arguments: object, **more: object) -> Message:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": written}, **more}


def says(content: str = "", *calls: Message) -> Message:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def result(content: str, **more: object) -> Message:
    return {"role": "tool", "tool_call_id": "c1", "name": "look", "content": content, **more}


def attempt(group: str, member: int, asked: Message, turns: list[Message], ending, forks: int = 0) -> Rollout:
    task = Task(group, "shop", (asked,), TOOLS)
    return Rollout(
        f"{group}/{member}", task.id, "shop", member, 0, transcript=[asked, *turns], ending=ending, forks=forks
    )


def write_run(path: Path) -> Path:
    """Groups over names that fall into both splits; each has attempts that are good, bad, failed and rewritten."""
    (path / "rollouts").mkdir(parents=True)
    groups = []
    for number in range(24):
        asked = {"role": "user", "content": f"How much is item {number}?"}
        good = [says("", call("look", {"item": number})), result(f"price {number}"), says("", call("add", {"a": 1})),
                result("1", error="timeout"), says(f"It is {number}.")]  # fmt: skip
        other = [says("", call("look", {"item": f"{number}"})), result("none"), says("Sorry.")]
        rollouts = [
            attempt(f"task-{number}", 0, asked, good, Scored(1.0, solved=True)),
            attempt(f"task-{number}", 1, asked, other, Scored(0.6, solved=True)),
            attempt(f"task-{number}", 2, asked, [says("", call("add", {"a": 9})), result("x")], Scored(0.0, solved=False)),
            attempt(f"task-{number}", 3, asked, good, Failed(FailureKind.TOOL, "broken")),
            attempt(f"task-{number}", 4, asked, [says("", call("look", "{oops", problem="invalid_json"))],
                    Scored(1.0, solved=True)),
            attempt(f"task-{number}", 5, asked, [says("", call("add", {"b": 2}))], Scored(1.0, solved=True), forks=1),
        ]  # fmt: skip
        groups.append((Group(f"task-{number}", Task(f"task-{number}", "shop", (asked,), TOOLS), rollouts), "trained"))
    write_groups(path / "rollouts" / "rl-000000.parquet", groups, {})
    write_groups(path / "rollouts" / "evaluation-start.parquet", [(groups[0][0], "evaluation")], {})
    log = LineLog(path / "events.jsonl")
    log.append({"time": 0.0, "clock": 0.0, "kind": "run", "what": "started"})
    log.close()
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("pivots") / "run")


def test_turns_with_calls_of_good_attempts_are_cut_and_those_that_read_the_same_are_one_task(run):
    environment = Pivots(run=str(run))
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    assert len(tasks) == 2 * 24 and len({task.id for task in tasks}) == 48
    first = [task for task in tasks if len(task.messages) == 1]
    for task in first:
        number = int(task.messages[0]["content"].split()[-1].rstrip("?"))
        accepted = [action["calls"][0]["arguments"] for action in task.data["accepted"]]
        assert accepted == [{"item": number}, {"item": str(number)}] and task.labels == {"action": "look"}
    later = [task for task in tasks if len(task.messages) == 3]
    assert len(later) == 24 and all(task.messages[-1]["role"] == "tool" for task in later)
    assert all(task.tools == TOOLS for task in tasks)
    assert "accepted" not in json.dumps([list(task.messages) for task in tasks])


def test_all_turns_of_a_task_are_in_one_split(run):
    environment = Pivots(run=str(run))
    for split in ("train", "test"):
        for task in environment.tasks(split):
            assert is_held_out(task.id.partition("/")[0]) == (split == "test")
    assert environment.tasks("test"), "no task was held out: choose other names"


@pytest.mark.parametrize(
    ("turn", "solved", "right_tool"),
    [
        (says("", call("look", {"item": 0})), True, True),
        (says("thinking aloud", call("look", '{"item":0.0}')), True, True),  # equal as JSON numbers
        (says("", call("look", {"item": "0"})), True, True),  # the other good attempt's way
        (says("", call("look", {"item": 1})), False, True),
        (says("", call("look", {"item": 0, "more": 1})), False, True),
        (says("", call("add", {"item": 0})), False, False),
        (says("", call("look", {"item": 0}), call("look", {"item": 0})), False, False),
        (says('{"item": 0}'), False, False),
        (says("", call("look", '{"item": 0}', problem="unclosed_block")), False, False),
    ],
)
async def test_only_an_action_that_was_taken_here_counts(run, turn, solved, right_tool):
    environment = Pivots(run=str(run))
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    task = next(task for task in tasks if task.messages[-1]["content"] == "How much is item 0?")
    scored = await environment.score(task, Rollout("r/0", task.id, "pivots", 0, 0, transcript=[*task.messages, turn]))
    assert (scored.reward, scored.solved) == (float(solved), solved)
    assert scored.metrics["right_tool"] == float(right_tool)


async def test_what_is_asked_for_decides_what_is_cut(run):
    def cut(**options):
        environment = load_environment("pivots", {"run": str(run), **options})
        return [task for split in ("train", "test") for task in environment.tasks(split)]

    assert len(cut(reward_above=0.7)) == 2 * 24
    assert all(len(task.data["accepted"]) == 1 for task in cut(reward_above=0.7))
    texts = [task for task in cut(texts=True) if not task.data["accepted"][0]["calls"]]
    assert {task.labels["action"] for task in texts} == {"reply"} and len(texts) == 48
    assert max(len(task.messages) for task in cut(longest=1)) == 1
    right_tool = Pivots(run=str(run), arguments="any")
    task = next(task for task in right_tool.tasks("train") if len(task.messages) == 1)
    turn = says("", call("look", {"anything": True}))
    assert (await right_tool.score(task, Rollout("r/0", task.id, "", 0, 0, transcript=[*task.messages, turn]))).solved
    reply = next(task for task in Pivots(run=str(run), texts=True).tasks("train") if len(task.messages) == 5)
    said = says(f"  it IS {reply.messages[0]['content'].split()[-1].rstrip('?')}.")
    scored = await right_tool.score(reply, Rollout("r/0", reply.id, "", 0, 0, transcript=[*reply.messages, said]))
    assert scored.solved


def test_sources_that_hold_nothing_are_refused(run, tmp_path):
    with pytest.raises(ConfigError, match=r"Give run or path"):
        Pivots()
    with pytest.raises(ConfigError, match=r"no turn to train on"):
        Pivots(run=str(run), reward_above=5.0)
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "owner", "content": "x"}]}\n')
    with pytest.raises(ConfigError, match=r"bad.jsonl row 1"):
        Pivots(path=str(tmp_path / "bad.jsonl"))


def test_turns_are_cut_from_files_of_conversations_too(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": f"Item {n}?"}, says("", call("look", {"item": n})), result(str(n)),
                      says(f"{n}")], "tools": list(TOOLS)}
        for n in range(20)
    ]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = Pivots(path=str(tmp_path / "rows.jsonl"))
    tasks = [*environment.tasks("train"), *environment.tasks("test")]
    assert len(tasks) == 20 and all(len(task.messages) == 1 and task.tools == TOOLS for task in tasks)
    for demo in environment.demonstrations(5, random.Random(0)):
        assert action_of(demo.messages[-1]) == demo.task.data["accepted"][0]
