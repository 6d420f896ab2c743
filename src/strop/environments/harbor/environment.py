"""Harbor's tasks: the agent works in a sandbox of the task's image, then its tests come and leave a reward.

Tests and solution are never where the agent works while it works: as the format wants it, they are put into the same
sandbox after everything that the agent started has been ended.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from strop.environments.environment import Environment, ProgramResult, Session, ToolOutcome
from strop.environments.harbor.folders import TaskFolder, find_tasks
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, Rollout, Scored, Task
from strop.sandboxes import FileProblem, Image, Limits, Sandbox
from strop.sandboxes.dockerfile import build
from strop.sandboxes.sandbox import MIB
from strop.sandboxes.shared import SharedPool

_BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command and read what it prints. Files stay from call to call, directories don't.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_RUN_TESTS = "(/tests/test.sh) > /logs/verifier/test-stdout.txt 2>&1"
_LONGEST = 8000  # characters of output that a tool call shows


class Harbor(Environment):
    """Tasks in Harbor's format.

    Solved is a reward of 1 or more; other numbers that the tests leave in reward.json are metrics.

    Args:
        train, test: a task's folder, a folder of such folders, or "registry.json#dataset[@version]".
        images: for a name that a Dockerfile or `docker_image` uses: "host" (this machine's own programs), a folder or
            archive of a root file system, or an OCI layout. Other names are pulled from their registry.
        without_network: run tasks that may use a network (Harbor's default) without one; off, they are refused.
        tools: give the agent a `bash` tool; off for agents that are programs and bring their own.
        seconds: that one tool call may take.
        allow: folders of the host that the image "host" shows, read-only.
        name: of this environment in records.
    """

    name = "harbor"

    def __init__(
        self,
        train: str | None = None,
        test: str | None = None,
        images: dict[str, str] | None = None,
        without_network: bool = False,
        tools: bool = True,
        seconds: float = 60.0,
        allow: Sequence[str] = ("/usr",),
        name: str = "harbor",
    ) -> None:
        if train is None and test is None:
            raise ConfigError("environment.options.train", "no folder of tasks was named", "Name train, test, or both")
        self.name, self.tools, self.seconds = name, tools, seconds
        self._images, self._allow = dict(images or {}), tuple(allow)
        self.folders: dict[str, TaskFolder] = {}
        self._splits: dict[str, list[Task]] = {"train": [], "test": []}
        for split, place in (("train", train), ("test", test)):
            for folder in find_tasks(place) if place is not None else ():
                if folder.needs_network and not without_network:
                    raise ConfigError(
                        f"{folder.path / 'task.toml'}: environment.network_mode",
                        "the task may use a network, and sandboxes here have none",
                        'Set it to "no-network", or the option without_network = true if the tasks can do without',
                    )
                if folder.name in self.folders:
                    raise ConfigError("environment.options", f"two tasks are named {folder.name!r}", "One of the two")
                self.folders[folder.name] = folder
                self._splits[split].append(self._task(folder))
        self._pools: dict[str, SharedPool] = {}

    def _task(self, folder: TaskFolder) -> Task:
        return Task(
            id=folder.name,
            environment=self.name,
            messages=({"role": "user", "content": folder.instruction},),
            tools=(_BASH,) if self.tools else (),
            labels=folder.labels,
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        if split not in self._splits:
            raise ConfigError("split", f"there is no split {split!r}", 'One of "train" and "test"')
        return self._splits[split]

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment.start`. The first attempt at a task builds its image; the steps are cached on disk."""
        folder = self.folders[task.id]
        session = HarborSession(self, task, seed, folder, self._pool(folder))
        await session.open()
        return session

    def _pool(self, folder: TaskFolder) -> SharedPool:
        if folder.name not in self._pools:
            limits = Limits(
                memory=(folder.memory_mb or 2048) * MIB,
                disk=(folder.storage_mb or 2048) * MIB,
                cpus=folder.cpus or 1.0,
                processes=1024,
                inodes=1 << 18,
                timeout=self.seconds,
            )
            self._pools[folder.name] = SharedPool(lambda: self._image(folder), limits=limits)
        return self._pools[folder.name]

    def _image(self, folder: TaskFolder) -> Image:
        """The task's image. Blocks while it is built; runs in a thread of its own."""
        if folder.image is not None:
            return self._find(folder.image)
        return asyncio.run(build(str(folder.path / "environment" / "Dockerfile"), self._find))

    def _find(self, name: str) -> Image:
        place = self._images.get(name)
        if place is None:
            return Image.from_registry(name)
        if place == "host":
            return Image.host(self._allow)
        path = Path(place)
        if (path / "oci-layout").is_file():
            return Image.from_oci(path)
        return Image.from_folder(path) if path.is_dir() else Image.from_tar(path)


class HarborSession(Session):
    """One attempt: its sandbox, and the tests that come in the end."""

    environment: Harbor

    def __init__(self, environment: Harbor, task: Task, seed: int, folder: TaskFolder, pool: SharedPool) -> None:
        super().__init__(environment, task, seed)
        self._folder, self._pool = folder, pool
        self._begun = 0.0
        self._place: Sandbox | None = None
        self._exit_code: int | None = None

    async def open(self) -> None:
        """Make the sandbox."""
        pool = await self._pool.acquire()
        try:
            self._place = self.sandbox = await pool.create(env=self._folder.env, labels={"task": self.task.id})
            made = await self._sandbox.exec("mkdir -p /logs/agent /logs/verifier /logs/artifacts && chmod 777 /logs/*")
            if not made.ok:
                raise AttemptError(FailureKind.SANDBOX, f"/logs can't be made: {made.error_text[-200:]}")
        except BaseException:
            await self._pool.release()
            self._place = self.sandbox = None
            raise
        self._begun = time.monotonic()

    @property
    def _sandbox(self) -> Sandbox:
        assert self._place is not None
        return self._place

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        """Run a command, within what is left of the agent's time."""
        if name != "bash" or not self.environment.tools:
            return await super().call(name, arguments)
        command = arguments.get("command")
        if not isinstance(command, str) or "\0" in command:
            return ToolOutcome('error: give {"command": "…"}', error="wrong arguments")
        left = self.environment.seconds
        if self._folder.agent_seconds is not None:
            left = min(left, self._folder.agent_seconds - (time.monotonic() - self._begun))
        if left <= 0:
            return ToolOutcome("error: the time for this task is over", error="out of time")
        result = await self._sandbox.exec(command, cwd=self._folder.workdir, user=self._folder.agent_user, timeout=left)
        said = (result.text + result.error_text).strip()
        if len(said) > _LONGEST:
            said = f"{said[: _LONGEST // 2]}\n[{len(said) - _LONGEST} characters left out]\n{said[-_LONGEST // 2 :]}"
        if result.timed_out:
            return ToolOutcome(f"{said}\nerror: stopped after {left:.0f} s".strip(), error="timeout")
        if result.exit_code:
            return ToolOutcome(f"{said}\nexit code {result.exit_code}".strip(), error=f"exit code {result.exit_code}")
        return ToolOutcome(said or "(no output)")

    async def program_ended(self, result: ProgramResult) -> None:
        """See `Session.program_ended`."""
        self._exit_code = result.exit_code

    async def solve(self) -> None:
        """Run the task's own solution, as Harbor's Oracle does: to see whether a task can be solved at all.

        Raises:
            ConfigError: the task has none.
        """
        if not (self._folder.path / "solution" / "solve.sh").is_file():
            raise ConfigError(str(self._folder.path), "it has no solution/solve.sh", "A task with a solution")
        await self._sandbox.put_archive("/solution", _packed(self._folder.path / "solution"))
        await self._sandbox.exec(
            "sh -c 'chmod +x /solution/solve.sh && /solution/solve.sh'",
            cwd=self._folder.workdir,
            timeout=self._folder.agent_seconds or 600.0,
        )

    async def score(self, rollout: Rollout) -> Scored:
        """Run the tests and read what they left. No reward left is a failure, never 0."""
        sandbox, folder = self._sandbox, self._folder
        # What the agent left running could wait for the tests and read, or change, them; it has to be gone before the
        # folders are emptied, or it writes a reward between that and its end.
        await sandbox.exec("true", kill_leftovers=True)
        await sandbox.exec("rm -rf /tests /logs/verifier && mkdir -p /tests /logs/verifier")
        await sandbox.put_archive("/tests", _packed(folder.path / "tests"))
        await sandbox.exec("chmod -R a+rX /tests && chmod +x /tests/test.sh && chmod 777 /logs/verifier")
        result = await sandbox.exec(
            _RUN_TESTS,
            cwd=folder.workdir,
            env=folder.verifier_env,
            user=folder.verifier_user,
            timeout=folder.verifier_seconds,
            kill_leftovers=True,
        )
        if result.timed_out:
            raise AttemptError(FailureKind.SCORER, f"the tests took more than {folder.verifier_seconds:g} s")
        rewards = await self._left()
        if rewards is None:
            said = await self._file("/logs/verifier/test-stdout.txt") or ""
            raise AttemptError(
                FailureKind.SCORER, f"the tests left no reward (exit code {result.exit_code}): {said[-300:]}"
            )
        reward = rewards.pop("reward")
        if self._exit_code is not None:
            rewards["exit_code"] = float(self._exit_code)
        return Scored(reward, rewards, solved=reward >= 1.0)

    async def _left(self) -> dict[str, float] | None:
        """The rewards that the tests left: reward.json, else reward.txt, else None."""
        if (text := await self._file("/logs/verifier/reward.json")) is not None:
            try:
                found = json.loads(text)
                rewards = {str(name): float(value) for name, value in found.items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise AttemptError(FailureKind.SCORER, f"reward.json is no flat object of numbers: {error}") from None
            if "reward" not in rewards or not all(map(math.isfinite, rewards.values())):
                raise AttemptError(FailureKind.SCORER, f'reward.json holds no finite "reward": {text[:200]}')
            return rewards
        if (text := await self._file("/logs/verifier/reward.txt")) is None or not text.strip():
            return None
        try:
            return {"reward": float(text)}
        except ValueError:
            raise AttemptError(FailureKind.SCORER, f"reward.txt holds no number: {text[:200]!r}") from None

    async def _file(self, path: str) -> str | None:
        try:
            return (await self._sandbox.get(path)).decode("utf-8", "replace")
        except FileProblem:
            return None

    async def close(self) -> None:
        """End the sandbox."""
        place, self._place, self.sandbox = self._place, None, None
        if place is not None:
            try:
                await place.destroy()
            finally:
                await self._pool.release()


def _packed(folder: Path) -> bytes:
    """A folder as a tar archive, owned by root."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(folder, arcname=".", filter=owned)
    return packed.getvalue()
