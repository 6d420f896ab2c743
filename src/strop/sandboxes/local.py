"""The embedded sandbox: the host's end of one agent. Made by `LocalPool`; the kernel side is in helper/."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal as signals
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from strop.sandboxes import files, wire
from strop.sandboxes.errors import SandboxDead, SandboxFailure, SandboxStall, failure
from strop.sandboxes.multiplexer import Multiplexer
from strop.sandboxes.running import Running
from strop.sandboxes.sandbox import MIB, Chunk, Command, ExecResult, FileInfo, Limits
from strop.sandboxes.sessions import PythonCells, Shell

if TYPE_CHECKING:
    from strop.sandboxes.pool import LocalPool, LocalSnapshot

#: Seconds that an agent gets to kill a command whose time is over, before the whole sandbox counts as broken. Its own
#: work for that is bounded; under a full machine it may wait long for a core.
KILL_GRACE = 10.0
#: Seconds from the request for a sandbox to its first word, and from its end to the zygote's word of it.
BIRTH_SECONDS, DEATH_SECONDS = 30.0, 10.0


class LocalProcess:
    """A command that runs while others do; see the protocol `Process`."""

    def __init__(self, sandbox: LocalSandbox, id: int, running: Running) -> None:
        self._sandbox, self._id, self._running = sandbox, id, running

    async def write(self, data: bytes) -> None:
        await self._running.write(data)

    async def close_stdin(self) -> None:
        await self._running.close_stdin()

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._running.next_chunk()) is not None:
            yield chunk

    async def signal(self, number: int) -> None:
        await self._sandbox._kill(self._id, wire.Kill.MAIN, number)

    async def interrupt_below(self) -> None:
        """Kill what it has started, but not itself."""
        await self._sandbox._kill(self._id, wire.Kill.BELOW, signals.SIGKILL)

    async def kill(self) -> None:
        if not self._running.result.done():
            await self._sandbox._kill(self._id, wire.Kill.TREE, signals.SIGKILL)

    async def wait(self) -> ExecResult:
        return await asyncio.shield(self._running.result)

    def drain(self) -> None:
        """Take what it has written until now, without waiting."""
        self._running.drain()

    def on_end(self, callback: Callable[[], None]) -> None:
        """Call when it has ended, or its sandbox has."""
        self._running.result.add_done_callback(lambda _: callback())


class LocalSandbox:
    """A sandbox of this machine's kernel; see the protocol `Sandbox`."""

    def __init__(
        self,
        pool: LocalPool,
        number: int,
        agent: socket.socket,
        limits: Limits,
        env: Mapping[str, str],
        labels: Mapping[str, str],
        layers: tuple[int, ...],
    ) -> None:
        self.id = f"{os.getpid()}-{pool.number}-{number}-{next(_serial)}"
        self.labels = dict(labels)
        self.limits = limits
        self._pool, self._number, self._socket, self._layers = pool, number, agent, layers
        self._env = dict(env)
        self._default_env: tuple[bytes, int] | None = None
        self._loop = asyncio.get_running_loop()
        self._multiplexer = Multiplexer.current()
        self._requests = itertools.count(1)
        self._running: dict[int, Running] = {}
        self._oom_kills = 0
        self._ready: asyncio.Future[None] = self._loop.create_future()
        #: Why it is dead; None while it lives.
        self.dead: str | None = None
        self._hung_up = False
        self._ttl: asyncio.TimerHandle | None = None
        self._multiplexer.watch(agent.fileno(), self._receive)

    def __repr__(self) -> str:
        return f"<sandbox {self.id}{f' dead: {self.dead}' if self.dead else ''}>"

    # ---- commands ----

    async def exec(
        self,
        command: Command,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        kill_leftovers: bool = False,
    ) -> ExecResult:
        flags = wire.Flag.KILL_LEFTOVERS if kill_leftovers else 0
        running = Running(self._multiplexer, max_output or self.limits.output, patient=True)
        id = await self._start(running, command, stdin, env, cwd, user, timeout or self.limits.timeout, flags)
        return await self._finish(id, running)

    async def stream(
        self,
        command: Command,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk | ExecResult]:
        running = Running(self._multiplexer, self.limits.output, forward=True)
        id = await self._start(running, command, stdin, env, cwd, user, timeout or self.limits.timeout, 0)
        try:
            while (chunk := await running.next_chunk()) is not None:
                yield chunk
            yield await self._finish(id, running)
        finally:
            await self._abandon(id)

    async def start(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        descriptors: Sequence[int] = (),
        sink: Callable[[str, bytes], None] | None = None,
    ) -> LocalProcess:
        """See the protocol; `descriptors` of this process become 3, 4 … of the command's, `sink` takes its output."""
        running = Running(self._multiplexer, self.limits.output, forward=sink is None, sink=sink)
        id = await self._start(running, command, None, env, cwd, user, timeout, 0, open_stdin=True, extra=descriptors)
        return LocalProcess(self, id, running)

    async def _finish(self, id: int, running: Running) -> ExecResult:
        try:
            return await running.result
        except asyncio.CancelledError:
            await self._abandon(id)
            raise

    async def _abandon(self, id: int) -> None:
        """The caller was cancelled: its command must not go on unseen."""
        if id in self._running:
            await self._kill(id, wire.Kill.TREE, signals.SIGKILL)

    async def _start(
        self,
        running: Running,
        command: Command,
        stdin: bytes | None,
        env: Mapping[str, str] | None,
        cwd: str | None,
        user: str | int | None,
        timeout: float | None,
        flags: int,
        open_stdin: bool = False,
        extra: Sequence[int] = (),
    ) -> int:
        arguments = ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)
        if not arguments:
            raise ValueError("a command needs at least its program's name")
        user = self._pool.image.user if user is None else user
        identity = files.ROOT if user is None else await files.find_user(self, user)
        variables, count = self._variables(env, identity)
        payload = b"\0".join([(cwd or self._pool.image.cwd).encode(), *map(_encode, arguments)]) + b"\0" + variables
        if payload.count(b"\0") != 1 + len(arguments) + count:
            raise ValueError("a command, its directory or its environment holds a NUL byte")
        id = next(self._requests)
        has_input = stdin is not None or open_stdin
        given: list[int] = []
        self.check_alive()
        try:
            if has_input:
                given.append(running.open_input(stdin))
            given.append(running.open_output("stdout"))
            given.append(running.open_output("stderr"))
            message = wire.request(
                wire.Ask.EXEC, id, flags=flags if has_input else flags | wire.Flag.NULL_STDIN, uid=identity.uid, gid=identity.gid,
                groups=identity.groups, arguments=len(arguments), variables=count, payload=len(payload),
            )  # fmt: skip
            self._running[id] = running
            running.oom_kills_before = self._oom_kills
            running.begin(timeout, lambda: self._expire(id, running))
            await self._send(message, payload, (*given, *extra))
        except BaseException as error:
            self._running.pop(id, None)
            running.fail(SandboxDead("the command was not started"))
            if isinstance(error, OSError):
                raise failure("open a pipe", error.errno or 0) from None
            raise
        finally:
            for fd in given:
                os.close(fd)
        return id

    def _variables(self, env: Mapping[str, str] | None, identity: files.Identity) -> tuple[bytes, int]:
        """The environment as NUL-ended strings, and their number."""
        if env is None and identity is files.ROOT:
            if self._default_env is None:
                self._default_env = _pack({"HOME": "/root", **self._env})
            return self._default_env
        return _pack({"HOME": identity.home, **self._env, **(env or {})})

    async def shell(self) -> Shell:
        """See the protocol."""
        return await Shell.open(self)

    async def python(self, preload: Sequence[str] = ()) -> PythonCells:
        """See the protocol."""
        return await PythonCells.open(self, preload)

    # ---- files ----

    async def get(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        return await files.read(self, path, max_bytes)

    async def put(self, path: str, data: bytes, *, mode: int = 0o644, user: str | int | None = None) -> None:
        await files.write(self, path, data, mode, user)

    async def get_archive(self, path: str, *, max_bytes: int = 256 * MIB) -> bytes:
        return await files.read_tree(self, path, max_bytes)

    async def changes(self, *, max_bytes: int = 4096 * MIB) -> bytes:
        """What was written, changed and removed since it was made, as a tar archive in the form of an OCI layer."""
        return await files.read_changes(self, max_bytes)

    async def put_archive(self, path: str, archive: bytes, *, user: str | int | None = None) -> None:
        await files.write_tree(self, path, archive, user)

    async def list(self, path: str) -> list[FileInfo]:
        return await files.list_folder(self, path)

    async def file_operation(
        self,
        operation: wire.Files,
        path: str,
        *,
        stdin: bytes | None = None,
        mode: int = 0,
        limit: int = 0,
        keep: int = MIB,
        identity: files.Identity | None = None,
        descriptors: Sequence[int] = (),
    ) -> ExecResult:
        """Ask the agent for a file operation, which may get more descriptors; its errno value is the exit code."""
        identity = identity or files.ROOT
        payload = b"/\0" + _encode(path) + b"\0"
        if payload.count(b"\0") != 2:
            raise ValueError(f"{path!r} holds a NUL byte")
        self.check_alive()
        running, id, given = Running(self._multiplexer, keep), next(self._requests), []
        try:
            if stdin is not None:
                given.append(running.open_input(stdin))
            given.append(running.open_output("stdout"))
            given.append(running.open_output("stderr"))
            self._running[id] = running
            running.begin(self.limits.timeout, lambda: self._expire(id, running))
            message = wire.request(
                wire.Ask.FILES, id, flags=0 if stdin is not None else wire.Flag.NULL_STDIN, uid=identity.uid, gid=identity.gid,
                groups=identity.groups, arguments=1, operation=operation, mode=mode, limit=limit, payload=len(payload),
            )  # fmt: skip
            await self._send(message, payload, (*given, *descriptors))
        except BaseException as error:
            self._running.pop(id, None)
            running.fail(SandboxDead("the command was not started"))
            if isinstance(error, OSError):
                raise failure("open a pipe", error.errno or 0) from None
            raise
        finally:
            for fd in given:
                os.close(fd)
        return await self._finish(id, running)

    # ---- the agent's socket ----

    async def _send(self, message: bytes, payload: bytes, fds: Sequence[int]) -> None:
        if len(message) + len(payload) > wire.MAX_MESSAGE:
            await self._send_large(message, payload, fds)
        else:
            await self._send_parts([message, payload], fds)

    async def _send_large(self, message: bytes, payload: bytes, fds: Sequence[int]) -> None:
        if len(payload) > wire.MAX_PAYLOAD:
            raise ValueError(f"arguments and environment have {len(payload)} bytes; at most {wire.MAX_PAYLOAD}")
        memory = os.memfd_create("command", os.MFD_CLOEXEC)
        try:
            view = memoryview(payload)
            while view:
                view = view[os.write(memory, view) :]
            flags = int.from_bytes(message[8:12], "little") | wire.Flag.MEMORY_FILE
            await self._send_parts([message[:8] + flags.to_bytes(4, "little") + message[12:]], [*fds, memory])
        finally:
            os.close(memory)

    async def _send_parts(self, parts: Sequence[bytes], fds: Sequence[int]) -> None:
        deadline = self._loop.time() + KILL_GRACE
        while True:
            try:
                socket.send_fds(self._socket, parts, fds) if fds else self._socket.sendmsg(parts)
                return
            except BlockingIOError:  # the agent is behind with reading
                if self._loop.time() > deadline:
                    raise SandboxStall(f"sandbox {self.id} has not read for {KILL_GRACE:g} s") from None
                await asyncio.sleep(0.002)
            except OSError:
                self.check_alive()
                raise SandboxDead(f"sandbox {self.id} is gone") from None

    async def _kill(self, id: int, scope: wire.Kill, number: int) -> None:
        if self.dead is None and not self._hung_up:
            await self._send_parts([wire.request(wire.Ask.KILL, id, operation=scope, mode=number)], ())

    def _expire(self, id: int, running: Running) -> None:
        running.timed_out = True
        running.call_after(KILL_GRACE, self._break, f"its agent did not kill a command within {KILL_GRACE:g} s")
        task = self._loop.create_task(self._kill(id, wire.Kill.TREE, signals.SIGKILL))
        _background.add(task)
        task.add_done_callback(_background.discard)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(wire.REPLY_SIZE + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up("its agent ended")
            return
        try:
            reply = wire.parse_reply(data)
            if reply.kind is wire.Reply.EXIT:
                self._ended(reply)
            elif reply.kind is wire.Reply.READY and not self._ready.done():
                self._answer_ready(reply)
            else:
                raise ValueError("a second READY")
        except (ValueError, KeyError) as error:
            self._break(f"its agent sent something else than a reply: {error}")

    def _answer_ready(self, reply: wire.AgentReply) -> None:
        if reply.error:
            self._ready.set_exception(failure(reply.stage, reply.error))
        elif reply.id != wire.VERSION:
            self._ready.set_exception(
                SandboxFailure(f"the helper speaks version {reply.id}, not {wire.VERSION}: reinstall strop")
            )
        else:
            self._ready.set_result(None)

    def _ended(self, reply: wire.AgentReply) -> None:
        running = self._running.pop(reply.id)
        kills = max(0, reply.oom_kills - running.oom_kills_before)
        self._oom_kills = max(self._oom_kills, reply.oom_kills)
        error, signal, code = None, None, 0
        if reply.error:
            code = 127 if reply.error == 2 else 126
            error = f"could not {_STAGES.get(reply.stage, 'start (' + reply.stage + ')')}: {os.strerror(reply.error)}"
        elif os.WIFSIGNALED(reply.status):
            signal = os.WTERMSIG(reply.status)
            code = 128 + signal
        else:
            code = os.WEXITSTATUS(reply.status)
        running.end(code, signal, kills, reply.cpu_us / 1e6, reply.peak_rss_kib << 10, error)

    async def stop(self, stopped: bool) -> None:
        """Send every program of it the signal to stop, or to go on: where no control group can freeze them."""
        self.check_alive()
        await self._kill(0, wire.Kill.ALL, signals.SIGSTOP if stopped else signals.SIGCONT)
        await self.file_operation(wire.Files.LIST, "/dev/shm")  # requests are answered in order: the signals are sent

    # ---- life and death ----

    def set_ttl(self, seconds: float | None) -> None:
        """Destroy it after `seconds`, whatever it does."""
        if seconds is not None:
            self._ttl = self._loop.call_later(seconds, self._break, f"its time to live of {seconds:g} s is over")

    async def wait_ready(self) -> None:
        """Wait, once, for the agent's first word.

        Raises:
            SandboxFailure: it could not be made, or did not answer in time.
        """
        timer = self._loop.call_later(BIRTH_SECONDS, self._be_late)
        try:
            await self._ready
        finally:
            timer.cancel()

    def _be_late(self) -> None:
        if not self._ready.done():
            self._ready.set_exception(SandboxStall(f"sandbox {self.id} was not ready within {BIRTH_SECONDS:g} s"))
        self._break("it was not ready in time")

    def check_alive(self) -> None:
        """Raise SandboxDead, with the reason, if it is."""
        if self.dead is not None:
            raise SandboxDead(f"sandbox {self.id} is dead: {self.dead}")
        if self._hung_up:
            raise SandboxDead(f"sandbox {self.id} is ending")

    def _break(self, reason: str) -> None:
        """It can't be trusted any more, or its time is over: end it for this reason."""
        if self.dead is None:
            self._pool.kill(self._number)
            self.bury(reason)

    def _hang_up(self, reason: str) -> None:
        """The agent's socket is closed; the zygote knows why and will say so, unless it is gone too."""
        if self._hung_up or self.dead is not None:
            return
        self._hung_up = True
        self._multiplexer.forget(self._socket.fileno())
        self._socket.close()
        self._pool.kill(self._number)
        self._loop.call_later(DEATH_SECONDS, self.bury, reason)

    def bury(self, reason: str) -> None:
        """It is dead: answer everyone who waits."""
        if self.dead is not None:
            return
        self.dead = reason
        if self._ttl is not None:
            self._ttl.cancel()
        if self._socket.fileno() >= 0:
            self._multiplexer.forget(self._socket.fileno())
            self._socket.close()
        error = SandboxDead(f"sandbox {self.id} is dead: {reason}")
        if not self._ready.done():
            self._ready.set_exception(error)
        if not self._ready.cancelled():
            self._ready.exception()  # whoever made it may have gone: not an unretrieved error then
        for running in self._running.values():
            running.fail(error)
        self._running.clear()

    async def snapshot(self) -> LocalSnapshot:
        self.check_alive()
        return await self._pool.take_snapshot(self._number, self._layers, self.limits)

    async def fork(self, count: int) -> Sequence[LocalSandbox]:
        snapshot = await self.snapshot()
        try:
            return await asyncio.gather(
                *(
                    self._pool.create(snapshot=snapshot, limits=self.limits, env=self._env, labels=self.labels)
                    for _ in range(count)
                )
            )
        finally:
            await snapshot.delete()

    async def pause(self) -> None:
        self.check_alive()
        await self._pool.freeze(self._number, True)

    async def resume(self) -> None:
        self.check_alive()
        await self._pool.freeze(self._number, False)

    async def destroy(self) -> None:
        await self._pool.destroy(self, self._number)


_serial = itertools.count()
_background: set[asyncio.Task[None]] = set()
_STAGES: Mapping[str, str] = {
    "execute": "run the program",
    "working directory": "enter the working directory",
    "user": "become the user",
    "fork": "start a process (the limit of processes may be reached)",
}


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _pack(env: Mapping[str, str]) -> tuple[bytes, int]:
    for name in env:
        if not name or "=" in name:
            raise ValueError(f"{name!r} can't be the name of a variable")
    return b"".join(_encode(name) + b"=" + _encode(value) + b"\0" for name, value in env.items()), len(env)
