"""Prime Intellect's sandboxes, through their SDK. Untested against the service: the contract is tested with the SDK
against a server on loopback."""

from __future__ import annotations

import math
import shlex
from typing import Any, ClassVar

from strop.sandboxes.elsewhere.pool import ElsewherePool, load_sdk, translated
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.errors import NotOffered
from strop.sandboxes.sandbox import Limits, Snapshot

_GIB = 1 << 30


class PrimeSandbox(PosixSandbox):
    """See the protocol `Sandbox`."""

    kind = "prime"

    def __init__(self, pool: PrimePool, id: str, **options: Any) -> None:
        super().__init__(id, **options)
        self._pool = pool

    async def _run_script(self, script: str, seconds: float) -> bytes:
        with translated("prime", "run a command", [self._pool.sdk.SandboxNotRunningError]):
            done = await self._pool.client.execute_command(
                self.id, shlex.join(["/bin/sh", "-c", script]), timeout=math.ceil(seconds)
            )
        return str(done.stdout).encode()

    async def _end(self) -> None:
        with translated("prime", "end a sandbox"):
            await self._pool.client.delete(self.id)


class PrimePool(ElsewherePool[PrimeSandbox]):
    """Sandboxes of Prime Intellect.

    Args:
        image: of a registry.
        options: further fields of the SDK's CreateSandboxRequest, for example `team_id`, `region`, `network_denylist`.
        api_key: else the SDK's own configuration and $PRIME_API_KEY.
        rest: see `ElsewherePool`.

    Raises:
        SandboxesUnavailable: the SDK is not installed.
    """

    kind: ClassVar[str] = "prime"
    sizes: ClassVar[frozenset[str]] = frozenset({"memory", "disk", "cpus"})

    def __init__(
        self, image: str, *, options: dict[str, Any] | None = None, api_key: str | None = None, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.sdk: Any = load_sdk(self.kind, "prime_sandboxes")
        with translated("prime", "start its client"):
            self.client: Any = self.sdk.AsyncSandboxClient(api_key=api_key)
        self._image, self._options, self._made = image, dict(options or {}), 0

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> PrimeSandbox:
        if snapshot is not None:
            raise NotOffered("prime sandboxes have no snapshots")
        self._made += 1
        with translated("prime", "make a sandbox"):
            request = self.sdk.CreateSandboxRequest(
                name=f"strop-{self._made}", docker_image=self._image, cpu_cores=limits.cpus or 1.0, memory_gb=limits.memory / _GIB,
                disk_size_gb=limits.disk / _GIB, timeout_minutes=max(1, math.ceil(ttl / 60)),
                labels=[f"{name}={value}" for name, value in labels.items()], **self._options,
            )  # fmt: skip
            made = await self.client.create(request)
            try:
                await self.client.wait_for_creation(made.id)
            except BaseException:
                await self.client.delete(made.id)
                raise
        return PrimeSandbox(self, made.id, limits=limits, env=env, labels=labels, cwd=self._cwd)

    async def _close(self) -> None:
        with translated("prime", "close its connection"):
            await self.client.aclose()
