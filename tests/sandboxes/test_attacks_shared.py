"""Attacks of our own on what sandboxes share with the host and each other, on the agent itself, and on the host's patience.

Each fails if the defence that its docstring or comment names is taken away.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from strop.sandboxes import FileProblem, LocalPool, LocalSandbox, SandboxDead, SandboxFailure
from strop.sandboxes.bubblewrap import find_interpreter
from strop.sandboxes.sandbox import MIB

_NODES = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
C = "import ctypes\nl=ctypes.CDLL(None,use_errno=True)\n"


async def python(box: LocalSandbox, script: str, **options: object) -> str:
    return (await box.exec(["python3", "-c", script], **options)).text  # type: ignore[arg-type]


async def gone(box: LocalSandbox) -> bool:
    """Whether nothing but the agent and the one who looks is left, after a while."""
    for _ in range(100):
        if (await box.exec(["/bin/sh", "-c", "set -- /proc/[0-9]*; echo $#"])).text == "2\n":
            return True
        await asyncio.sleep(0.03)
    return False


# ---- what the kernel counts or keeps for all of them together ----


async def test_h23_a_lease_on_a_shared_file_does_not_make_the_host_wait(box: LocalSandbox) -> None:
    """A lease makes every opener of the file wait up to 45 s, and the image's root owns the host's /usr (seccomp)."""
    script = (
        "import fcntl,os\nfd=os.open('/usr/bin/env',os.O_RDONLY)\nfor kind in (0,1):\n"
        " try: fcntl.fcntl(fd,1024,kind); print('leased')\n except PermissionError: print('refused')"
    )
    assert await python(box, script) == "refused\nrefused\n"


async def test_h24_one_sandbox_does_not_take_every_inotify_instance(box: LocalSandbox, pool: LocalPool) -> None:
    """They are counted for the host's root, 128 by default, since all sandboxes are its children."""
    hold = C + "n=0\nwhile l.inotify_init()>=0: n+=1\nprint(n,flush=True)\nimport time; time.sleep(60)"
    holder = await box.start(["python3", "-c", hold])
    async for chunk in holder:
        assert int(chunk.data) <= 32
        break
    neighbour = await pool.create()
    assert await python(neighbour, C + "print(l.inotify_init()>=0)") == "True\n"
    await neighbour.destroy()
    await holder.kill()


async def test_h25_one_sandbox_does_not_take_every_terminal(box: LocalSandbox, pool: LocalPool) -> None:
    """kernel.pty.max is one number for the machine; the mount's own limit keeps each to a part."""
    hold = (
        "import os,pty,time\nn=0\ntry:\n while n<1000: m,s=pty.openpty(); os.close(s); n+=1\n"
        "except OSError: pass\nprint(n,flush=True); time.sleep(60)"
    )
    holder = await box.start(["python3", "-c", hold])
    async for chunk in holder:
        assert int(chunk.data) <= 64
        break
    neighbour = await pool.create()
    assert await python(neighbour, "import pty; print(len(pty.openpty()))") == "2\n"
    await neighbour.destroy()
    await holder.kill()


async def test_h26_shared_memory_segments_count_against_it(pool: LocalPool) -> None:
    """System V segments are in no quota of files and outlive their process: the memory group must hold them."""
    box = await pool.create()
    script = C + (
        "l.shmat.restype=ctypes.c_void_p\nfor key in range(40):\n"
        " id=l.shmget(key+1,16<<20,0o1600); at=l.shmat(id,None,0); ctypes.memset(at,1,16<<20)\nprint('escaped')"
    )
    try:
        result = await box.exec(["python3", "-c", script], timeout=30)
        assert b"escaped" not in result.stdout and result.oom
    except SandboxDead as death:
        assert "for memory" in death.reason
    await box.destroy()


