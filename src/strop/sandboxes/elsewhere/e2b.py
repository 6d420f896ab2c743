"""E2B, through its SDK. Untested against the service: the contract is tested with the SDK against a server on loopback."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from strop.sandboxes.elsewhere.pool import ElsewherePool, load_sdk, translated
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.errors import SandboxFailure
from strop.sandboxes.sandbox import Limits, Snapshot


class E2BSnapshot:
    """A snapshot kept by E2B; see the protocol `Snapshot`."""

    def __init__(self, sdk: Any, id: str, options: dict[str, Any]) -> None:
        self._sdk, self.id, self._options = sdk, id, options

    async def delete(self) -> None:
        with translated("e2b", "delete a snapshot"):
            await self._sdk.AsyncSandbox.delete_snapshot(self.id, **self._options)


class E2BSandbox(PosixSandbox):
    """See the protocol `Sandbox`. A snapshot holds programs too; `pause` keeps them."""

    kind = "e2b"

    def __init__(self, pool: E2BPool, inner: Any, **options: Any) -> None:
        super().__init__(inner.sandbox_id, **options)
        self._pool, self._inner = pool, inner

    async def _run_script(self, script: str, seconds: float) -> bytes:
        sdk = self._pool.sdk
        with translated("e2b", "run a command", [sdk.SandboxNotFoundException]):
            try:
                result = await self._inner.commands.run(
                    shlex.join(["/bin/sh", "-c", script]), user="root", timeout=seconds, request_timeout=seconds
                )
            except sdk.CommandExitException as ended:  # whether it answered is seen by whoever asked
                result = ended
        return str(result.stdout).encode()

    async def _end(self) -> None:
        with translated("e2b", "end a sandbox"):
            await self._inner.kill()

    async def snapshot(self) -> E2BSnapshot:
        self.check_alive()
        with translated("e2b", "take a snapshot", [self._pool.sdk.SandboxNotFoundException]):
            return E2BSnapshot(self._pool.sdk, (await self._inner.create_snapshot()).snapshot_id, self._pool.options)

    async def fork(self, count: int) -> Sequence[Self]:
        snapshot = await self.snapshot()
        try:
            made = [
                self._pool.create(snapshot=snapshot, limits=self.limits, env=self._env, labels=self.labels)
                for _ in range(count)
            ]
            return await asyncio.gather(*made)  # type: ignore[return-value]
        finally:
            await snapshot.delete()

    async def pause(self) -> None:
        self.check_alive()
        with translated("e2b", "pause a sandbox"):
            await self._inner.pause()

    async def resume(self) -> None:
        self.check_alive()
        with translated("e2b", "resume a sandbox"):
            await self._inner.connect()


class E2BPool(ElsewherePool[E2BSandbox]):
    """Sandboxes of E2B. A template says how much memory, disk and CPU they have.

    Args:
        template: name or id of a template; E2B's default if None.
        internet: whether they reach the internet.
        options: arguments of every call of the SDK, for example `api_key` (else $E2B_API_KEY) and `domain`.
        rest: see `ElsewherePool`.

    Raises:
        SandboxesUnavailable: the SDK is not installed.
    """

    kind: ClassVar[str] = "e2b"

    def __init__(
        self,
        template: str | None = None,
        *,
        internet: bool = False,
        options: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.sdk: Any = load_sdk(self.kind, "e2b")
        self._template, self._internet, self.options = template, internet, dict(options or {})

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> E2BSandbox:
        of = self._own(snapshot, E2BSnapshot)
        with translated("e2b", "make a sandbox"):
            inner = await self.sdk.AsyncSandbox.create(
                of.id if of else self._template, timeout=max(1, round(ttl)), metadata=labels, allow_internet_access=self._internet,
                **self.options,
            )  # fmt: skip
        if not getattr(inner, "sandbox_id", ""):
            raise SandboxFailure("e2b made a sandbox without an id")
        return E2BSandbox(self, inner, limits=limits, env=env, labels=labels, cwd=self._cwd)
