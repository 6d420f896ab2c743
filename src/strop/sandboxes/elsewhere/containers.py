"""Docker and Podman, through their command lines: one container per sandbox, one `exec` per script."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

from strop.sandboxes.cgroups import start_time
from strop.sandboxes.elsewhere.pool import ElsewherePool
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.errors import SandboxDead, SandboxesUnavailable, SandboxFailure, SandboxStall
from strop.sandboxes.sandbox import Limits, Snapshot

#: Process 1 of a container: waits, and reaps what its sandbox's programs leave.
_WAIT = "trap 'exit 0' TERM; while :; do sleep 3600 & wait; done"
_OWNER = "strop.owner"
_GONE = ("no such container", "is not running", "no container with name or id", "container state improper")


class _Program:
    """The command line of Docker or Podman."""

    def __init__(self, path: str, options: Sequence[str]) -> None:
        self._command = (path, *options)

    async def __call__(self, *arguments: str, stdin: bytes = b"", seconds: float = 300.0) -> bytes:
        """Run it and return its standard output.

        Raises:
            SandboxDead: the container is gone.
            SandboxFailure: it failed otherwise.
        """
        process = await asyncio.create_subprocess_exec(
            *self._command, *arguments, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )  # fmt: skip
        try:
            output, said = await asyncio.wait_for(process.communicate(stdin), seconds)
        except TimeoutError:
            raise SandboxStall(f"{arguments[0]} of a container took longer than {seconds:g} s") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            words = said.decode("utf-8", "replace").strip()
            if any(sign in words.lower() for sign in _GONE):
                raise SandboxDead(f"its container is gone: {words}")
            raise SandboxFailure(f"{self._command[0]} {arguments[0]} failed ({process.returncode}): {words[-500:]}")
        return output


class ContainerSnapshot:
    """An image made of a container; see the protocol `Snapshot`."""

    def __init__(self, program: _Program, image: str) -> None:
        self._program, self.image = program, image

    async def delete(self) -> None:
        if self.image:
            image, self.image = self.image, ""
            await self._program("rmi", "--force", image)


class ContainerSandbox(PosixSandbox):
    """A container; see the protocol `Sandbox`."""

    kind = "container"

    def __init__(self, pool: ContainerPool, id: str, **options: Any) -> None:
        super().__init__(id, **options)
        self._pool, self._program = pool, pool.program

    async def _run_script(self, script: str, seconds: float) -> bytes:
        return await self._program(
            "exec", "-i", "-u", "0", self.id, "/bin/sh", "-s", stdin=script.encode("utf-8", "surrogateescape"), seconds=seconds
        )  # fmt: skip

    async def _end(self) -> None:
        await self._program("rm", "--force", "--volumes", self.id)

    async def snapshot(self) -> ContainerSnapshot:
        self.check_alive()
        return ContainerSnapshot(
            self._program, (await self._program("commit", "--pause", self.id)).decode().split()[-1]
        )

    async def fork(self, count: int) -> Sequence[Self]:
        snapshot = await self.snapshot()
        made = [
            self._pool.create(snapshot=snapshot, limits=self.limits, env=self._env, labels=self.labels)
            for _ in range(count)
        ]
        return await asyncio.gather(*made)  # type: ignore[return-value]

    async def pause(self) -> None:
        self.check_alive()
        await self._program("pause", self.id)

    async def resume(self) -> None:
        self.check_alive()
        await self._program("unpause", self.id)


class ContainerPool(ElsewherePool[ContainerSandbox]):
    """Containers of one image, without network, new privileges or more capabilities than `su` and `chown` need.

    Not as cheap as the local core (a tenth of a second each and more), and no stronger; for where Docker or Podman is
    what there is. Containers of hosts that are gone are removed when a pool starts.

    Args:
        image: as `docker run` takes it; must have /bin/sh and coreutils or busybox.
        program: "docker" or "podman".
        network: "none", or a network of that program.
        options: words between the program and its command, for example ("--host", "ssh://…").
        run_options: further words of `run`.
        rest: see `ElsewherePool`.

    Raises:
        SandboxesUnavailable: the program is not installed.
    """

    kind = "docker"
    sizes: ClassVar[frozenset[str]] = frozenset({"memory", "processes", "cpus", "open_files"})

    def __init__(
        self,
        image: str,
        *,
        program: Literal["docker", "podman"] = "docker",
        network: str = "none",
        options: Sequence[str] = (),
        run_options: Sequence[str] = (),
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        path = shutil.which(program)
        if path is None:
            raise SandboxesUnavailable(
                f"{program} is not installed. Debian: apt-get install {'docker.io' if program == 'docker' else 'podman'}"
            )
        self.program = _Program(path, options)
        self._image, self._network, self._run_options = image, network, tuple(run_options)
        self._swept = False

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> ContainerSandbox:
        if not self._swept:
            self._swept = True
            await self._remove_stale()
        of = self._own(snapshot, ContainerSnapshot)
        if of is not None and not of.image:
            raise SandboxFailure("the snapshot is gone: it was deleted")
        said = await self.program("run", *self._run_words(limits, labels), of.image if of else self._image, "-c", _WAIT)
        return ContainerSandbox(self, said.decode().split()[-1], limits=limits, env=env, labels=labels, cwd=self._cwd)

    def _run_words(self, limits: Limits, labels: Mapping[str, str]) -> list[str]:
        words = [
            "--detach", "--entrypoint", "/bin/sh", "--user", "0", "--network", self._network, "--hostname", "sandbox",
            "--memory", str(limits.memory), "--memory-swap", str(limits.memory), "--pids-limit", str(limits.processes),
            "--ulimit", f"nofile={limits.open_files}:{limits.open_files}", "--security-opt", "no-new-privileges", "--cap-drop", "ALL",
            "--label", f"{_OWNER}={os.getpid()}-{start_time(os.getpid())}",
        ]  # fmt: skip
        for capability in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID"):
            words += ["--cap-add", capability]
        if limits.cpus:
            words += ["--cpus", f"{limits.cpus:g}"]
        for name, value in labels.items():
            words += ["--label", f"{name}={value}"]
        return [*words, *self._run_options]

    async def _remove_stale(self) -> None:
        found = await self.program("ps", "--all", "--filter", f"label={_OWNER}", "--format", "{{.ID}} {{.Labels}}")
        for line in found.decode().splitlines():
            owner = re.search(rf"{re.escape(_OWNER)}[=:](\d+)-(\d+)", line)
            if owner and start_time(int(owner[1])) != int(owner[2]):
                await self.program("rm", "--force", "--volumes", line.split()[0])


class PodmanPool(ContainerPool):
    """The same with Podman."""

    kind = "podman"

    def __init__(self, image: str, **rest: Any) -> None:
        super().__init__(image, program="podman", **rest)
