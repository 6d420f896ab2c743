"""The agent in Python: process 1 of a sandbox. Starts commands and file operations, reaps, and reports over one socket;
helper/agent.c in Python. It ends when the host closes the socket."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Sequence

from strop.sandboxes import wire
from strop.sandboxes.portable.files import run_file_operation
from strop.sandboxes.portable.kernel import PR_SET_CHILD_SUBREAPER, prctl
from strop.sandboxes.portable.layers import apply_layer
from strop.sandboxes.portable.processes import kill_processes
from strop.sandboxes.portable.world import SetUpError, set_up
from strop.sandboxes.wire import AgentRequest, Ask, Files, Flag, Kill

_MAX_FDS = 8
#: Received descriptors are numbered above those of commands, so that dup2 onto these never overwrites one still needed.
_ABOVE = 32


class _Command:
    """A command whose main process lives."""

    def __init__(self, id: int, flags: int, pid: int) -> None:
        self.id, self.flags, self.pid = id, flags, pid


class _Failed(Exception):
    """Args: stage and errno value."""


def _execute(arguments: list[bytes], environment: dict[bytes, bytes]) -> None:
    """Like execvpe(3) with the command's own PATH, but an absent PATH means none, and EACCES is not forgotten."""
    name, path = arguments[0], environment.get(b"PATH")
    if b"/" in name or path is None:
        os.execve(name, arguments, environment)
    kept = errno.ENOENT
    for folder in filter(None, path.split(b":")):
        try:
            os.execve(folder + b"/" + name, arguments, environment)
        except OSError as error:
            if error.errno == errno.EACCES:
                kept = errno.EACCES
            elif error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
    raise OSError(kept, os.strerror(kept))


