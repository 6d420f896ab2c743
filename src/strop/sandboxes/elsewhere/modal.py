"""Modal, through its SDK. Untested against the service, which speaks gRPC: the contract is tested against a stand-in with
the signatures of the SDK."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from strop.sandboxes.elsewhere.pool import ElsewherePool, load_sdk, translated
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.sandbox import MIB, Limits, Snapshot


class ModalSnapshot:
    """An image of a sandbox's files, which Modal keeps; see the protocol `Snapshot`."""

    def __init__(self, image: Any) -> None:
        self.image = image

    async def delete(self) -> None:
        """Modal keeps images of file systems by itself, and forgets them by itself."""


class ModalSandbox(PosixSandbox):
    """See the protocol `Sandbox`."""

    kind = "modal"

    def __init__(self, pool: ModalPool, inner: Any, **options: Any) -> None:
        super().__init__(inner.object_id, **options)
        self._pool, self._inner = pool, inner

    async def _run_script(self, script: str, seconds: float) -> bytes:
        with translated("modal", "run a command", [self._pool.sdk.exception.NotFoundError]):
            process = await self._inner.exec.aio("/bin/sh", "-c", script, timeout=math.ceil(seconds))
            output = await process.stdout.read.aio()
            await process.wait.aio()
        return str(output).encode()

    async def _end(self) -> None:
        with translated("modal", "end a sandbox"):
            await self._inner.terminate.aio()

    async def snapshot(self) -> ModalSnapshot:
        self.check_alive()
        with translated("modal", "take a snapshot", [self._pool.sdk.exception.NotFoundError]):
            return ModalSnapshot(await self._inner.snapshot_filesystem.aio())

    async def fork(self, count: int) -> Sequence[Self]:
        snapshot = await self.snapshot()
        made = [
            self._pool.create(snapshot=snapshot, limits=self.limits, env=self._env, labels=self.labels)
            for _ in range(count)
        ]
        return await asyncio.gather(*made)  # type: ignore[return-value]


class ModalPool(ElsewherePool[ModalSandbox]):
    """Sandboxes of Modal. Memory and CPUs are limits, not reservations.

    Args:
        image: of a registry.
        app: name of the Modal app that they belong to; made if there is none.
        block_network: no network.
        options: further arguments of the SDK's Sandbox.create, for example `region`.
        rest: see `ElsewherePool`.

    Raises:
        SandboxesUnavailable: the SDK is not installed.
    """

    kind: ClassVar[str] = "modal"
    sizes: ClassVar[frozenset[str]] = frozenset({"memory", "cpus"})

    def __init__(
        self,
        image: str,
        *,
        app: str = "strop",
        block_network: bool = True,
        options: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.sdk: Any = load_sdk(self.kind, "modal")
        self._image, self._app_name, self._block_network = image, app, block_network
        self._options = dict(options or {})
        self._app: Any = None

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> ModalSandbox:
        of = self._own(snapshot, ModalSnapshot)
        with translated("modal", "make a sandbox"):
            if self._app is None:
                self._app = await self.sdk.App.lookup.aio(self._app_name, create_if_missing=True)
            inner = await self.sdk.Sandbox.create.aio(
                "sleep", "infinity", app=self._app, image=of.image if of else self.sdk.Image.from_registry(self._image),
                timeout=max(1, math.ceil(ttl)), block_network=self._block_network, memory=(0, math.ceil(limits.memory / MIB)),
                cpu=(0.125, limits.cpus) if limits.cpus else None, **self._options,
            )  # fmt: skip
            if labels:
                await inner.set_tags.aio(labels)
        return ModalSandbox(self, inner, limits=limits, env=env, labels=labels, cwd=self._cwd)
