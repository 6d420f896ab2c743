"""The pool's side of the protocol: worker processes, who works on what, and what happens when one dies.

A worker that ends, or whose event loop stops beating, takes its attempts with it: they are failures of the system, and
made again they go to another worker. Messages are described in `worker.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from strop.errors import AttemptError, EnvironmentProblem
from strop.rollouts import FailureKind

VERSION = 1
_LINE = 1 << 26  # bytes of the longest message
_RESTARTS = 5  # of one worker without an attempt ended between them: then something is wrong with all of it


@dataclass(frozen=True, slots=True)
class ModelAccess:
    """How a worker reaches the model for one attempt.

    Attributes:
        url: of the gateway, without a path.
        key: minted for the attempt.
        name: of the model.
        temperature, max_tokens: what the recipe samples with; the gateway sees to it whatever is asked for.
    """

    url: str
    key: str
    name: str
    temperature: float
    max_tokens: int


class _Worker:
    """One worker process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.waiting: dict[int, asyncio.Future[Any]] = {}
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.beaten = time.monotonic()
        self.dead = ""
        self.said = b""
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._keep_errors())]

    async def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            while line := await self.process.stdout.readline():
                self._take(json.loads(line))
            reason = f"its worker ended: {self.said.decode('utf-8', 'replace').strip()[-300:]}"
        except (ValueError, KeyError) as error:
            reason = f"its worker sent no message: {error}"
        self.die(reason)

    def _take(self, message: dict[str, Any]) -> None:
        self.beaten = time.monotonic()
        if message["v"] != VERSION:
            self.die(f"its worker speaks version {message['v']} of the protocol, not {VERSION}")
        elif "ready" in message and not self.ready.done():
            self.ready.set_result(message["ready"])
        elif "id" in message and (waiting := self.waiting.pop(message["id"], None)) is not None and not waiting.done():
            if "ok" in message:
                waiting.set_result(message["ok"])
            else:
                failed = message["failed"]
                waiting.set_exception(AttemptError(FailureKind(failed["kind"]), str(failed["reason"])))

    async def _keep_errors(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(4096):
            self.said = (self.said + data)[-4096:]

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message; a pipe that is full is waited for."""
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):  # `_read` sees the end and says why
            self.process.stdin.write(json.dumps({"v": VERSION, **message}).encode() + b"\n")
            await self.process.stdin.drain()

    def die(self, reason: str) -> None:
        """Fail everything that it worked on, and kill it with its children."""
        if self.dead:
            return
        self.dead = reason
        for waiting in self.waiting.values():
            if not waiting.done():
                waiting.set_exception(AttemptError(FailureKind.ENVIRONMENT, reason))
        self.waiting.clear()
        if not self.ready.done():
            self.ready.set_exception(EnvironmentProblem(f"A worker did not start: {reason}"))
            self.ready.exception()  # whoever waits for it reads it; nobody need
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def bury(self) -> None:
        """Wait for the process of a dead worker, and let go of its pipes."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        await self.process.wait()
        await asyncio.wait(self.tasks, timeout=1)
        for task in self.tasks:
            task.cancel()


class WorkerPool:
    """Workers of one environment.

    Args:
        command: starts one: it reads messages and writes them. A command that runs on another machine ("ssh", …) does
            as well.
        workers: how many.
        capacity: attempts that one worker makes at once; further ones wait.
        start_seconds: how long one may take to be ready.
        silence_seconds: how long its event loop may stand still; then it counts as dead.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        workers: int = 1,
        capacity: int = 64,
        start_seconds: float = 120.0,
        silence_seconds: float = 30.0,
    ) -> None:
        self._command, self._count, self._capacity = list(command), workers, capacity
        self._start_seconds, self._silence = start_seconds, silence_seconds
        self._places = asyncio.Semaphore(workers * capacity)
        self._numbers = itertools.count(1)
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()
        self._failed_starts = 0
        self._watching: asyncio.Task[None] | None = None
        self.sizes: dict[str, int] = {}

    async def start(self) -> None:
        """Start the workers that aren't there.

        Raises:
            EnvironmentProblem: one does not become ready, or they die again and again.
        """
        async with self._starting:
            for worker in [worker for worker in self._workers if worker.dead]:
                self._workers.remove(worker)
                await worker.bury()
            while len(self._workers) < self._count:
                if self._failed_starts > _RESTARTS * self._count:
                    raise EnvironmentProblem(f"The workers died {self._failed_starts} times: {' '.join(self._command)}")
                self._failed_starts += 1
                self._workers.append(await self._new())
            if self._watching is None:
                self._watching = asyncio.create_task(self._watch())

    async def _new(self) -> _Worker:
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe, stderr=pipe, limit=_LINE, start_new_session=True
            )
        except OSError as error:
            raise EnvironmentProblem(f"A worker can't be started: {error}. Its command is {self._command}.") from error
        worker = _Worker(process)
        try:
            async with asyncio.timeout(self._start_seconds):
                self.sizes = (await asyncio.shield(worker.ready))["sizes"]
        except TimeoutError:
            worker.die(f"it was not ready after {self._start_seconds:g} s")
            await worker.bury()
            raise EnvironmentProblem(f"A worker was not ready after {self._start_seconds:g} s.") from None
        except EnvironmentProblem:
            await worker.bury()
            raise
        return worker

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._silence / 4))
            for worker in self._workers:
                if not worker.dead and time.monotonic() - worker.beaten > self._silence:
                    worker.die(f"its worker was silent for {self._silence:g} s")

    async def tasks(self, split: str) -> list[dict[str, Any]]:
        """All tasks of a split.

        Raises:
            EnvironmentProblem: the worker can't list them.
        """
        await self.start()
        message = {"op": "tasks", "split": split, "start": 0, "count": self.sizes.get(split, 0)}
        try:
            done: list[dict[str, Any]] = await self._ask(message)
        except AttemptError as error:
            raise EnvironmentProblem(f"A worker can't list the tasks of {split!r}: {error.reason}") from error
        return done

    async def attempt(self, split: str, index: int, model: ModelAccess, seed: int) -> dict[str, Any]:
        """Let a worker make an attempt and score it.

        Returns:
            reward, metrics, solved.

        Raises:
            AttemptError: it failed, or its worker died.
        """
        async with self._places:
            await self.start()
            message = {"op": "attempt", "split": split, "index": index, "model": asdict(model), "seed": seed}
            done: dict[str, Any] = await self._ask(message)
            self._failed_starts = 0
            return done

    async def _ask(self, message: dict[str, Any]) -> Any:
        alive = [worker for worker in self._workers if not worker.dead]
        if not alive:
            raise AttemptError(FailureKind.ENVIRONMENT, "all workers are dead")
        worker = min(alive, key=lambda worker: len(worker.waiting))
        number = next(self._numbers)
        waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        worker.waiting[number] = waiting
        try:
            await worker.send({**message, "id": number})
            return await waiting
        except asyncio.CancelledError:
            worker.waiting.pop(number, None)
            if not worker.dead:
                await worker.send({"op": "cancel", "id": number})
            raise

    async def close(self) -> None:
        """End all workers."""
        if self._watching is not None:
            self._watching.cancel()
        for worker in self._workers:
            worker.die("the pool was closed")
            await worker.bury()