class Agent:
    """Serves one host.

    Args:
        host: the socket to it.
        upper: descriptor of the writable layer.
        oom_counter: descriptor of a control group's counter; None without one.
    """

    def __init__(self, host: socket.socket, upper: int, oom_counter: int | None) -> None:
        self._host, self._upper, self._oom_counter = host, upper, oom_counter
        self._commands: dict[int, _Command] = {}
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)

    def serve(self) -> None:
        """Answer until the host is gone."""
        woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._reply(wire.Reply.READY, wire.VERSION)
        poll = select.poll()
        for fd in (self._host.fileno(), woken):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == woken:
                    os.read(woken, 4096)
                else:
                    self._handle_message()
            self._reap()

    def _reply(self, kind: wire.Reply, id: int, **fields: int | str) -> None:
        message = wire.reply(kind, id, oom_kills=self._oom_kills(), **fields)  # type: ignore[arg-type]
        try:
            self._host.send(message, socket.MSG_NOSIGNAL)
        except OSError:
            os._exit(0)

    def _oom_kills(self) -> int:
        text = b"" if self._oom_counter is None else os.pread(self._oom_counter, 512, 0)
        _, found, after = text.partition(b"oom_kill ")
        return int(after.split()[0]) if found else 0

    # ---- messages ----

    def _handle_message(self) -> None:
        data, ancillary, flags, _ = self._host.recvmsg(
            wire.MAX_MESSAGE, socket.CMSG_SPACE(4 * 2 * _MAX_FDS), socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            os._exit(0)  # closed: the kernel kills what is left in this pid namespace
        if len(data) < wire.REQUEST_SIZE or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            os._exit(71)  # can't even be answered: the host speaks another language
        fds = _take_descriptors(ancillary)
        request, payload = wire.parse_request(data)
        try:
            if request.kind is Ask.KILL:
                self._kill(request)
                return
            if request.flags & Flag.MEMORY_FILE:
                payload = _read_memory_file(fds.pop(), request.payload)
            if len(payload) != request.payload:
                raise _Failed("message", errno.EBADMSG)
            self._start(request, payload, fds)
        except _Failed as failed:
            stage, error = failed.args
            self._reply(wire.Reply.EXIT, request.id, error=error, stage=stage)
        finally:
            for fd in fds:
                os.close(fd)

    def _kill(self, request: AgentRequest) -> None:
        command = self._commands.get(request.id)
        scope = Kill(request.operation)
        spared = [other.pid for other in self._commands.values() if other is not command]
        if command is not None or scope in (Kill.LEFTOVERS, Kill.ALL):
            kill_processes(scope, command.pid if command else 0, spared, request.mode)

    def _start(self, request: AgentRequest, payload: bytes, fds: list[int]) -> None:
        parts = payload.split(b"\0")
        if len(parts) != 2 + request.arguments + request.variables or parts[-1] or not request.arguments:
            raise _Failed("message", errno.EBADMSG)
        folder, arguments = parts[0], parts[1 : 1 + request.arguments]
        if request.kind is Ask.FILES:
            pid = _fork(lambda report: self._run_files(request, arguments[0], fds))
        else:
            environment = dict(variable.split(b"=", 1) for variable in parts[1 + request.arguments : -1])
            pid = _fork(lambda report: self._run_command(request, folder, arguments, environment, fds, report))
        self._commands[request.id] = _Command(request.id, request.flags if request.kind is Ask.EXEC else 0, pid)

    # ---- in the child ----

    def _place_descriptors(self, request: AgentRequest, fds: Sequence[int], kept: Sequence[int]) -> None:
        given = [self._null, *fds] if request.flags & Flag.NULL_STDIN else list(fds)
        for number, fd in enumerate(given):
            os.dup2(fd, number)
        low = len(given)
        for fd in sorted(kept):
            os.closerange(low, fd)
            low = fd + 1
        os.closerange(low, 1 << 16)

    def _run_command(
        self,
        request: AgentRequest,
        folder: bytes,
        arguments: list[bytes],
        environment: dict[bytes, bytes],
        fds: Sequence[int],
        report: int,
    ) -> None:
        stage = "descriptors"
        try:
            os.setsid()
            # Before any path is looked up: none may lead to a descriptor of ours.
            self._place_descriptors(request, fds, [report])
            prctl(PR_SET_CHILD_SUBREAPER, 1)  # kept over execve: see processes.py
            stage = "user"
            _become_user(request)
            stage = "working directory"
            os.chdir(folder)
            stage = "execute"
            _execute(arguments, environment)
        except OSError as error:
            os.write(report, struct.pack("i", error.errno or errno.EINVAL) + stage.encode())

    def _run_files(self, request: AgentRequest, path: bytes, fds: list[int]) -> None:
        target = fds.pop() if request.operation == Files.SNAPSHOT else -1
        self._place_descriptors(request, fds, [fd for fd in (self._upper, target) if fd >= 0])
        try:
            if target >= 0:
                os.umask(0)
                apply_layer(self._upper, target)
                os._exit(0)
            _become_user(request)
        except OSError as error:
            os._exit(error.errno or errno.EIO)
        os._exit(run_file_operation(request, path, self._upper))

    # ---- reaping ----

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            ended = next((command for command in self._commands.values() if command.pid == pid), None)
            if ended is None:
                continue
            del self._commands[ended.id]
            if ended.flags & Flag.KILL_LEFTOVERS:
                kill_processes(Kill.LEFTOVERS, 0, [other.pid for other in self._commands.values()], signal.SIGKILL)
            cpu = round((usage.ru_utime + usage.ru_stime) * 1e6)
            self._reply(wire.Reply.EXIT, ended.id, status=status, cpu_us=cpu, peak_rss_kib=usage.ru_maxrss)


def _become_user(request: AgentRequest) -> None:
    try:
        os.setgroups(request.groups)
    except PermissionError:  # of a map of one id, where it can't be and root's list need not
        if request.groups:
            raise
    os.setresgid(request.gid, request.gid, request.gid)
    os.setresuid(request.uid, request.uid, request.uid)


def _fork(run: Callable[[int], None]) -> int:
    """Run something in a child, which is given a pipe to say what failed before it executed; returns its pid."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    report = fcntl.fcntl(writing, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
    os.close(writing)
    try:
        pid = os.fork()
    except OSError as error:
        os.close(report)
        os.close(reading)
        raise _Failed("fork", error.errno) from None
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _volunteer()
            run(report)
        finally:
            os._exit(127)
    os.close(report)
    said = os.read(reading, 64)  # nothing, once it has executed or closed its end
    os.close(reading)
    if said:
        os.waitpid(pid, 0)
        raise _Failed(said[4:].decode(), struct.unpack("i", said[:4])[0])
    return pid


def _volunteer() -> None:
    """Be the one that the kernel kills when the sandbox's memory is spent: this agent is larger than many a command."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")


def _take_descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    taken: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) != (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            continue
        for (fd,) in struct.iter_unpack("i", data[: len(data) // 4 * 4]):
            if len(taken) < _MAX_FDS:
                taken.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
            os.close(fd)
    return taken


def _read_memory_file(fd: int, size: int) -> bytes:
    try:
        if not 0 < size <= wire.MAX_PAYLOAD or os.fstat(fd).st_size < size:
            raise _Failed("message", errno.EBADMSG)
        with mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory:
            return memory[:]
    finally:
        os.close(fd)


def main(host: int, specification: int, oom_counter: int | None = None) -> None:
    """Become a sandbox and serve.

    Args:
        host: descriptor of the socket to the host.
        specification: descriptor of a file that holds what `set_up` takes, as JSON.
        oom_counter: see `Agent`.
    """
    for number in range(1, signal.NSIG):  # what the host ignores must not be ignored by commands
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):
            continue
    with os.fdopen(specification) as file:
        specified = json.load(file)
    kept = sorted(fd for fd in (2, host, oom_counter) if fd is not None)  # 2: where it is said what is wrong with us
    low = 0
    for fd in kept:
        os.set_inheritable(fd, fd == 2)
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 1 << 16)
    for _ in range(2):  # descriptors below 3 are commands' own
        os.open(os.devnull, os.O_RDWR)
    link = socket.socket(fileno=host)
    try:
        upper = set_up(specified)
    except SetUpError as error:
        link.send(wire.reply(wire.Reply.READY, wire.VERSION, error=error.error, stage=error.stage), socket.MSG_NOSIGNAL)
        return
    Agent(link, upper, oom_counter).serve()