async def test_b3_shared_memory_files_are_charged_to_the_memory_limit(pool: LocalPool) -> None:
    box = await pool.create(limits=replace(pool.limits, memory=32 * MIB, disk=256 * MIB))
    try:
        result = await box.exec("head -c 200M /dev/zero > /dev/shm/x; echo $?", timeout=30)
        assert result.oom
    except SandboxDead as death:
        assert "for memory" in death.reason
    await box.destroy()


async def test_h27_every_mount_is_as_tight_as_it_can_be(box: LocalSandbox) -> None:
    """Nothing honours set-user-id, devices only where they were put, host folders read-only, no kernel file systems."""
    for line in (await box.exec("cat /proc/self/mountinfo")).text.splitlines():
        before, _, after = line.partition(" - ")
        place, options, kind = before.split()[4], set(before.split()[5].split(",")), after.split()[0]
        if kind == "devtmpfs" and place in _NODES:  # with bubblewrap they are the host's own, bound one by one
            continue
        assert kind in {"overlay", "tmpfs", "devpts", "proc"} or place == "/usr", line
        assert "nosuid" in options or place == "/proc/cmdline", line
        assert "nodev" in options or place in ("/dev", "/dev/pts", "/proc/cmdline"), line
        assert "ro" in options or place in ("/", "/dev/shm", "/dev/pts", "/proc"), line
    assert (await box.exec("ls -A /sys")).stdout == b""


async def test_b18_a_crash_starts_no_handler_of_the_host(box: LocalSandbox) -> None:
    """core(5): a handler behind a pipe in core_pattern is skipped for a limit of exactly 1, not for 0."""
    assert await python(box, "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))") == "(1, 1)\n"


# ---- leaving the tree that a time-out kills ----


async def test_h28_a_name_like_a_line_of_proc_hides_no_process(box: LocalSandbox) -> None:
    """/proc/PID/stat holds the name, which may hold anything: the parent is what follows the last bracket."""
    script = C + (
        "import os,time\nl.prctl(15,b'a) S 1 1 1 (',0,0,0)\nif os.fork()==0:\n os.setsid()\n"
        " if os.fork()==0: time.sleep(100)\n os._exit(0)\ntime.sleep(100)"
    )
    assert (await box.exec(["python3", "-c", script], timeout=0.7)).timed_out
    assert await gone(box)


async def test_h29_a_chain_that_always_leaves_its_parent_is_caught(box: LocalSandbox) -> None:
    """Each process forks and ends at once: only stopping first, and orphans that stay below their command, catch it."""
    script = "import os,time\nif os.fork()==0:\n while True:\n  if os.fork(): os._exit(0)\ntime.sleep(100)"
    assert (await box.exec(["python3", "-c", script], timeout=0.7)).timed_out
    assert await gone(box)


async def test_h30_a_command_can_not_let_its_orphans_go(box: LocalSandbox) -> None:
    """prctl(PR_SET_CHILD_SUBREAPER, 0) would hand daemons to process 1, where no time-out finds them (seccomp)."""
    script = C + (
        "import os,time\nprint(l.prctl(36,0,0,0,0),flush=True)\nif os.fork()==0:\n os.setsid()\n"
        " if os.fork()==0: time.sleep(100)\n os._exit(0)\ntime.sleep(100)"
    )
    result = await box.exec(["python3", "-c", script], timeout=0.7)
    assert result.timed_out and result.stdout == b"-1\n"
    assert await gone(box)


# ---- the agent ----


async def test_h31_an_agent_whose_limits_were_lowered_dies_rather_than_run_half_a_command(box: LocalSandbox) -> None:
    """Root inside may lower limits of process 1; a message whose descriptors did not arrive must not be run."""
    script = "import resource\nresource.prlimit(1,resource.RLIMIT_NOFILE,(8,8))"
    await box.exec(["python3", "-c", script])
    with pytest.raises(SandboxDead):
        await box.exec("touch /tmp/ran", timeout=5)


