"""NeMo Gym's contract from both sides: a server that answers as theirs were recorded to, and ours as theirs would be.

The recorded server and its rows follow nemo-gym 0.7.0's example_session_state_mgmt and its base classes; the real ones
are run by `checks/bridges.py`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from strop.agents import ToolLoop
from strop.agents.attempts import AttemptRunner
from strop.costs import Ledger
from strop.environments import Environment, Session, ToolOutcome, load_environment
from strop.environments.nemo_gym import NemoGym, resources_server, row_of
from strop.environments.nemo_gym.items import items_of, messages_of
from strop.errors import AttemptError, ConfigError, DataError
from strop.rollouts import Failed, FailureKind, Rollout, Scored, Task
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "add 3 then get the count"}],
        "tools": [
            {"type": "function", "name": "increment_counter", "description": "", "strict": True, "parameters": COUNT},
            {"type": "function", "name": "get_counter_value", "description": "", "strict": True, "parameters": {}},
        ],
        "temperature": 0.7,
        "metadata": {"a": "b"},
    },
    "expected_count": 8,
    "initial_count": 5,
    "agent_ref": {"type": "responses_api_agents", "name": "counter_agent"},
}


class Recorded:
    """Their example of a stateful server, as it answers on the wire; `wrong` changes what /verify says."""

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.bodies: list[dict[str, Any]] = []
        self.wrong: dict[str, Any] = {}
        self.status = 200
        routes = [
            Route("/seed_session", self.seed, methods=["POST"]),
            Route("/increment_counter", self.increment, methods=["POST"]),
            Route("/get_counter_value", self.value, methods=["POST"]),
            Route("/verify", self.verify, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def seed(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        session = uuid.uuid4().hex
        self.counters[session] = body["initial_count"]
        answer = JSONResponse({})
        answer.set_cookie("session", session)
        return answer

    async def increment(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(body.get("count"), int):
            return JSONResponse({"detail": "count: Field required"}, status_code=422)
        self.counters[request.cookies["session"]] += body["count"]
        return JSONResponse({"success": True})

    async def value(self, request: Request) -> Response:
        return JSONResponse({"count": self.counters[request.cookies["session"]]})

    async def verify(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        right = self.counters[request.cookies["session"]] == body["expected_count"]
        answer = {**body, "reward": float(right), "mask_sample": False, "failure_kind": None, "steps": 2, **self.wrong}
        return JSONResponse(answer, status_code=self.status)


@pytest.fixture
def server() -> Recorded:
    return Recorded()


@pytest.fixture
def environment(server: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NemoGym:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n\n" + json.dumps({**ROW, "task_id": "other"}) + "\n")
    made = NemoGym(train=str(rows), servers={"counter_agent": "http://gym/"})
    monkeypatch.setattr(made, "connections", lambda: httpx.ASGITransport(server.app))
    return made


@pytest.fixture
def attempt(scripted_sampler: Callable[..., Any]) -> Callable[..., Any]:
    async def run(environment: Environment, task: Task, replies: list[str]) -> Rollout:
        sampler = scripted_sampler([f"{reply}<|im_end|>" for reply in replies])
        runner = AttemptRunner(
            environment=environment,
            agent=ToolLoop(),
            sampler=sampler,
            renderer=renderer_for(sampler.tokenizer, "some/folder"),
            params=SamplingParams(max_tokens=300),
            seconds=30,
            ledger=Ledger(),
            clock=time.monotonic,
        )
        return await runner.run("g", 2, task, seed=1)

    return run


def call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_an_episode_over_their_contract(
    server: Recorded, environment: NemoGym, attempt: Callable[..., Any]
) -> None:
    first, other = environment.tasks("train")
    assert (first.id, other.id) == ("train-0", "other") and first.messages[0]["content"] == "add 3 then get the count"
    replies = [call("increment_counter", {}), call("increment_counter", {"count": 3}), call("verify", {}), "8"]
    rollout = await attempt(environment, first, replies)
    assert rollout.ending == Scored(1.0, {"steps": 2.0}, solved=True)
    seeded, verified = server.bodies
    assert seeded == {**ROW, "_ng_task_index": 0}  # the whole row, as it is
    assert verified["_ng_rollout_index"] == 2 and verified["expected_count"] == 8
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["function_call", "function_call_output"] * 3 + ["message"]
    results = [item["output"] for item in verified["response"]["output"] if item["type"] == "function_call_output"]
    assert results[0] == '{"detail":"count: Field required"}' and results[1] == '{"success":true}'
    assert "no tool named 'verify'" in results[2]  # the model can't reach the verifier
    assert [message.get("error") for message in rollout.transcript if message["role"] == "tool"] == [
        "http 422",
        None,
        "unknown tool",
    ]


@pytest.mark.parametrize(
    ("wrong", "status", "kind", "reason"),
    [
        (
            {"mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "no judge"},
            200,
            "scorer",
            "no judge",
        ),
        ({"mask_sample": True, "failure_kind": "provider_oom_killed"}, 200, "sandbox", "provider_oom_killed"),
        ({"mask_sample": True, "failure_kind": "agent_timeout"}, 200, "timeout", "agent_timeout"),
        ({"mask_sample": True, "failure_kind": "counter:gone"}, 200, "environment", "counter:gone"),
        ({"instance_config": {"mask_sample": True}, "_ng_failure_class": "judge_failed"}, 200, "scorer", "judge"),
        ({"reward": None}, 200, "scorer", "null"),
        ({}, 500, "scorer", "500"),
    ],
)
async def test_what_is_masked_or_broken_is_a_failure_and_no_reward(
    server: Recorded,
    environment: NemoGym,
    attempt: Callable[..., Any],
    wrong: dict[str, Any],
    status: int,
    kind: str,
    reason: str,
) -> None:
    server.wrong, server.status = wrong, status
    ending = (await attempt(environment, environment.tasks("train")[0], ["8"])).ending
    assert isinstance(ending, Failed) and ending.kind is FailureKind(kind) and reason in ending.reason


async def test_parts_of_a_reward_are_metrics(
    server: Recorded, environment: NemoGym, attempt: Callable[..., Any]
) -> None:
    server.wrong = {"reward": 1.5, "reward_components": {"right": 1.0, "format": 0.5}, "format": 0.5}
    ending = (await attempt(environment, environment.tasks("train")[0], ["8"])).ending
    assert ending.reward == 1.5 and ending.solved
    assert ending.metrics == {"steps": 2.0, "format": 0.5, "reward_right": 1.0, "reward_format": 0.5}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input": "x"}, 'no object "responses_create_params"'),
        ({"responses_create_params": {"input": []}}, "input is empty"),
        ({"responses_create_params": {"input": "x", "tools": [{"type": "web_search"}]}}, "web_search"),
        ({"responses_create_params": {"input": "x", "tool_choice": "required"}}, "tool_choice"),
        ({"responses_create_params": {"input": "x", "previous_response_id": "r"}}, "previous_response_id"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
            "input_image",
        ),
    ],
)
def test_rows_that_can_not_be_attempted_are_refused_by_line(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"responses_create_params": {"input": "x"}}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"line 2: .*{said}"):
        NemoGym(train=str(path), url="http://gym")


def test_every_row_needs_a_server(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    with pytest.raises(ConfigError, match="counter_agent"):
        NemoGym(train=str(path), servers={"another": "http://gym"})
    with pytest.raises(ConfigError, match="url"):
        NemoGym(train=str(path))


def test_items_and_messages_say_the_same() -> None:
    messages = [
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}},
            {"id": "c2", "type": "function", "function": {"name": "b", "arguments": "{}"}},
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    assert messages_of(items_of(messages, "x")) == messages
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    assert messages_of(parts) == [{"role": "user", "content": "ab"}]


# ---- our environments, served ----


class Faulty(Environment):
    """One tool that errs as it means to, one that breaks, and a scorer that can break as well."""

    name = "faulty"
    closed = 0

    def tasks(self, split: str) -> list[Task]:
        parameters = {"type": "object", "properties": {}}
        tools = tuple(
            {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
            for name in ("errs", "breaks")
        )
        user = ({"role": "user", "content": "Go."},)
        return [
            Task(f"t{n}", self.name, user, tools, data={"secret": "s3cret"}, labels={"n": str(n)}) for n in range(3)
        ]

    async def start(self, task: Task, seed: int) -> Session:
        environment = self

        class Own(Session):
            async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
                if name == "errs":
                    return ToolOutcome("busy", error="timeout")
                raise AttemptError(FailureKind.SANDBOX, "the sandbox died")

            async def score(self, rollout: Rollout) -> Scored:
                said = [message for message in rollout.transcript if message["role"] == "assistant"]
                if said[-1]["content"] == "raise":
                    raise ValueError("no file")
                met = sum("error" in message for message in rollout.transcript)
                return Scored(float(said[-1]["content"] == "yes"), {"errors_met": met}, solved=True)

            async def close(self) -> None:
                environment.closed += 1

        return Own(self, task, seed)


@pytest.fixture
async def client() -> AsyncIterator[tuple[httpx.AsyncClient, Faulty]]:
    environment = Faulty()
    app = resources_server(environment)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://ours") as http:
        yield http, environment


def response(*said: str | tuple[str, str]) -> dict[str, Any]:
    """A response whose output is calls with their results, and texts."""
    output: list[dict[str, Any]] = []
    for number, part in enumerate(said):
        if isinstance(part, str):
            text = [{"type": "output_text", "text": part, "annotations": []}]
            output.append({"type": "message", "role": "assistant", "id": f"m{number}", "content": text})
        else:
            output.append({"type": "function_call", "name": part[0], "arguments": "{}", "call_id": f"c{number}"})
            output.append({"type": "function_call_output", "call_id": f"c{number}", "output": part[1]})
    return {"id": "r", "object": "response", "output": output}


def test_a_row_holds_what_the_model_reads_and_nothing_else() -> None:
    row = row_of(Faulty().tasks("train")[1], "train", "faulty_agent")
    assert "s3cret" not in json.dumps(row)
    assert row["responses_create_params"]["input"] == [{"type": "message", "role": "user", "content": "Go."}]
    assert [tool["name"] for tool in row["responses_create_params"]["tools"]] == ["errs", "breaks"]
    assert row["task_id"] == "t1" and row["agent_ref"]["name"] == "faulty_agent"


async def test_ours_under_their_contract(client: tuple[httpx.AsyncClient, Faulty]) -> None:
    http, environment = client
    row = row_of(environment.tasks("train")[1], "train")
    assert (await http.post("/seed_session", json=row)).json() == {}
    assert (await http.post("/errs", json={})).text == "busy"
    body = {**row, "response": response(("errs", "busy"), "yes")}
    verified = (await http.post("/verify", json=body)).json()
    assert verified["reward"] == 1.0 and verified["errors_met"] == 1.0 and verified["solved"] == 1.0
    assert verified["mask_sample"] is False and verified["response"] == body["response"]
    again = {**body, "response": response("no")}
    assert (await http.post("/verify", json=again)).json()["reward"] == 1.0  # a retry is no second attempt
    await http.post("/close_session", json={})
    assert environment.closed == 1
    lost = (await http.post("/verify", json=body)).json()
    assert lost["mask_sample"] is True and lost["failure_kind"] == "session_lost"


@pytest.mark.parametrize(
    ("tool", "said", "kind", "reason"),
    [("breaks", "yes", "provider_unavailable", "sandbox died"), (None, "raise", "verifier_error", "no file")],
)
async def test_what_breaks_here_is_masked_there(
    client: tuple[httpx.AsyncClient, Faulty], tool: str | None, said: str, kind: str, reason: str
) -> None:
    http, environment = client
    row = row_of(environment.tasks("test")[0], "test")
    await http.post("/seed_session", json=row)
    if tool:
        assert (await http.post(f"/{tool}", json={})).status_code == 500
    verified = (await http.post("/verify", json={**row, "response": response(said)})).json()
    assert verified["mask_sample"] is True and verified["failure_kind"] == kind
    assert verified["reward"] == 0.0 and reason in verified["failure_reason"]


async def test_an_environment_server_assigns_the_id(client: tuple[httpx.AsyncClient, Faulty]) -> None:
    http, environment = client
    row = row_of(environment.tasks("train")[0], "train")
    asked = {"resources_session_id": "abc", "episode_id": "e", "task_id": "t0", "task_data": row}
    for _ in range(2):  # asked again it is the same session
        assert (await http.post("/seed_session", json=asked)).json() == {"resources_session_id": "abc"}
    http.cookies.clear()
    await http.post("/close_session", json={"resources_session_id": "abc", "episode_id": "e"})
    assert environment.closed == 1
    assert (await http.post("/seed_session", json={**row, "task_id": "none"})).status_code == 404


async def test_masked_samples_are_in_no_mean(client: tuple[httpx.AsyncClient, Faulty]) -> None:
    http, _ = client
    samples = [
        {"_ng_task_index": 0, "reward": 1.0, "turns": 2},
        {"_ng_task_index": 0, "reward": 0.0, "turns": 4},
        {"_ng_task_index": 1, "reward": 0.0, "mask_sample": True},
    ]
    found = (await http.post("/aggregate_metrics", json={"verify_responses": samples})).json()
    assert found["agent_metrics"] == {"mean/reward": 0.5, "mean/turns": 3.0}
    assert found["group_level_metrics"] == [{"_ng_task_index": 0, "mean/reward": 0.5, "mean/turns": 3.0}]


async def test_both_sides_together(
    attempt: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt through client and server ends as the same attempt in this process does."""
    shop = load_environment("shopkeeper", {"fault_rate": 0.6, "train_tasks": 5})
    tasks = list(shop.tasks("train"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row_of(task, "train")) + "\n" for task in tasks))
    away = NemoGym(train=str(rows), url="http://ours")
    transport = httpx.ASGITransport(resources_server(shop))
    monkeypatch.setattr(away, "connections", lambda: transport)
    for here, there in zip(tasks, away.tasks("train"), strict=True):
        name = here.tools[0]["function"]["name"]
        replies = [call(name, {"item": "pears"})] * 3 + [f"The answer is {here.data['answer']}"]
        near, far = await attempt(shop, here, replies), await attempt(away, there, replies)
        assert isinstance(near.ending, Scored)
        assert far.ending.reward == near.ending.reward and far.ending.solved == near.ending.solved
        for name, value in near.ending.metrics.items():
            assert name in ("malformed_calls", "turns") or far.ending.metrics[name] == value
