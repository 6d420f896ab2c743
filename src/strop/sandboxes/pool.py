"""The embedded pool: one zygote for one image, the sandboxes it has made, those it keeps warm, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import resource
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Literal

from strop.errors import ConfigError
from strop.sandboxes import wire
from strop.sandboxes.bubblewrap import Bubblewrap
from strop.sandboxes.cgroups import CgroupRoots, find_roots, remove_stale
from strop.sandboxes.errors import (
    ResourceExhausted,
    SandboxDead,
    SandboxesUnavailable,
    SandboxFailure,
    SandboxStall,
    failure,
)
from strop.sandboxes.images import Image
from strop.sandboxes.local import DEATH_SECONDS, LocalSandbox
from strop.sandboxes.sandbox import Limits, Snapshot
from strop.sandboxes.tiers import Tier, candidates, make, obstacle
from strop.sandboxes.zygote import COPY_SECONDS, Zygote

_numbers = itertools.count()
#: A chain of snapshots longer than this is merged into one layer: mounting and opening get slower with each.
FLATTEN_AT = 20
#: Descriptors beside one for each sandbox: six for each of the zygote's 512 pooled slots, and here the pipes of commands.
_OTHER_DESCRIPTORS = 4096


def _allow_descriptors(sandboxes: int) -> None:
    """Raise the soft limit of descriptors to what so many sandboxes take, as far as the hard one goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sandboxes + _OTHER_DESCRIPTORS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class LocalSnapshot:
    """Layers of a pool's zygote; see the protocol `Snapshot`. Ends with its pool."""

    def __init__(self, pool: LocalPool, layers: tuple[int, ...], size: int) -> None:
        self.pool, self.layers, self.size = pool, layers, size
        self.generation = pool.generation
        pool.hold(layers)

    async def delete(self) -> None:
        layers, self.layers = self.layers, ()
        await self.pool.let_go(layers, self.generation)


