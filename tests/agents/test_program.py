"""An outside program as the agent: it runs unmodified, its tokens are recorded, and its end goes to the scorer."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.agents.attempts import AttemptRunner
from strop.agents.program import Program
from strop.costs import Ledger
from strop.environments import Environment, ProgramResult, Session
from strop.errors import AttemptError, ConfigError
from strop.rollouts import Failed, FailureKind, Rollout, Scored, Task
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

TASK = Task("t", "games", ({"role": "user", "content": "Say it's 'fine'."},), data={"secret": "hunter2"})
#: An agent of somebody else's: standard library only, two turns, leaves a file.
AGENT = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": os.environ["STROP_MODEL"], "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
task = open(os.environ["STROP_TASK"]).read()
messages = json.loads(task)["messages"]
messages.append(ask(messages))
messages += [{"role": "user", "content": "Go on."}]
messages.append(ask(messages))
open("answer.txt", "w").write(messages[-1]["content"])
print("prompt:", sys.argv[1], "secret" in task or "hunter2" in task)
sys.exit(3)
"""


class Games(Environment):
    """Scores an attempt by what its program left."""

    name = "games"

    def __init__(self) -> None:
        self.results: list[ProgramResult] = []

    async def start(self, task: Task, seed: int) -> Session:
        environment = self

        class Kept(Session):
            async def program_ended(self, result: ProgramResult) -> None:
                environment.results.append(result)

        return Kept(self, task, seed)

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        return Scored(1.0 if self.results and b"second" in self.results[-1].files.get("answer.txt", b"") else 0.0)