async def test_h32_the_moment_between_fork_and_exec_shows_nothing_of_the_agent(box: LocalSandbox) -> None:
    """There a command of the sandbox's own user shares the agent's memory, which is closed to it (dumpable)."""
    watch = (
        "import os,time\nend=time.time()+2\nwhile time.time()<end:\n for p in os.listdir('/proc'):\n"
        "  if not p.isdigit(): continue\n  try:\n   exe=os.readlink(f'/proc/{p}/exe')\n"
        "   if not exe.startswith('/usr/'): print(exe)\n"
        "   if 'zygote' in open(f'/proc/{p}/maps').read(): print('maps')\n  except OSError: pass"
    )
    watcher = await box.start(["python3", "-c", watch])
    for _ in range(60):
        await box.exec(["/bin/true"])
    assert [chunk.data async for chunk in watcher] == []


ORDINARY = """
import asyncio
from strop.sandboxes import Image, LocalPool
LOOK = "cat /proc/1/maps /proc/1/environ /proc/1/auxv; readlink /proc/1/exe /proc/1/cwd; ls /proc/1/fd; true"
async def main():
    async with LocalPool(Image.host(), tier="rootless", allow_weak=True) as pool:
        result = await (await pool.create()).exec(LOOK)
        print(pool.tier, len(result.stdout))
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user")
def test_c3_the_agent_of_an_ordinary_user_is_closed_too() -> None:
    """There the sandbox's root and it are one user of the host, and PR_SET_DUMPABLE alone stands between them."""
    interpreter = find_interpreter()
    if interpreter is None:
        pytest.skip("no Python that every user may run")
    with tempfile.TemporaryDirectory() as home:  # pytest's are for their owner alone
        os.chown(home, 54321, 54321)
        source = str(Path(sys.modules["strop"].__path__[0]).parent)
        env = {"PATH": os.environ["PATH"], "HOME": home, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
        become = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
        done = subprocess.run([*become, interpreter, "-c", ORDINARY], env=env, cwd="/", capture_output=True, text=True)
    assert done.stdout.split() == ["rootless", "0"], done.stdout + done.stderr[-2000:]


async def test_h33_stopping_every_newcomer_hangs_nobody_outside(
    box: LocalSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command stopped before it executes holds its agent, which waits for that: the host's grace must end it."""
    monkeypatch.setattr("strop.sandboxes.local.KILL_GRACE", 1.0)
    stop = (
        "import os,signal\nme=os.getpid()\nwhile True:\n for p in os.listdir('/proc'):\n"
        "  if p.isdigit() and int(p) not in (1,me):\n   try: os.kill(int(p),signal.SIGSTOP)\n   except OSError: pass"
    )
    stopper = await box.start(["python3", "-c", stop])
    await asyncio.sleep(0.2)
    try:
        for _ in range(3):
            result = await asyncio.wait_for(box.exec(["/bin/true"], timeout=0.3), 30)
            assert result.ok or result.timed_out
        await stopper.kill()
    except SandboxDead as death:
        assert "did not kill" in death.reason or "has not read" in death.reason


@pytest.mark.parametrize("script", [
    "import socket\nsocket.socketpair(socket.AF_INET)",  # the kernel alone says EOPNOTSUPP
    C + "import os\nr=l.syscall(41,ctypes.c_long((1<<32)|40),1,0)\nif r<0: raise OSError(ctypes.get_errno(),'')",
], ids=["pairs", "a family beyond 32 bits"])  # fmt: skip
async def test_h34_socket_families_are_refused_by_every_door(box: LocalSandbox, script: str) -> None:
    """The filter knows socketpair too, and reads of an argument what the kernel reads: its lower 32 bits."""
    result = await box.exec(["python3", "-c", script])
    assert b"[Errno 97]" in result.stderr


# ---- the host's patience and memory ----


async def test_h35_a_daemon_that_never_stops_writing_does_not_hold_the_result(box: LocalSandbox) -> None:
    """Output is awaited for a moment after the main process, not for as long as somebody writes."""
    result = await asyncio.wait_for(box.exec("(setsid yes &); echo main-done", timeout=50), 40)
    assert not result.timed_out and result.stdout_bytes > 0


async def test_h36_output_that_nobody_reads_makes_the_command_wait(box: LocalSandbox) -> None:
    memory = psutil.Process().memory_info().rss
    flood = await box.start("yes")
    await asyncio.sleep(1.5)
    assert psutil.Process().memory_info().rss - memory < 32 * MIB
    await flood.kill()


@pytest.mark.parametrize("answer", ["b'\\xff\\xff\\xff\\xff'", "b'\\x02\\x00\\x00\\x00[]'", "b'\\x00'*3"])
async def test_h37_a_cell_that_forges_answers_fools_only_itself(box: LocalSandbox, answer: str) -> None:
    """Whatever stands in the pipe: a result or a time-out, bounded memory, and a new interpreter that works."""
    cells = await box.python()
    first = await cells.run(f"import os; os.write(4, {answer}); os.close(4); os.dup2(1, 4); 1", timeout=1.0)
    assert first.lost or first.timed_out or first.error or first.value == "1"
    await cells.close()
    fresh = await box.python()
    assert (await fresh.run("1+1")).value == "2"
    await fresh.close()


async def test_h38_a_file_of_users_without_end_is_not_read(pool: LocalPool) -> None:
    """It is refused by its size: reading it would take as long as the limits allow."""
    box = await pool.create(limits=replace(pool.limits, timeout=300.0))
    await box.exec("rm -f /etc/passwd; truncate -s 900G /etc/passwd")
    with pytest.raises(FileProblem, match="no user named"):
        await asyncio.wait_for(box.exec("id", user="bob"), 60)
    await box.destroy()


async def test_h39_a_snapshot_of_a_hostile_tree_is_a_snapshot_or_a_clear_refusal(
    box: LocalSandbox, pool: LocalPool
) -> None:
    """The zygote copies it: symlinks aren't followed, pipes not opened, holes stay holes, depth is bounded."""
    await box.exec(
        "mkdir /t && cd /t && ln -s / out && ln -s /etc/shadow s && mkfifo p && truncate -s 900G hole && "
        "mkdir -p d && ln -s ../../../../etc d/up && touch d/f && ln d/f d/g && chmod 4755 d/f"
    )
    snapshot = await box.snapshot()
    child = await pool.create(snapshot=snapshot)
    line = "cd /t && readlink out s d/up && stat -c '%F' p && stat -c '%s %b' hole && stat -c '%h %a' d/f"
    assert (await child.exec(line)).text.splitlines() == [
        "/", "/etc/shadow", "../../../../etc", "fifo", f"{900 << 30} 0", "2 4755",
    ]  # fmt: skip
    await child.destroy()
    await snapshot.delete()
    deep = "import os\nos.chdir('/t')\nfor _ in range(400): os.mkdir('d'*9); os.chdir('d'*9)"
    await box.exec(["python3", "-c", deep])
    with pytest.raises(SandboxFailure, match="copy the layer"):
        await box.snapshot()


async def test_a3_a_hog_of_every_core_leaves_a_neighbour_its_turn(box: LocalSandbox, pool: LocalPool) -> None:
    """32 loops in one sandbox have one core between them: its neighbour's commands come back meanwhile."""
    neighbour = await pool.create()
    hog = asyncio.create_task(box.exec("for i in $(seq 32); do (while :; do :; done)& done; wait", timeout=2.0))
    answers = 0
    while not hog.done():
        assert (await neighbour.exec("echo here", timeout=20)).stdout == b"here\n"
        answers += 1
    result = await hog
    assert result.timed_out and result.signal == signal.SIGKILL and answers > 3
    assert await gone(box)
    await neighbour.destroy()


async def test_d10_a_network_with_a_way_out_is_refused(pool: LocalPool) -> None:
    """There is no allow-list mode: asking for one must not silently give something else."""
    from strop.errors import ConfigError

    with pytest.raises(ConfigError, match=re.escape("network")):
        LocalPool(pool.image, network="proxy")  # type: ignore[arg-type]
