"""What the pools of other systems share: admission, times to live, the refusal of limits that a system doesn't have."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from strop.errors import ConfigError
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.errors import (
    NotOffered,
    ResourceExhausted,
    SandboxDead,
    SandboxesUnavailable,
    SandboxFailure,
    SandboxStall,
)
from strop.sandboxes.sandbox import Limits, Snapshot

Box = TypeVar("Box", bound=PosixSandbox)
#: Seconds for a new sandbox, which may have to wait for an image, and for the end of one.
_BIRTH_SECONDS, _DEATH_SECONDS = 900.0, 120.0
#: Kept by strop itself, whatever the system.
_OURS = frozenset({"output", "timeout"})


def load_sdk(kind: str, module: str) -> ModuleType:
    """Import a system's SDK.

    Raises:
        SandboxesUnavailable: it is not installed; says how to.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SandboxesUnavailable(
            f"{kind} sandboxes need the package of {module.partition('.')[0]!r}, which can't be imported ({error}). "
            f"pip install 'strop[{kind}]'"
        ) from None


@contextlib.contextmanager
def translated(kind: str, what: str, gone: Sequence[type[Exception]] = ()) -> Iterator[None]:
    """Make a failure of an SDK ours: none of them may look like a program that failed.

    Args:
        kind: the system.
        what: what was done, as it completes "could not …".
        gone: the SDK's errors that say that the sandbox is not there any more.
    """
    try:
        yield
    except (SandboxFailure, NotOffered, ConfigError, SandboxesUnavailable):
        raise
    except tuple(gone) as error:
        raise SandboxDead(f"the {kind} sandbox is gone: {error}") from error
    except TimeoutError as error:
        raise SandboxStall(f"{kind} did not {what} in time: {error}") from error
    except Exception as error:
        raise SandboxFailure(f"{kind} could not {what}: {type(error).__name__}: {error}") from error


class ElsewherePool(ABC, Generic[Box]):
    """Sandboxes of another system; see the protocol `SandboxPool`.

    Args:
        limits: of each, unless `create` says otherwise. A limit that the system doesn't have may only be left as it is.
        env: variables of every command.
        cwd: where commands start.
        max_live: how many may live at once; `create` waits for a place.
        max_wait: seconds that `create` waits for a place.
        ttl: seconds after which a sandbox is destroyed; the system is told too, where it can be.

    Raises:
        NotOffered: a limit that the system doesn't have.
    """

    #: Name of the system, as `make_sandboxes` knows it.
    kind: ClassVar[str]
    #: The fields of `Limits` that the system keeps.
    sizes: ClassVar[frozenset[str]] = frozenset()

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        max_live: int = 64,
        max_wait: float = 600.0,
        ttl: float = 3600.0,
    ) -> None:
        if max_live < 1 or not ttl > 0:
            raise ConfigError("sandboxes", f"max_live {max_live} or ttl {ttl} is out of range", "1 or more; seconds")
        self.limits = self._checked(limits or Limits())
        self._env, self._cwd, self._ttl = dict(env or {}), cwd, ttl
        self._max_live, self._max_wait = max_live, max_wait
        self._places = asyncio.Semaphore(max_live)
        self._live: dict[Box, asyncio.TimerHandle] = {}
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _checked(self, limits: Limits) -> Limits:
        for field in dataclasses.fields(Limits):
            asked = getattr(limits, field.name)
            if asked != field.default and field.name not in self.sizes | _OURS:
                raise NotOffered(
                    f"limits.{field.name}: {self.kind} sandboxes have no such limit, so {asked} would mean nothing. "
                    f"Leave it at {field.default}"
                )
        return limits

    async def create(
        self,
        *,
        snapshot: Snapshot | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> Box:
        """See the protocol `SandboxPool`.

        Raises:
            NotOffered: a limit, or snapshots, that the system doesn't have.
            ResourceExhausted: no place within `max_wait`.
            SandboxFailure: the system made none.
        """
        if self._closed:
            raise SandboxDead("the pool is closed")
        given = self.limits if limits is None else self._checked(limits)
        seconds = self._ttl if ttl is None else ttl
        try:
            await asyncio.wait_for(self._places.acquire(), self._max_wait)
        except TimeoutError:
            raise ResourceExhausted(f"{self._max_live} live and none ended within {self._max_wait:g} s") from None
        try:
            async with asyncio.timeout(_BIRTH_SECONDS):
                sandbox = await self._make(snapshot, given, {**self._env, **(env or {})}, dict(labels or {}), seconds)
        except TimeoutError:
            self._places.release()
            raise SandboxStall(f"{self.kind} made no sandbox within {_BIRTH_SECONDS:g} s") from None
        except BaseException:
            self._places.release()
            raise
        self._live[sandbox] = asyncio.get_running_loop().call_later(seconds, self._expire, sandbox)
        sandbox._on_end = lambda: self._forget(sandbox)
        return sandbox

    def _forget(self, sandbox: Box) -> None:
        timer = self._live.pop(sandbox, None)
        if timer is not None:
            timer.cancel()
            self._places.release()

    def _expire(self, sandbox: Box) -> None:
        task = asyncio.get_running_loop().create_task(self._destroy(sandbox))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _destroy(self, sandbox: Box) -> None:
        """The system ends what can't be ended now by its own time to live."""
        with contextlib.suppress(SandboxFailure, TimeoutError):
            async with asyncio.timeout(_DEATH_SECONDS):
                await sandbox.destroy()

    async def close(self) -> None:
        """Destroy every sandbox that this pool has made."""
        self._closed = True
        await asyncio.gather(*(self._destroy(sandbox) for sandbox in list(self._live)), *self._endings)
        await self._close()

    @abstractmethod
    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> Box:
        """Have the system make one."""

    async def _close(self) -> None:
        """Let go of the connection to the system."""

    def _own(self, snapshot: Any, kind: type[Any]) -> Any:
        """A snapshot, if it is of this system."""
        if snapshot is not None and not isinstance(snapshot, kind):
            raise SandboxFailure("the snapshot is of another pool")
        return snapshot
