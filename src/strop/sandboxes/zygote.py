"""The host's end of one zygote process: starting it, asking it, and noticing its end."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

from strop.sandboxes import wire
from strop.sandboxes.cgroups import CgroupRoots, new_owner, remove_owner
from strop.sandboxes.errors import ResourceExhausted, SandboxesUnavailable, SandboxFailure, SandboxStall, failure
from strop.sandboxes.idmaps import BASE_ID, IdMap
from strop.sandboxes.images import Image
from strop.sandboxes.multiplexer import Multiplexer

HELPER = Path(__file__).parent / "zygote_helper"
#: Seconds for anything that the zygote does by itself. Copying a layer has its own limit.
ANSWER_SECONDS = 20.0
COPY_SECONDS = 300.0


class Zygote:
    """One running zygote. Not restarted: a pool makes a new one.

    Attributes:
        alive: False once it has ended.
    """

    def __init__(
        self,
        image: Image,
        cgroups: CgroupRoots,
        ids: IdMap,
        on_dead: Callable[[wire.ZygoteEvent], None],
        on_end: Callable[[], None],
    ) -> None:
        self.alive = False
        self.pid = 0
        self._image, self._cgroups, self._ids, self._owner = image, cgroups, ids, new_owner()
        self._on_dead, self._on_end = on_dead, on_end
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[wire.ZygoteEvent]] = {}
        self._births: dict[int, Callable[[wire.ZygoteEvent], None]] = {}

    async def start(self) -> None:
        """Start the process and wait until it can make sandboxes.

        Raises:
            SandboxesUnavailable: it can't; says at which step and why.
        """
        if not HELPER.exists():
            raise SandboxesUnavailable(f"{HELPER} was not built. Install a C compiler and reinstall strop")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket, self._multiplexer = ours, Multiplexer.current()
        ours.setblocking(False)
        os.set_inheritable(theirs.fileno(), True)
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)] + [(os.POSIX_SPAWN_DUP2, theirs.fileno(), 3)]
        # The name is what /proc/1/cmdline shows inside a sandbox; no arguments and no environment leak into it.
        self.pid = os.posix_spawn(HELPER, ["sandbox"], {}, file_actions=actions)  # noqa: ASYNC221 -- half a millisecond
        self._pidfd = os.pidfd_open(self.pid)
        os.close(null)
        theirs.close()
        self._multiplexer.watch(ours.fileno(), self._receive)
        self._expect_start()
        self._send_specification()
        try:
            event = await asyncio.wait_for(self._started, ANSWER_SECONDS)
            if event.kind is wire.Event.UNMAPPED:
                self._expect_start()
                await asyncio.to_thread(self._ids.apply, self.pid)
                ours.send(b"mapped")
                event = await asyncio.wait_for(self._started, ANSWER_SECONDS)
        except TimeoutError:
            await self.close()
            raise SandboxStall(f"the zygote did not start within {ANSWER_SECONDS:g} s") from None
        except SandboxFailure as error:
            await self.close()
            raise SandboxesUnavailable(f"sandboxes can't be made here: {error.reason}") from None
        if event.kind is not wire.Event.STARTED:
            await self.close()
            raise SandboxesUnavailable(
                f"sandboxes can't be made here: could not {event.stage}: {os.strerror(event.error)}"
            )
        self.alive = True

    def _expect_start(self) -> None:
        self._started: asyncio.Future[wire.ZygoteEvent] = asyncio.get_running_loop().create_future()

    def _send_specification(self) -> None:
        users = f"base {BASE_ID}" if self._ids.writer == "root" else f"rootless {self._ids.count}"
        lines, fds = [f"owner {self._owner}", users], []
        try:
            for name, folder in self._cgroups.folders.items():
                lines.append(f"cgroup {name}")
                fds.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            for layer in self._image.layers:
                lines.append("lower")
                fds.append(os.open(layer, os.O_PATH | os.O_DIRECTORY))
            for source, target in self._image.binds:
                lines.append(f"bind {target}")
                fds.append(os.open(source, os.O_PATH))
            socket.send_fds(self._socket, ["\n".join(lines).encode()], fds)
        finally:
            for fd in fds:
                os.close(fd)

    # ---- asking ----

    def create(
        self, id: int, message: bytes, agent_end: socket.socket, on_failure: Callable[[wire.ZygoteEvent], None]
    ) -> None:
        """Ask for a sandbox; readiness comes over the agent's own socket, failure to `on_failure`."""
        self._births[id] = on_failure
        self.send(message, agent_end)

    def born(self, id: int) -> None:
        """The sandbox has answered: failures of its making can no longer come."""
        self._births.pop(id, None)

    def send(self, message: bytes, end: socket.socket | None = None) -> None:
        """Send a control message.

        Raises:
            SandboxFailure: the zygote is gone, or has not read for long.
        """
        try:
            if end is None:
                self._socket.send(message)
            else:
                socket.send_fds(self._socket, [message], [end.fileno()])
        except BlockingIOError:
            raise ResourceExhausted("the zygote has more requests waiting than its socket holds") from None
        except OSError as error:
            raise SandboxFailure(f"the zygote is gone: {error.strerror}") from None

    async def ask(
        self, kind: wire.Control, seconds: float = ANSWER_SECONDS, *, token: int | None = None, **fields: object
    ) -> None:
        """Send a request that is answered by DONE, and wait for that."""
        token = self.token() if token is None else token
        future = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            self.send(wire.control(kind, layer=token, **fields))  # type: ignore[arg-type]
            event = await asyncio.wait_for(future, seconds)
        except TimeoutError:
            raise SandboxStall(f"the zygote did not answer {kind.name.lower()} within {seconds:g} s") from None
        finally:
            self._waiting.pop(token, None)
        if event.error:
            raise failure(event.stage, event.error)

    def token(self) -> int:
        """A new number, for a request or a layer."""
        return next(self._tokens)

    # ---- hearing ----

    def _receive(self) -> None:
        for _ in range(64):
            try:
                data = self._socket.recv(wire.EVENT_SIZE + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end()
                return
            self._handle(wire.parse_event(data))

    def _handle(self, event: wire.ZygoteEvent) -> None:
        if event.kind is wire.Event.DEAD:
            self._births.pop(event.id, None)
            self._on_dead(event)
        elif event.kind is wire.Event.DONE:
            future = self._waiting.get(event.id)
            if future and not future.done():
                future.set_result(event)
        elif not self._started.done():
            self._started.set_result(event)
        elif event.kind is wire.Event.FAILED:
            on_failure = self._births.pop(event.id, None)
            if on_failure:
                on_failure(event)

    def _end(self) -> None:
        if self._socket.fileno() < 0:
            return
        self.alive = False
        self._multiplexer.forget(self._socket.fileno())
        self._socket.close()
        gone = wire.ZygoteEvent(wire.Event.FAILED, 0, errno.EPIPE, 0, 0, "reach the zygote")
        for future in [self._started, *self._waiting.values()]:
            if not future.done():
                future.set_result(gone)
        for on_failure in list(self._births.values()):
            on_failure(gone)
        self._births.clear()
        self._on_end()

    async def close(self) -> None:
        """End it, and with it every sandbox; returns when all is cleaned up."""
        if self._pidfd < 0:
            return
        self._end()
        pidfd, self._pidfd = self._pidfd, -1
        ended = asyncio.Event()
        self._multiplexer.watch(pidfd, ended.set)
        try:
            await asyncio.wait_for(ended.wait(), ANSWER_SECONDS)
        except TimeoutError:
            os.kill(self.pid, 9)
        finally:
            self._multiplexer.forget(pidfd)
            os.close(pidfd)
        await asyncio.to_thread(self._clear_up)
        self._multiplexer.release()

    def _clear_up(self) -> None:
        os.waitpid(self.pid, 0)
        remove_owner(self._cgroups, self._owner)  # only a zygote that was killed leaves any
