"""Makes sandboxes with bubblewrap and the agent in Python, for machines where the helper in C was not built.

The same surface as `Zygote`, so that the pool above cannot tell them apart. Bubblewrap makes the namespaces; the agent
(portable/) does the rest inside and speaks the helper's protocol. Snapshots are folders of the host's disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from strop.sandboxes import wire
from strop.sandboxes.cgroups import CgroupRoots, new_owner, remove_owner, start_time
from strop.sandboxes.errors import SandboxesUnavailable, SandboxFailure, SandboxStall, failure
from strop.sandboxes.groups import Groups
from strop.sandboxes.idmaps import BASE_ID, IdMap
from strop.sandboxes.images import Image
from strop.sandboxes.local import LocalSandbox
from strop.sandboxes.multiplexer import Multiplexer

_HERE = Path(__file__).parent
FILTER = _HERE / "filters" / f"{platform.machine()}.bpf"
#: Seconds for bubblewrap's word of its child, for one of its small jobs, and for copying a layer.
_BIRTH_SECONDS, _JOB_SECONDS = 20.0, 300.0
_MODULES = ("agent", "files", "kernel", "layers", "processes", "world")


def find_interpreter() -> str | None:
    """A Python for the agent: any user must be able to run it, if sandboxes are another user's than this process's."""
    for path in (getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        if path and Path(path).exists() and (os.geteuid() != 0 or _is_open_to_all(Path(path).resolve())):
            return str(path)
    return None


def _is_open_to_all(path: Path) -> bool:
    return all(part.stat().st_mode & 0o001 for part in (path, *path.parents))


async def _readable(fd: int) -> None:
    """Wait until a descriptor can be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)


class _Child:
    """One bubblewrap process and the first process inside."""

    def __init__(self, process: subprocess.Popen[bytes], information: int, go: int) -> None:
        self.process, self.pidfd = process, os.pidfd_open(process.pid)
        self.inner = -1  # pidfd of the first process inside
        self.born, self.problem = False, ""
        self._information, self._go = information, go

    async def bear(self, ids: IdMap, groups: Groups | None) -> None:
        """Learn which process is the first inside, give it ids and limits, and let it go on.

        Raises:
            SandboxFailure, OSError: what failed.
        """
        try:
            said = await asyncio.wait_for(self._hear(), _BIRTH_SECONDS)
        except TimeoutError:
            raise SandboxStall(f"bubblewrap did not start within {_BIRTH_SECONDS:g} s") from None
        pid = int(json.loads(said)["child-pid"])
        self.inner = os.pidfd_open(pid)
        await asyncio.to_thread(ids.apply, pid) if ids.writer == "newuidmap" else ids.apply(pid)
        if groups is not None:
            groups.attach(pid)
        self._let_go()
        self.born = True

    async def _hear(self) -> bytes:
        """What bubblewrap says of its child: one object of JSON, which comes in pieces."""
        said = b""
        while not said.endswith(b"}\n"):
            await _readable(self._information)
            piece = os.read(self._information, 4096)
            if not piece:
                raise SandboxFailure(f"bubblewrap ended: {self.last_words()}")
            said += piece
        return said

    async def ended(self) -> None:
        """Wait for its end."""
        await _readable(self.pidfd)

    def _let_go(self) -> None:
        """Bubblewrap waits for a byte or the end of the pipe."""
        if self._go >= 0:
            os.close(self._go)
            self._go = -1

    def kill(self) -> None:
        """End it, by the first process inside. If that is not known yet it goes on without ids, which it can't: to kill
        bubblewrap itself in this state would leave that process waiting for ever."""
        if self.inner >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.inner, signal.SIGKILL)
        self._let_go()

    def last_words(self) -> str:
        """What it wrote to its standard error."""
        assert self.process.stderr is not None
        os.set_blocking(self.process.stderr.fileno(), False)
        said = (self.process.stderr.read() or b"").decode("utf-8", "replace").strip().splitlines()
        return said[-1] if said else "it said nothing"

    def close(self) -> int:
        """Reap it, once it has ended; returns its exit code as subprocess counts."""
        status = self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        for fd in (self.pidfd, self.inner, self._information, self._go):
            if fd >= 0:
                os.close(fd)
        self.pidfd = self.inner = -1
        return status


