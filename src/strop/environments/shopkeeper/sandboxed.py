"""The shopkeeper's tools in sandboxes: the function of answers.py, run by interpreters that already wait there.

Every call runs in a copy of an interpreter that is thrown away after it. What goes wrong here is a failure of the
system and never an answer; faults that the task means the agent to meet are added outside, in tools.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from strop.environments.shopkeeper.answers import Answer, Refusal
from strop.errors import AttemptError, StropError
from strop.rollouts import FailureKind
from strop.sandboxes import Image, Limits, PythonSession, Sandbox, SandboxPool
from strop.sandboxes.shared import SharedPool

#: Seconds that a call may take before its place counts as broken. It takes milliseconds.
_SECONDS = 20.0
#: Calls that run side by side; the others wait. A call has a core to itself for two or three milliseconds.
_AT_ONCE = 4
_SOURCE = Path(__file__).with_name("answers.py")


def _image() -> Image:
    """The host's programs, and the Python that runs this: the tools then are the same to the last byte."""
    home = Path(sys.base_prefix).resolve()
    allow = ("/usr",) if home.is_relative_to("/usr") else ("/usr", str(home))
    image = Image.host(allow)
    return replace(image, env={**image.env, "PATH": f"{home}/bin:/usr/local/bin:/usr/bin:/bin"})


class _Interpreters:
    """Those of one pool that wait for a call, and leave to run one."""

    def __init__(self) -> None:
        self.idle: list[tuple[Sandbox, PythonSession]] = []
        self.leave = asyncio.Semaphore(_AT_ONCE)


class SandboxedTools:
    """Answers calls in sandboxes. Every attempt opens and closes it; the last one out closes the pool."""

    def __init__(self) -> None:
        limits = Limits(memory=256 << 20, processes=32, disk=16 << 20, timeout=_SECONDS)
        self._shared = SharedPool(_image, limits=limits)
        self._interpreters: weakref.WeakKeyDictionary[SandboxPool, _Interpreters] = weakref.WeakKeyDictionary()

    def problem(self) -> str | None:
        """Make one call; why this machine can't, or None if it could."""
        with ThreadPoolExecutor(1) as thread:  # there may be an event loop in this one
            try:
                thread.submit(asyncio.run, self._try()).result()
            except (StropError, AttemptError, OSError) as error:
                return str(error)
        return None

    async def _try(self) -> None:
        pool = await self.open()
        try:
            await self.answer(pool, {}, "calculate", {"expression": "6*7"})
        finally:
            await self.close()

    async def open(self) -> SandboxPool:
        """The pool for an attempt's calls; needs one `close`."""
        return await self._shared.acquire()

    async def close(self) -> None:
        """An attempt is over."""
        await self._shared.release()

    async def answer(
        self, pool: SandboxPool, table: Mapping[str, Mapping[str, float]], name: str, arguments: Mapping[str, object]
    ) -> Answer | Refusal:
        """See `answers.answer`, which this runs.

        Raises:
            AttemptError: the sandbox failed.
        """
        plain = {key: value if isinstance(value, str | int | float) else None for key, value in arguments.items()}
        call = json.dumps([table, name, plain])  # no tool takes anything but text and numbers
        reply = json.loads(await self._run(pool, f"print(json.dumps(answer(*json.loads({call!r}))))"))
        return Refusal(*reply) if len(reply) == len(Refusal._fields) else Answer(*reply)

    async def _run(self, pool: SandboxPool, code: str) -> bytes:
        interpreters = self._interpreters.setdefault(pool, _Interpreters())
        async with interpreters.leave:
            sandbox, python = interpreters.idle.pop() if interpreters.idle else await _start(pool)
            try:
                result = await python.run(code, fork=True)
                if result.error is not None:
                    raise AttemptError(FailureKind.SANDBOX, f"a tool failed in its sandbox: {result.error[-300:]}")
            except BaseException:
                await sandbox.destroy()
                raise
            interpreters.idle.append((sandbox, python))
            return result.stdout


async def _start(pool: SandboxPool) -> tuple[Sandbox, PythonSession]:
    sandbox = await pool.create(labels={"for": "tools"})
    try:
        python = await sandbox.python(("ast", "json", "operator", "typing"))
        await python.run("import json")
        loaded = await python.run(_SOURCE.read_text())
        if loaded.error is not None:
            raise AttemptError(FailureKind.SANDBOX, f"the tools can't be loaded in a sandbox: {loaded.error[-300:]}")
    except BaseException:
        await sandbox.destroy()
        raise
    return sandbox, python