@pytest.fixture
def attempt(scripted_sampler: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Makes one attempt with a program; returns the rollout, the environment and the sampler."""

    async def run(source: str, script: Any = ("first<|im_end|>", "second<|im_end|>"), **options: Any) -> Any:
        sampler = script if hasattr(script, "sample") else scripted_sampler(script)
        path = tmp_path / "agent.py"
        path.write_text(source)
        command = options.pop("command", f"{sys.executable} {path} {{prompt}}")
        agent = Program(command, where="host", **options)
        environment = Games()
        runner = AttemptRunner(
            environment=environment,
            agent=agent,
            sampler=sampler,
            renderer=renderer_for(sampler.tokenizer, "some/folder"),
            params=SamplingParams(max_tokens=40, temperature=0.5),
            seconds=60,
            ledger=Ledger(),
            clock=time.monotonic,
        )
        return await runner.run("g", 0, TASK, seed=1), environment, sampler

    return run


async def test_a_program_runs_and_is_recorded_and_scored(attempt: Callable[..., Any]) -> None:
    rollout, environment, sampler = await attempt(AGENT, files=("answer.txt", "none.txt"))
    assert rollout.ending == Scored(1.0)
    assert [call.parent for call in rollout.calls] == [None, 0] and rollout.forks == 0
    assert rollout.branch_tokens(1) == [*sampler.prompts[1], *rollout.calls[1].tokens]
    assert {params.temperature for params in sampler.params} == {0.5}
    (result,) = environment.results
    assert (result.exit_code, result.files) == (3, {"answer.txt": b"second"})
    assert result.stdout == "prompt: Say it's 'fine'. False\n"
    assert [message["role"] for message in rollout.transcript] == ["user", "assistant", "user", "assistant", "note"]


async def test_a_program_that_can_not_be_run_is_a_failure_of_the_system(attempt: Callable[..., Any]) -> None:
    rollout, environment, _ = await attempt("", command="no-such-program-anywhere")
    assert isinstance(rollout.ending, Failed) and rollout.ending.kind is FailureKind.AGENT
    assert "no-such-program-anywhere" in rollout.ending.reason and environment.results == []


async def test_a_program_out_of_time_is_stopped_with_its_children_and_scored(attempt: Callable[..., Any]) -> None:
    source = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\nprint('began', flush=True)\ntime.sleep(60)"
    rollout, environment, _ = await attempt(source, seconds=1.5)
    assert rollout.ending == Scored(0.0)
    assert (environment.results[0].exit_code, environment.results[0].stdout) == (None, "began\n")


async def test_a_lost_sampler_fails_the_attempt_and_stops_the_program(
    attempt: Callable[..., Any], scripted_sampler: Callable[..., Any]
) -> None:
    sampler = scripted_sampler([])

    async def lost(*_: Any, **__: Any) -> Any:
        raise AttemptError(FailureKind.SAMPLER, "it broke")

    sampler.sample = lost
    stubborn = AGENT.replace(
        "messages.append(ask(messages))", "try: ask(messages)\nexcept Exception: __import__('time').sleep(60)", 1
    )
    started = time.monotonic()
    rollout, environment, _ = await attempt(stubborn, sampler)
    assert rollout.ending == Failed(FailureKind.SAMPLER, "it broke")
    assert time.monotonic() - started < 30 and environment.results == []


async def test_a_spent_budget_is_the_agents_own_failure(attempt: Callable[..., Any]) -> None:
    rollout, environment, _ = await attempt(AGENT, token_budget=4)
    assert rollout.ending == Scored(0.0) and rollout.sampled_tokens == 4
    assert environment.results[0].exit_code == 1 and "HTTP Error 400" in environment.results[0].stderr


async def test_attempts_at_the_same_time_do_not_mix(
    attempt: Callable[..., Any], scripted_sampler: Callable[..., Any], chat_tokenizer: Any
) -> None:
    def script(number: int, prompt: list[int]) -> str:
        return ("second" if "Go on." in chat_tokenizer.decode(prompt) else "first") + "<|im_end|>"

    sampler = scripted_sampler(script)  # one sampler, hence one gateway for all
    done = await asyncio.gather(*(attempt(AGENT, sampler, files=("answer.txt",)) for _ in range(5)))
    assert len(sampler.prompts) == 10
    for rollout, environment, _ in done:
        assert rollout.ending == Scored(1.0) and [call.parent for call in rollout.calls] == [None, 0]
        assert len(environment.results) == 1


async def test_nothing_of_our_environment_reaches_the_program(
    attempt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    source = (
        "import os; print(sorted(os.environ)); open('link', 'w'); os.remove('link'); os.symlink('/etc/passwd', 'link')"
    )
    _, environment, _ = await attempt(source, files=("link", "../task.json"), variables={"MINE": "1"})
    assert "SECRET_TOKEN" not in environment.results[0].stdout and "MINE" in environment.results[0].stdout
    assert environment.results[0].files == {}


@pytest.mark.parametrize(
    "options", [{"command": " "}, {"command": "x", "seconds": 0}, {"command": "x", "token_budget": 0}]
)
def test_nonsense_is_refused_before_anything_runs(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"agent\."):
        Program(**options)


async def test_without_a_sandbox_the_host_has_to_be_named(scripted_sampler: Callable[..., Any]) -> None:
    from strop.sampling.conversation import Conversation

    sampler = scripted_sampler([])
    conversation = Conversation(
        sampler, renderer_for(sampler.tokenizer, "some/folder"), Rollout("g/0", "t", "games", 0, 1), SamplingParams(9)
    )
    with pytest.raises(ConfigError, match="sandbox"):
        await Program("true").run(TASK, Session(Games(), TASK, 1), conversation)


class Boxed(Games):
    """Gives each attempt a sandbox."""

    def __init__(self, pool: Any) -> None:
        super().__init__()
        self.pool = pool

    async def start(self, task: Task, seed: int) -> Session:
        session = await super().start(task, seed)
        session.sandbox = await self.pool.create()
        return session


async def test_in_a_sandbox_the_gateway_is_all_that_can_be_reached(
    scripted_sampler: Callable[..., Any], chat_tokenizer: Any
) -> None:
    from strop.sandboxes import Image, LocalPool, probe

    if (report := probe()).tier != "namespaces":
        pytest.skip(f"no sandboxes here: {report}")
    outside = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = outside.sockets[0].getsockname()[1]
    agent = f"""{AGENT.removesuffix("sys.exit(3)" + chr(10))}
import socket
try: print(socket.create_connection(("127.0.0.1", {port}), 3))
except OSError as error: print("refused")
"""
    sampler = scripted_sampler(["first<|im_end|>", "second<|im_end|>"])
    async with outside, LocalPool(Image.host()) as pool:
        environment = Boxed(pool)
        runner = AttemptRunner(
            environment=environment,
            agent=Program(f"python3 -c {shlex.quote(agent)} {{prompt}}", files=("answer.txt",), seconds=60),
            sampler=sampler,
            renderer=renderer_for(chat_tokenizer, "some/folder"),
            params=SamplingParams(max_tokens=40),
            seconds=90,
            ledger=Ledger(),
            clock=time.monotonic,
        )
        rollout = await runner.run("g", 0, TASK, seed=1)
    assert rollout.ending == Scored(1.0), environment.results
    assert [call.parent for call in rollout.calls] == [None, 0]
    assert environment.results[0].stdout.splitlines()[-1] == "refused"
    assert environment.results[0].files == {"answer.txt": b"second"}