class Bubblewrap:
    """Makes the sandboxes of one image; see `Zygote`, whose surface this is.

    Args:
        image: their root file system.
        cgroups: where limits are set.
        ids: the users inside.
        on_dead: called when a sandbox has ended, with the event and the reason, if it is known.
        find: a live sandbox by its number.
    """

    def __init__(
        self,
        image: Image,
        cgroups: CgroupRoots,
        ids: IdMap,
        on_dead: Callable[..., None],
        find: Callable[[int], LocalSandbox | None],
    ) -> None:
        self.alive = False
        self._image, self._cgroups, self._ids = image, cgroups, ids
        self._on_dead, self._find = on_dead, find
        self._owner = new_owner()
        self._tokens = itertools.count(1)
        self._children: dict[int, _Child] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Prepare a folder for the agent's source and for snapshots, and try bubblewrap.

        Raises:
            SandboxesUnavailable: it does not work here; says why.
        """
        interpreter = find_interpreter()
        if interpreter is None or shutil.which("bwrap") is None or not FILTER.exists():
            raise SandboxesUnavailable("bubblewrap, a seccomp filter or a Python that all users may run is missing")
        self._interpreter = interpreter
        await asyncio.to_thread(self._prepare)
        try:
            await self._run_inside(["/bin/true"])
        except (SandboxFailure, OSError) as error:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
            raise SandboxesUnavailable(f"sandboxes can't be made with bubblewrap here: {error}") from None
        self.alive = True

    def _prepare(self) -> None:
        _remove_stale_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self._owner}-"))
        package = self._folder / "agent" / "strop" / "sandboxes" / "portable"
        package.mkdir(parents=True)
        for folder in (package, package.parent, package.parent.parent):
            (folder / "__init__.py").touch()
        for module in _MODULES:
            shutil.copyfile(_HERE / "portable" / f"{module}.py", package / f"{module}.py")
        shutil.copyfile(_HERE / "wire.py", package.parent / "wire.py")
        shutil.copyfile(FILTER, self._folder / "filter")
        for path in (self._folder, *self._folder.rglob("*")):  # whatever the umask: sandboxes' root must see these
            path.chmod(0o755 if path.is_dir() else 0o644)
        (self._folder / "snapshots").mkdir(mode=0o700)
        if self._ids.writer == "root":
            os.chown(self._folder / "snapshots", BASE_ID, BASE_ID)
        self._layers = [self._own(number, layer) for number, layer in enumerate(self._image.layers)]

    def _own(self, number: int, layer: Path) -> Path:
        """A layer as sandboxes may use it. What root owns is nobody's inside, so root's layers are copied."""
        if self._ids.writer != "root":
            return layer
        copy = self._folder / f"layer-{number}"
        shutil.copytree(layer, copy, symlinks=True)
        for path in (copy, *copy.rglob("*")):
            status = path.lstat()
            os.chown(path, BASE_ID + status.st_uid, BASE_ID + status.st_gid, follow_symlinks=False)
            if not path.is_symlink():
                path.chmod(status.st_mode & 0o7777)  # which a change of owner takes the set-id bits from
        return copy

    # ---- processes ----

    def _spawn(self, command: Sequence[str], writable: Sequence[Path] = (), given: Sequence[int] = ()) -> _Child:
        """Start bubblewrap with some descriptors; the command waits inside for its ids."""
        information, told = os.pipe2(os.O_CLOEXEC)
        awaited, go = os.pipe2(os.O_CLOEXEC)
        options = [
            "--unshare-user", "--uid", "0", "--gid", "0", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
            "--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1", "--new-session", "--cap-add", "ALL",
            "--info-fd", str(told), "--userns-block-fd", str(awaited), "--ro-bind", "/", "/", "--dev", "/dev", "--dir", "/dev/strop",
            "--proc", "/proc", "--chdir", "/",
        ]  # fmt: skip
        for path in writable:
            options += ["--bind", str(path), str(path)]
        program = shutil.which("bwrap") or "bwrap"
        as_user = {"user": BASE_ID, "group": BASE_ID, "extra_groups": []} if self._ids.writer == "root" else {}
        try:
            process = subprocess.Popen(  # type: ignore[call-overload]
                [program, *options, *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                pass_fds=[told, awaited, *given], cwd="/", env={}, **as_user,
            )  # fmt: skip
        except BaseException:
            os.close(information)
            os.close(go)
            raise
        finally:
            os.close(told)
            os.close(awaited)
        return _Child(process, information, go)

    async def _run_inside(self, command: Sequence[str], writable: Sequence[Path] = ()) -> None:
        """Run a small job as the sandboxes' root.

        Raises:
            SandboxFailure: it failed; says what it said.
        """
        child = self._spawn(command, writable)
        try:
            await child.bear(self._ids, None)
            await asyncio.wait_for(child.ended(), _JOB_SECONDS)
        except TimeoutError:
            raise SandboxStall(f"{command[0]} took longer than {_JOB_SECONDS:g} s") from None
        finally:
            child.kill()
            await child.ended()
            said = child.last_words()
            status = child.close()
        if status:
            raise SandboxFailure(f"{Path(command[0]).name} failed: {said}")

    def _job(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- making ----

    def create(
        self, id: int, message: bytes, agent_end: socket.socket, on_failure: Callable[[wire.ZygoteEvent], None]
    ) -> None:
        """See `Zygote.create`."""
        control = wire.parse_control(message)
        given: list[int] = []
        try:
            groups = Groups(self._cgroups, self._owner, control)
            given = [fd for fd in (self._open_specification(control), groups.open_oom_counter()) if fd is not None]
            call = f"main({', '.join(map(str, (agent_end.fileno(), *given)))})"
            child = self._spawn(self._python("agent", call), given=[agent_end.fileno(), *given])
        except OSError as error:
            on_failure(wire.ZygoteEvent(wire.Event.FAILED, id, error.errno or errno.EIO, 0, 0, "start bubblewrap"))
            return
        finally:
            for fd in given:
                os.close(fd)
        self._children[id] = child
        self._job(self._bear(child, groups))
        self._job(self._live(id, child, groups, on_failure))

    def _python(self, module: str, call: str) -> list[str]:
        """A command that runs something of the agent's source."""
        source = f"import sys\nsys.path.insert(0, {str(self._folder / 'agent')!r})\nfrom strop.sandboxes.portable.{module} import main\n{call}"
        return [self._interpreter, "-I", "-S", "-c", source]

    def _open_specification(self, control: wire.ControlMessage) -> int:
        """A descriptor of what the agent is told first. A file of memory: nobody but the agent can read it."""
        limited = set(self._cgroups.folders)
        snapshots = [str(self._snapshot(layer)) for layer in reversed(control.layers)]
        said = {
            "layers": [*snapshots, *map(str, self._layers)],
            "binds": [(str(source), target) for source, target in self._image.binds],
            "disk": control.disk,
            "inodes": control.inodes,
            "open_files": control.open_files,
            "processes": None if limited & {"pids", "unified-limits"} else control.processes,
            "memory": None if limited & {"memory", "unified-limits"} else control.memory,
            "filter": str(self._folder / "filter"),
        }
        memory = os.memfd_create("specification", os.MFD_CLOEXEC)
        os.write(memory, json.dumps(said).encode())
        os.lseek(memory, 0, os.SEEK_SET)
        return memory

    async def _bear(self, child: _Child, groups: Groups) -> None:
        """The end of a child that can't be born is told by `_live`, like any other."""
        try:
            await child.bear(self._ids, groups)
        except (SandboxFailure, OSError) as error:
            child.problem = str(error)
            child.kill()

    async def _live(
        self, id: int, child: _Child, groups: Groups, on_failure: Callable[[wire.ZygoteEvent], None]
    ) -> None:
        await child.ended()
        said = child.problem or child.last_words()
        status = child.close()
        kills = groups.oom_kills()
        self._children.pop(id, None)
        await groups.remove()
        if child.born:
            by_itself = status in (0, -signal.SIGKILL, 128 + signal.SIGKILL)
            self._on_dead(wire.ZygoteEvent(wire.Event.DEAD, id, 0, 0, kills, ""), None if by_itself or kills else said)
        else:
            on_failure(wire.ZygoteEvent(wire.Event.FAILED, id, errno.EIO, 0, 0, f"start bubblewrap ({said})"))

    def born(self, id: int) -> None:
        """See `Zygote.born`."""

    # ---- asking ----

    def send(self, message: bytes) -> None:
        """See `Zygote.send`."""
        control = wire.parse_control(message)
        if control.kind is wire.Control.DESTROY and control.id in self._children:
            self._children[control.id].kill()
        elif control.kind is wire.Control.RELEASE:
            self._job(self._release(control.layer))

    async def ask(
        self, kind: wire.Control, seconds: float = _JOB_SECONDS, *, token: int | None = None, **fields: object
    ) -> None:
        """See `Zygote.ask`."""
        control = wire.parse_control(wire.control(kind, layer=token or 0, **fields))  # type: ignore[arg-type]
        if kind is wire.Control.RELEASE:
            await self._release(control.layer)
        elif kind is wire.Control.SNAPSHOT and control.layers:
            await self._flatten(control)
        elif kind is wire.Control.SNAPSHOT:
            await self._copy(control)

    def token(self) -> int:
        """See `Zygote.token`."""
        return next(self._tokens)

    def _snapshot(self, layer: int) -> Path:
        return self._folder / "snapshots" / str(layer)

    def _make_snapshot(self, layer: int) -> Path:
        folder = self._snapshot(layer)
        folder.mkdir(mode=0o755)
        if self._ids.writer == "root":
            os.chown(folder, BASE_ID, BASE_ID)
        return folder

    async def _copy(self, control: wire.ControlMessage) -> None:
        """The sandbox's own agent copies its layer into a folder that it is handed: nobody else may look at either."""
        sandbox = self._find(control.id)
        if sandbox is None:
            raise failure("take a snapshot", errno.ESRCH)
        target = os.open(self._make_snapshot(control.layer), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            result = await sandbox.file_operation(wire.Files.SNAPSHOT, "/", descriptors=[target])
        finally:
            os.close(target)
        if result.exit_code or result.timed_out:
            await self._release(control.layer)
            raise failure("copy the layer", errno.ETIMEDOUT if result.timed_out else result.exit_code)

    async def _flatten(self, control: wire.ControlMessage) -> None:
        target = self._make_snapshot(control.layer)
        layers = [str(self._snapshot(layer)) for layer in control.layers]
        await self._run_inside([*self._python("layers", "main()"), str(target), *layers], [target])

    async def _release(self, layer: int) -> None:
        """Its files belong to users of sandboxes: only their root may remove them."""
        folder = self._folder / "snapshots"
        await self._run_inside(["/bin/rm", "-rf", str(self._snapshot(layer))], [folder])

    async def close(self) -> None:
        """See `Zygote.close`."""
        if not self.alive:
            return
        self.alive = False
        for child in list(self._children.values()):
            child.kill()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_JOB_SECONDS)
        snapshots = self._folder / "snapshots"
        left = [str(folder) for folder in snapshots.iterdir()]
        if left:
            await self._run_inside(["/bin/rm", "-rf", *left], [snapshots])
        await asyncio.to_thread(shutil.rmtree, self._folder)
        await asyncio.to_thread(remove_owner, self._cgroups, self._owner)
        Multiplexer.current().release()


def _remove_stale_folders() -> None:
    """What hosts that are gone have left; their snapshots' files may be of users that only root can remove."""
    for folder in Path(tempfile.gettempdir()).glob("strop-*-*-*-*"):
        parts = folder.name.split("-")
        if len(parts) == 5 and parts[1].isdecimal() and start_time(int(parts[1])) != int(parts[2]):
            shutil.rmtree(folder, ignore_errors=True)