class LocalPool:
    """Makes sandboxes of one image on this machine. Use as `async with LocalPool(image) as pool`.

    Args:
        image: their root file system.
        limits: of each, unless `create` says otherwise.
        network: "none" gives loopback only, in a namespace that is reused once it holds nothing of its last tenant;
            "fresh" gives each a new one, of which its root is the administrator.
        warm: how many are kept ready, so that `create` without a snapshot or limits returns at once.
        max_live: how many may live at once; `create` waits for a place.
        max_wait: seconds that `create` waits for a place.
        ttl: seconds after which a sandbox is destroyed; None never.
        tier: which kind of sandbox; "auto" takes the strongest that works here.
        least: the weakest tier that is taken.
        allow_weak: make sandboxes although control groups are missing: memory and processes are then limited for
            each process and user alone, CPU time not at all.

    Attributes:
        tier: the one that is used, once it has started.
    """

    def __init__(
        self,
        image: Image,
        *,
        limits: Limits | None = None,
        network: Literal["none", "fresh"] = "none",
        warm: int = 0,
        max_live: int = 4096,
        max_wait: float = 600.0,
        ttl: float | None = None,
        tier: Tier | Literal["auto"] = "auto",
        least: Tier = "rootless",
        allow_weak: bool = False,
    ) -> None:
        if network not in ("none", "fresh"):
            raise ConfigError("network", f"{network!r} is not known", 'One of "none" and "fresh"')
        if warm < 0 or max_live < 1 or warm > max_live:
            raise ConfigError("warm", f"{warm} of {max_live} can't be kept ready", "0 to max_live")
        self._candidates = candidates(tier, least)
        self.tier: Tier | None = None
        self.image, self.limits = image, limits or Limits()
        self.number = next(_numbers)
        self.generation = 0
        self._network, self._warm_size, self._ttl = network, warm, ttl
        self._max_live, self._max_wait, self._allow_weak = max_live, max_wait, allow_weak
        self._places = asyncio.Semaphore(max_live)
        self._births = asyncio.Semaphore(64)
        self._free_numbers: list[int] = []
        self._next_number = 1
        self._live: dict[int, LocalSandbox] = {}
        self._buried: dict[int, list[asyncio.Future[None]]] = {}
        self._zygote: Zygote | Bubblewrap | None = None
        self._freezes = False
        self._starting = asyncio.Lock()
        self._layer_users: dict[int, int] = {}
        self._warm: asyncio.Queue[LocalSandbox] = asyncio.Queue()
        self._refilling: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> LocalPool:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- the zygote ----

    async def start(self) -> None:
        """Start the zygote, after removing what dead hosts left, and fill the warm pool.

        If this process may have fewer descriptors open than `max_live` sandboxes take, but could have more, its soft
        limit is raised.

        Raises:
            SandboxesUnavailable: this machine can't; says what is missing.
        """
        if self._zygote is None:
            _allow_descriptors(self._max_live)
            await asyncio.to_thread(remove_stale)
        await self._ensure_zygote()
        if self._warm_size:
            self._refill()

    async def _ensure_zygote(self) -> Zygote | Bubblewrap:
        async with self._starting:
            if self._closed:
                raise SandboxDead("the pool is closed")
            if self._zygote is not None and self._zygote.alive:
                return self._zygote
            if self._zygote is not None:
                await self._zygote.close()
            roots = find_roots()
            if roots.missing and not self._allow_weak:
                raise SandboxesUnavailable(
                    f"no control group for {', '.join(roots.missing)} can be made, so nothing would limit a sandbox's "
                    "use of it. Run as root with /sys/fs/cgroup writable, or say allow_weak=True"
                )
            self.generation += 1
            self._layer_users.clear()
            self._zygote = await self._start_strongest(roots)
            self._freezes = self.tier != "bubblewrap" and bool({"unified", "unified-limits"} & set(roots.folders))
            return self._zygote

    async def _start_strongest(self, roots: CgroupRoots) -> Zygote | Bubblewrap:
        """Start the first candidate that works; from then on it is the only one."""
        reasons = []
        for tier in self._candidates:
            lack = obstacle(tier)
            if lack is not None:
                reasons.append(f"{tier} needs {lack.what} ({lack.mend})")
                continue
            zygote = make(tier, self.image, roots, self._on_dead, self._on_zygote_end, self._live.get)
            try:
                await zygote.start()
            except SandboxesUnavailable as error:
                reasons.append(f"{tier}: {error}")
                continue
            self.tier, self._candidates = tier, (tier,)
            return zygote
        raise SandboxesUnavailable(f"no sandboxes of the tiers that are taken: {'; '.join(reasons)}")

    def _on_zygote_end(self) -> None:
        for number in list(self._live):
            self._on_dead(wire.ZygoteEvent(wire.Event.DEAD, number, 0, 9, 0, ""), reason="the zygote ended")

    # ---- making ----

    async def create(
        self,
        *,
        snapshot: Snapshot | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> LocalSandbox:
        """See the protocol `SandboxPool`.

        Raises:
            ResourceExhausted: no place within `max_wait`, or the host has no more of something.
            SandboxFailure: it could not be made, or the snapshot is of another pool or gone.
        """
        if self._warm_size and snapshot is None and limits is None and not env:
            sandbox = self._take_warm()
            if sandbox is not None:
                sandbox.labels = dict(labels or {})
                sandbox.set_ttl(ttl if ttl is not None else self._ttl)
                return sandbox
        sandbox = await self._make(snapshot, limits or self.limits, env or {}, labels or {})
        sandbox.set_ttl(ttl if ttl is not None else self._ttl)
        return sandbox

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: Mapping[str, str], labels: Mapping[str, str]
    ) -> LocalSandbox:
        zygote = self._zygote if self._zygote is not None and self._zygote.alive else await self._ensure_zygote()
        layers = self._layers_of(snapshot)
        await self._take_place()
        try:
            async with self._births:
                return await self._give_birth(zygote, layers, limits, env, labels)
        except BaseException:
            self._places.release()
            raise

    async def _take_place(self) -> None:
        if not self._places.locked():
            await self._places.acquire()
            return
        try:
            await asyncio.wait_for(self._places.acquire(), self._max_wait)
        except TimeoutError:
            raise ResourceExhausted(
                f"{self._max_live} sandboxes live and none ended within {self._max_wait:g} s"
            ) from None

    def _layers_of(self, snapshot: Snapshot | None) -> tuple[int, ...]:
        if snapshot is None:
            return ()
        if not isinstance(snapshot, LocalSnapshot) or snapshot.pool is not self:
            raise SandboxFailure("the snapshot is of another pool")
        if snapshot.generation != self.generation or not snapshot.layers:
            raise SandboxFailure("the snapshot is gone: it was deleted, or its zygote ended")
        return snapshot.layers

    async def _give_birth(
        self,
        zygote: Zygote | Bubblewrap,
        layers: tuple[int, ...],
        limits: Limits,
        env: Mapping[str, str],
        labels: Mapping[str, str],
    ) -> LocalSandbox:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise failure("open a socket", error.errno or errno.EMFILE) from None
        ours.setblocking(False)
        number = self._free_numbers.pop() if self._free_numbers else self._next_number
        self._next_number = max(self._next_number, number + 1)
        sandbox = self._live[number] = LocalSandbox(
            self, number, ours, limits, {**self.image.env, **env}, labels, layers
        )
        self.hold(layers)
        message = wire.control(
            wire.Control.CREATE, number, fresh_network=self._network == "fresh", processes=limits.processes, memory=limits.memory,
            disk=limits.disk, inodes=limits.inodes, cpu_percent=round(limits.cpus * 100), open_files=limits.open_files, layers=layers,
        )  # fmt: skip
        try:
            with theirs:
                zygote.create(number, message, theirs, lambda event: self._on_stillborn(number, event))
            await sandbox.wait_ready()
        except asyncio.CancelledError:
            sandbox._break("its making was cancelled")
            raise
        finally:
            zygote.born(number)
        return sandbox

    def _on_stillborn(self, number: int, event: wire.ZygoteEvent) -> None:
        sandbox = self._live.get(number)
        if sandbox is not None and not sandbox._ready.done():
            sandbox._ready.set_exception(failure(event.stage, event.error))
        self._forget(number)
        if sandbox is not None:
            sandbox.bury("it could not be made")

    # ---- the warm pool ----

    def _take_warm(self) -> LocalSandbox | None:
        try:
            while True:
                sandbox = self._warm.get_nowait()
                if sandbox.dead is None:
                    return sandbox
        except asyncio.QueueEmpty:
            return None
        finally:
            self._refill()

    def _refill(self) -> None:
        if not self._closed and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        """Failures are left to the `create` that meets them itself."""
        with contextlib.suppress(SandboxFailure):
            while self._warm.qsize() < self._warm_size and not self._closed:
                self._warm.put_nowait(await self._make(None, self.limits, {}, {}))

    # ---- ending ----

    def kill(self, number: int) -> None:
        """Ask the zygote to end a sandbox; its word of the end comes later."""
        if self._zygote is not None and self._zygote.alive:
            with contextlib.suppress(SandboxFailure):
                self._zygote.send(wire.control(wire.Control.DESTROY, number))

    async def destroy(self, sandbox: LocalSandbox, number: int) -> None:
        """End a sandbox and wait until its processes are gone. Nothing happens if it has ended before."""
        if self._live.get(number) is not sandbox:
            sandbox.bury("it was destroyed")
            return
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        self._buried.setdefault(number, []).append(gone)
        self.kill(number)
        sandbox.bury("it was destroyed")
        timer = loop.call_later(DEATH_SECONDS, self._mourn_no_longer, number, gone)
        try:
            await gone
        finally:
            timer.cancel()

    def _mourn_no_longer(self, number: int, gone: asyncio.Future[None]) -> None:
        if not gone.done():
            reason = f"sandbox {number} of pool {self.number} did not end within {DEATH_SECONDS:g} s"
            gone.set_exception(SandboxStall(reason))

    def _on_dead(self, event: wire.ZygoteEvent, reason: str | None = None) -> None:
        sandbox = self._live.get(event.id)
        self._forget(event.id)
        for gone in self._buried.pop(event.id, ()):
            if not gone.done():
                gone.set_result(None)
        if sandbox is not None:
            killed = (
                f"the kernel killed {event.oom_kills} of its processes for memory"
                if event.oom_kills
                else "its first process ended"
            )
            sandbox.bury(reason or killed)

    def _forget(self, number: int) -> None:
        sandbox = self._live.pop(number, None)
        if sandbox is None:
            return
        self._free_numbers.append(number)
        if sandbox._ready.done() and not sandbox._ready.cancelled() and sandbox._ready.exception() is None:
            self._places.release()
        self._release_later(sandbox._layers)

    async def close(self) -> None:
        """Destroy every sandbox, end the zygote, and wait until all of it is gone."""
        self._closed = True
        if self._refilling is not None:
            self._refilling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refilling
        if self._zygote is not None:
            for sandbox in list(self._live.values()):
                sandbox.bury("its pool was closed")
            await self._zygote.close()

    # ---- freezing and snapshots ----

    async def freeze(self, number: int, frozen: bool) -> None:
        """Stop or continue every program of a sandbox: by its control group, or by signals where none can freeze."""
        if not self._freezes and number in self._live:
            await self._live[number].stop(frozen)
            return
        await self._alive().ask(wire.Control.FREEZE, id=number, argument=int(frozen))

    def _alive(self) -> Zygote | Bubblewrap:
        if self._zygote is None or not self._zygote.alive:
            raise SandboxDead("the zygote is gone")
        return self._zygote

    async def take_snapshot(self, number: int, below: tuple[int, ...], limits: Limits) -> LocalSnapshot:
        """Copy a sandbox's writable layer while its programs stand still."""
        zygote = self._alive()
        layer = zygote.token()
        if not self._freezes:
            await self.freeze(number, True)
        try:
            await zygote.ask(
                wire.Control.SNAPSHOT, COPY_SECONDS, token=layer, id=number, argument=0 if self._freezes else 2,
                disk=limits.disk + (1 << 20), inodes=limits.inodes + 64,
            )  # fmt: skip
        finally:
            if not self._freezes:
                await self.freeze(number, False)
        return await self._flattened(LocalSnapshot(self, (*below, layer), limits.disk))

    async def _flattened(self, snapshot: LocalSnapshot) -> LocalSnapshot:
        if len(snapshot.layers) < FLATTEN_AT:
            return snapshot
        zygote = self._alive()
        layer = zygote.token()
        await zygote.ask(
            wire.Control.SNAPSHOT, COPY_SECONDS, token=layer, argument=1, layers=snapshot.layers,
            disk=len(snapshot.layers) * snapshot.size, inodes=1 << 20,
        )  # fmt: skip
        flat = LocalSnapshot(self, (layer,), snapshot.size)
        await snapshot.delete()
        return flat

    def hold(self, layers: tuple[int, ...]) -> None:
        """Count a user of each layer."""
        for layer in layers:
            self._layer_users[layer] = self._layer_users.get(layer, 0) + 1

    def _unused(self, layers: tuple[int, ...]) -> list[int]:
        unused = []
        for layer in layers:
            if layer not in self._layer_users:
                continue
            self._layer_users[layer] -= 1
            if not self._layer_users[layer]:
                del self._layer_users[layer]
                unused.append(layer)
        return unused

    def _release_later(self, layers: tuple[int, ...]) -> None:
        if self._zygote is not None and self._zygote.alive:
            for layer in self._unused(layers):
                with contextlib.suppress(SandboxFailure):
                    self._zygote.send(wire.control(wire.Control.RELEASE, layer=layer))

    async def let_go(self, layers: tuple[int, ...], generation: int) -> None:
        """Take back what `hold` counted; layers without users are unmounted."""
        if generation != self.generation or self._zygote is None or not self._zygote.alive:
            return
        for layer in self._unused(layers):
            await self._zygote.ask(wire.Control.RELEASE, token=layer)
