"""Daytona, through its SDK. Untested against the service: the contract is tested with the SDK against a server on
loopback."""

from __future__ import annotations

import math
import shlex
from typing import Any, ClassVar

from strop.sandboxes.elsewhere.pool import ElsewherePool, load_sdk, translated
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.errors import NotOffered
from strop.sandboxes.sandbox import Limits, Snapshot

_GIB = 1 << 30


class DaytonaSandbox(PosixSandbox):
    """See the protocol `Sandbox`."""

    kind = "daytona"

    def __init__(self, pool: DaytonaPool, inner: Any, **options: Any) -> None:
        super().__init__(inner.id, **options)
        self._pool, self._inner = pool, inner

    async def _run_script(self, script: str, seconds: float) -> bytes:
        with translated("daytona", "run a command", [self._pool.sdk.DaytonaNotFoundError]):
            done = await self._inner.process.exec(shlex.join(["/bin/sh", "-c", script]), timeout=math.ceil(seconds))
        return str(done.result).encode()

    async def _end(self) -> None:
        with translated("daytona", "end a sandbox"):
            await self._pool.client.delete(self._inner)


class DaytonaPool(ElsewherePool[DaytonaSandbox]):
    """Sandboxes of Daytona. Memory and disk are counted in whole gibibytes, CPUs in whole cores, all rounded up.

    Args:
        image: of a registry; needed for limits of memory, disk and CPUs.
        snapshot: name of a Daytona snapshot to start from instead, which has its own; Daytona's default if None.
        block_network: no network.
        options: of the SDK's DaytonaConfig, for example `api_key` (else $DAYTONA_API_KEY) and `api_url`.
        rest: see `ElsewherePool`.

    Raises:
        SandboxesUnavailable: the SDK is not installed.
        NotOffered: an image and a snapshot.
    """

    kind: ClassVar[str] = "daytona"
    sizes: ClassVar[frozenset[str]] = frozenset({"memory", "disk", "cpus"})

    def __init__(
        self,
        image: str | None = None,
        *,
        snapshot: str | None = None,
        block_network: bool = True,
        options: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        if image is not None and snapshot is not None:
            raise NotOffered("daytona: a sandbox starts from an image or from a snapshot, not from both")
        self._image, self._named = image, snapshot
        super().__init__(**rest)
        self.sdk: Any = load_sdk(self.kind, "daytona")
        self.client: Any = self.sdk.AsyncDaytona(self.sdk.DaytonaConfig(**(options or {})))
        self._block_network = block_network

    def _checked(self, limits: Limits) -> Limits:
        if self._image is None and any(getattr(limits, name) != getattr(Limits(), name) for name in self.sizes):
            raise NotOffered("daytona: a snapshot has its own limits of memory, disk and CPUs. Give an image instead")
        return super()._checked(limits)

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> DaytonaSandbox:
        if snapshot is not None:
            raise NotOffered("daytona sandboxes have no snapshots here")
        common = {
            "labels": labels,
            "network_block_all": self._block_network,
            "auto_stop_interval": max(1, math.ceil(ttl / 60)),
            "auto_delete_interval": 0,  # minutes after it has stopped
        }
        if self._image is None:
            params = self.sdk.CreateSandboxFromSnapshotParams(snapshot=self._named, **common)
        else:
            resources = self.sdk.Resources(
                cpu=max(1, math.ceil(limits.cpus)), memory=math.ceil(limits.memory / _GIB), disk=math.ceil(limits.disk / _GIB)
            )  # fmt: skip
            params = self.sdk.CreateSandboxFromImageParams(image=self._image, resources=resources, **common)
        with translated("daytona", "make a sandbox"):
            inner = await self.client.create(params, timeout=self._max_wait)
        return DaytonaSandbox(self, inner, limits=limits, env=env, labels=labels, cwd=self._cwd)

    async def _close(self) -> None:
        with translated("daytona", "close its connection"):
            await self.client.close()
