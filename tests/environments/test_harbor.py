"""Harbor's task folders: read and refused by key, and run: the tests come after the agent, and leave the reward."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strop.agents import ToolLoop
from strop.agents.attempts import AttemptRunner
from strop.costs import Ledger
from strop.environments.harbor import Harbor
from strop.environments.harbor.folders import find_tasks
from strop.errors import ConfigError
from strop.rollouts import Failed, FailureKind, Rollout, Scored
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams
from strop.sandboxes import probe

SOUND = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'
DOCKERFILE = "FROM base\nRUN mkdir -p /app && echo seed > /app/start.txt\nWORKDIR /app\n"
TESTS = 'if [ "$(cat /app/answer.txt)" = 42 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n'


def write_task(folder: Path, toml: str = SOUND, tests: str = TESTS, dockerfile: str = DOCKERFILE) -> Path:
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Write 42 into answer.txt.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\n" + tests)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\necho 42 > /app/answer.txt\n")
    return folder


def test_a_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "k")
    toml = (
        '[task]\nname = "org/answer"\n[metadata]\ndifficulty = "easy"\n[agent]\ntimeout_sec = 5\nuser = "nobody"\n'
        '[environment]\nmemory = "1G"\ncpus = 2\nallow_internet = false\nworkdir = "/app"\nenv = {A = "${B:-b}c"}\n'
        '[verifier]\nenv = {K = "${A_KEY}"}\n'
    )
    write_task(tmp_path / "one", toml)
    (task,) = find_tasks(str(tmp_path))
    assert (task.name, task.labels, task.memory_mb, task.cpus) == ("org/answer", {"difficulty": "easy"}, 1024, 2)
    assert (task.env, task.verifier_env, task.agent_seconds) == ({"A": "bc"}, {"K": "k"}, 5)
    assert task.agent_user == "nobody" and not task.needs_network and task.workdir == "/app"
    monkeypatch.delenv("A_KEY")
    with pytest.raises(ConfigError, match="A_KEY is not set"):
        find_tasks(str(tmp_path))


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[environment]\ngpus = 1\n", "environment.gpus"),
        ('[environment]\nos = "windows"\n', "environment.os"),
        ('[environment]\nnetwork_mode = "allowlist"\n', "allowlist"),
        ('[verifier]\nenvironment_mode = "separate"\n', "separate"),
        ("[verifier.environment]\ncpus = 1\n", "separate"),
        ('[[steps]]\nname = "a"\n', "steps"),
        ("[environment\n", "task.toml"),
        ('[environment.healthcheck]\ncommand = "true"\n', "healthcheck"),
    ],
)
def test_what_is_not_offered_is_refused_by_its_key(tmp_path: Path, toml: str, said: str) -> None:
    write_task(tmp_path / "one", toml)
    with pytest.raises(ConfigError, match=said):
        find_tasks(str(tmp_path))


def test_a_task_that_may_use_a_network_runs_without_only_if_that_is_meant(tmp_path: Path) -> None:
    write_task(tmp_path / "one", "")
    with pytest.raises(ConfigError, match="network"):
        Harbor(train=str(tmp_path))
    assert [task.id for task in Harbor(train=str(tmp_path), without_network=True).tasks("train")] == ["one"]


def test_registries_list_folders(tmp_path: Path) -> None:
    write_task(tmp_path / "sets" / "one")
    registry = tmp_path / "registry.json"
    local, far = {"name": "a", "path": "sets/one"}, {"name": "b", "path": "b", "git_url": "https://example.org/x"}
    datasets = [
        {"name": "near", "version": "1.0", "description": "", "tasks": [local]},
        {"name": "far", "version": "1.0", "description": "", "tasks": [far]},
    ]
    registry.write_text(json.dumps(datasets))
    assert [task.name for task in find_tasks(f"{registry}#near@1.0")] == ["a"]
    with pytest.raises(ConfigError, match=r"near@1\.0, far@1\.0"):
        find_tasks(f"{registry}#nearly")
    with pytest.raises(ConfigError, match="Clone it"):
        find_tasks(f"{registry}#far")


needs_sandboxes = pytest.mark.skipif(
    probe().tier not in ("namespaces", "rootless"), reason="no namespace sandboxes on this machine"
)


@pytest.fixture
def attempt(scripted_sampler: Callable[..., Any]) -> Callable[..., Any]:
    async def run(folder: Path, commands: list[str], **options: Any) -> Rollout:
        environment = Harbor(train=str(folder), images={"base": "host"}, **options)
        calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands]
        sampler = scripted_sampler([f"<tool_call>{call}</tool_call><|im_end|>" for call in calls] + ["Done.<|im_end|>"])
        runner = AttemptRunner(
            environment=environment,
            agent=ToolLoop(),
            sampler=sampler,
            renderer=renderer_for(sampler.tokenizer, "some/folder"),
            params=SamplingParams(max_tokens=500),
            seconds=120,
            ledger=Ledger(),
            clock=time.monotonic,
        )
        return await runner.run("g", 0, environment.tasks("train")[0], seed=1)

    return run


def results(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.transcript if message["role"] == "tool"]


@needs_sandboxes
async def test_an_attempt_is_scored_by_its_tests(tmp_path: Path, attempt: Callable[..., Any]) -> None:
    folder = write_task(tmp_path / "one")
    seen = "cat start.txt; ls /tests /solution 2>&1; exit 3"
    rollout = await attempt(folder, [seen, "echo 42 > answer.txt"])
    assert rollout.ending == Scored(1.0, {}, solved=True)
    shown, quiet = results(rollout)
    assert shown.startswith("seed") and shown.count("No such file") == 2 and shown.endswith("exit code 3")
    assert quiet == "(no output)"
    assert (await attempt(folder, ["echo 41 > answer.txt"])).ending == Scored(0.0, {}, solved=False)


@needs_sandboxes
async def test_a_reward_that_the_agent_wrote_counts_for_nothing(tmp_path: Path, attempt: Callable[..., Any]) -> None:
    """Stale rewards go, and so does what was left running to write one later."""
    left = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json"
    later = "(while true; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) > /dev/null 2>&1 &"
    rollout = await attempt(write_task(tmp_path / "one"), [left, later])
    assert rollout.ending == Scored(0.0, {}, solved=False)
    silent = await attempt(write_task(tmp_path / "two", tests="true\n"), [left, later])
    assert isinstance(silent.ending, Failed) and silent.ending.kind is FailureKind.SCORER


@needs_sandboxes
@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ('echo \'{"reward": 0.5, "speed": 2}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt', 0.5),
        ("echo '{\"speed\": 2}' > /logs/verifier/reward.json", "reward.json"),
        ("echo '[1]' > /logs/verifier/reward.json", "reward.json"),
        ("echo much > /logs/verifier/reward.txt", "reward.txt"),
        ("echo the tests broke; exit 1", "the tests broke"),
        ("sleep 60", "more than 1 s"),
    ],
)
async def test_rewards_are_read_as_the_format_says(
    tmp_path: Path, attempt: Callable[..., Any], tests: str, expected: float | str
) -> None:
    folder = write_task(tmp_path / "one", SOUND + "[verifier]\ntimeout_sec = 1\n", tests + "\n")
    ending = (await attempt(folder, [])).ending
    if isinstance(expected, str):
        assert isinstance(ending, Failed) and ending.kind is FailureKind.SCORER and expected in ending.reason
    else:
        assert ending == Scored(expected, {"speed": 2.0}, solved=False)


@needs_sandboxes
async def test_the_agents_time_is_kept(tmp_path: Path, attempt: Callable[..., Any]) -> None:
    folder = write_task(tmp_path / "one", SOUND + "[agent]\ntimeout_sec = 1\n")
    rollout = await attempt(folder, ["sleep 30", "echo 42 > answer.txt"])
    first, second = results(rollout)
    assert "stopped after" in first and second == "error: the time for this task is over"
    assert rollout.ending == Scored(0.0, {}, solved=False)


@needs_sandboxes
async def test_its_own_solution_solves_a_task(tmp_path: Path) -> None:
    environment = Harbor(train=str(write_task(tmp_path / "one")), images={"base": "host"})
    session = await environment.start(environment.tasks("train")[0], 1)
    try:
        await session.solve()
        assert (await session.score(Rollout("a", "one", "harbor", 0, 1))).reward == 1.0
    finally:
        await session.close()
