"""Kubernetes agent-sandbox (kubernetes-sigs), through its SDK. Untested against a cluster: the contract is tested with
the SDK against an API server and a router on loopback."""

from __future__ import annotations

import math
import shlex
from typing import Any, ClassVar

from strop.sandboxes.elsewhere.pool import ElsewherePool, load_sdk, translated
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.errors import NotOffered
from strop.sandboxes.sandbox import Limits, Snapshot


class KubernetesSandbox(PosixSandbox):
    """See the protocol `Sandbox`. Commands run as the user that the pod runs as."""

    kind = "kubernetes"

    def __init__(self, pool: KubernetesPool, inner: Any, **options: Any) -> None:
        super().__init__(inner.claim_name, **options)
        self._pool, self._inner = pool, inner

    async def _run_script(self, script: str, seconds: float) -> bytes:
        with translated("kubernetes", "run a command", [self._pool.errors.SandboxNotFoundError]):
            done = await self._inner.commands.run(shlex.join(["/bin/sh", "-c", script]), timeout=math.ceil(seconds))
        return str(done.stdout).encode()

    async def _end(self) -> None:
        with translated("kubernetes", "end a sandbox"):
            await self._inner.terminate()


class KubernetesPool(ElsewherePool[KubernetesSandbox]):
    """Sandboxes that a cluster's agent-sandbox controller makes; a warm pool's template says what they are and may use.

    Args:
        warm_pool: name of the SandboxWarmPool.
        namespace: of the claims.
        connection: one of the SDK's connection configurations, which say how pods are reached.
        api_client: a `kubernetes_asyncio` client; the SDK's own if None.
        rest: see `ElsewherePool`.

    Raises:
        SandboxesUnavailable: the SDK is not installed.
    """

    kind: ClassVar[str] = "kubernetes"

    def __init__(
        self, warm_pool: str, *, connection: Any, namespace: str = "default", api_client: Any = None, **rest: Any
    ) -> None:
        super().__init__(**rest)
        load_sdk(self.kind, "kubernetes_asyncio")
        sdk: Any = load_sdk(self.kind, "k8s_agent_sandbox.async_sandbox_client")
        self.errors: Any = load_sdk(self.kind, "k8s_agent_sandbox.exceptions")
        self._client: Any = sdk.AsyncSandboxClient(connection, cleanup=True, api_client=api_client)
        self._warm_pool, self._namespace = warm_pool, namespace

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> KubernetesSandbox:
        if snapshot is not None:
            raise NotOffered("kubernetes sandboxes have no snapshots")
        with translated("kubernetes", "make a sandbox"):
            inner = await self._client.create_sandbox(
                self._warm_pool, namespace=self._namespace, sandbox_ready_timeout=math.ceil(self._max_wait), labels=labels or None,
                shutdown_after_seconds=max(1, math.ceil(ttl)),
            )  # fmt: skip
        return KubernetesSandbox(self, inner, limits=limits, env=env, labels=labels, cwd=self._cwd)

    async def _close(self) -> None:
        with translated("kubernetes", "close its connection"):
            await self._client.close()
