"""What the host survives: dead zygotes, agents that lie, full tables; and what is left when the host itself dies."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from leftovers import groups_of_this_process, processes_in_groups

from strop.sandboxes import (
    Image,
    Limits,
    LocalPool,
    LocalSandbox,
    ResourceExhausted,
    SandboxDead,
    SandboxesUnavailable,
    SandboxFailure,
    SandboxStall,
    remove_stale,
    wire,
)
from strop.sandboxes.cgroups import CgroupRoots, find_roots

#: What concerns the zygote, which the bubblewrap tier does not have.
of_the_helper = pytest.mark.parametrize("tier", ["namespaces"], indirect=True)

HOST = """
import asyncio, sys
from strop.sandboxes import Image, LocalPool
async def main():
    pool = LocalPool(Image.host())
    await pool.start()
    for _ in range(20):
        box = await pool.create()
        await box.exec("(setsid sleep 1000 &); (setsid sleep 1000 >/dev/null 2>&1 &)")
    print(pool._zygote.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def owned_by(pid: int) -> list[Path]:
    return [found for folder in find_roots().folders.values() for found in folder.glob(f"strop-{pid}-*")]


def wait_until(condition, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def start_host() -> tuple[subprocess.Popen[str], int]:
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    return host, int(host.stdout.readline())


def test_g1_a_killed_host_leaves_nothing() -> None:
    host, zygote = start_host()
    descendants = psutil.Process(zygote).children(recursive=True)
    assert len(descendants) >= 60
    host.kill()
    host.wait()
    host.stdout.close()
    assert wait_until(lambda: not any(map(runs, descendants)))
    assert wait_until(lambda: not owned_by(host.pid))


def test_g1_what_a_killed_host_and_zygote_leave_is_removed_by_the_next() -> None:
    host, zygote = start_host()
    descendants = psutil.Process(zygote).children(recursive=True)
    os.kill(host.pid, signal.SIGSTOP)  # so that it can't clean up after its zygote
    os.kill(zygote, signal.SIGKILL)
    host.kill()
    host.wait()
    host.stdout.close()
    assert wait_until(lambda: not any(map(runs, descendants)))
    assert owned_by(host.pid), "nobody was left to remove them"
    removed = remove_stale()
    assert any(name.startswith(f"strop-{host.pid}-") for name in removed)
    assert not owned_by(host.pid)


def test_the_janitor_spares_the_living_and_what_is_not_its_own() -> None:
    folder = next(iter(find_roots().folders.values()))
    own = folder / f"strop-{os.getpid()}-{Path('/proc/self/stat').read_text().rsplit(')', 1)[1].split()[19]}-999"
    foreign = folder / "strop-something-else"
    reused = folder / f"strop-{os.getpid()}-1-998"  # this pid, but of a process that started at another time
    for made in (own, foreign, reused):
        made.mkdir()
    try:
        assert remove_stale() == [reused.name]
        assert own.exists() and foreign.exists() and not reused.exists()
    finally:
        own.rmdir()
        foreign.rmdir()


@of_the_helper
async def test_g2_a_killed_zygote_takes_its_sandboxes_along_and_is_replaced(pool: LocalPool) -> None:
    box = await pool.create()
    snapshot = await box.snapshot()
    running = asyncio.create_task(box.exec("sleep 100", timeout=50))
    await asyncio.sleep(0.1)
    os.kill(pool._zygote.pid, signal.SIGKILL)
    with pytest.raises(SandboxDead, match="zygote"):
        await asyncio.wait_for(running, 20)
    assert box.dead
    fresh = await pool.create()
    assert (await fresh.exec("echo back")).stdout == b"back\n"
    with pytest.raises(SandboxFailure, match="snapshot is gone"):
        await pool.create(snapshot=snapshot)
    await box.destroy()
    await fresh.destroy()
    remove_stale()
    assert processes_in_groups() == []


@of_the_helper
async def test_a_killed_agent_is_a_dead_sandbox_with_a_reason(pool: LocalPool) -> None:
    box = await pool.create()
    running = asyncio.create_task(box.exec("sleep 100", timeout=50))
    await asyncio.sleep(0.1)
    (agent,) = psutil.Process(pool._zygote.pid).children()
    agent.kill()
    with pytest.raises(SandboxDead, match="first process ended"):
        await asyncio.wait_for(running, 20)
    await box.destroy()


def impostor(pool: LocalPool) -> tuple[LocalSandbox, socket.socket]:
    """A sandbox whose agent is this test."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return LocalSandbox(pool, 999_999, ours, pool.limits, {}, {}, ()), theirs


def reply(kind: int, id: int, status: int = 0, error: int = 0) -> bytes:
    return struct.pack("=IIiiQQQ40s", kind, id, status, error, 0, 0, 0, b"")


@pytest.mark.parametrize(
    "lie",
    [
        b"junk",
        b"",
        bytes(80),
        bytes(81),
        bytes(60_000),
        reply(2, 777),
        reply(9, 1),
        reply(0, 0),
        reply(1, 1) * 1,
        b"\xff" * 80,
    ],
    ids=[
        "short",
        "empty",
        "zeros",
        "too long",
        "much too long",
        "unknown command",
        "unknown kind",
        "kind 0",
        "second ready",
        "ones",
    ],
)
async def test_g4_an_agent_that_lies_is_a_dead_sandbox(
    pool: LocalPool, monkeypatch: pytest.MonkeyPatch, lie: bytes
) -> None:
    monkeypatch.setattr("strop.sandboxes.local.DEATH_SECONDS", 0.1)
    box, agent = impostor(pool)
    agent.send(reply(1, wire.VERSION))
    await box.wait_ready()
    waiting = asyncio.create_task(box.exec("true"))
    await asyncio.sleep(0.01)
    agent.send(lie)
    with pytest.raises(SandboxDead):
        await asyncio.wait_for(waiting, 10)
    agent.close()


async def test_g4_an_agent_that_hands_over_descriptors_hands_over_nothing(pool: LocalPool) -> None:
    box, agent = impostor(pool)
    agent.send(reply(1, wire.VERSION))
    await box.wait_ready()
    waiting = asyncio.create_task(box.exec("true"))
    await asyncio.sleep(0.01)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    gift = array.array("i", [os.open("/dev/null", os.O_RDONLY) for _ in range(50)])
    agent.sendmsg([reply(2, 1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, gift)])
    for fd in gift:
        os.close(fd)
    assert (await asyncio.wait_for(waiting, 10)).ok
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before
    box.bury("the test is over")
    agent.close()


async def test_g4_an_agent_that_says_nothing_meets_a_deadline(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.sandboxes.local.KILL_GRACE", 0.2)
    box, agent = impostor(pool)
    agent.send(reply(1, wire.VERSION))
    await box.wait_ready()
    with pytest.raises(SandboxDead, match="did not kill"):
        await asyncio.wait_for(box.exec("true", timeout=0.1), 10)
    agent.close()


async def test_an_agent_that_never_begins_meets_a_deadline(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.sandboxes.local.BIRTH_SECONDS", 0.1)
    box, agent = impostor(pool)
    with pytest.raises(SandboxStall, match="not ready within"):
        await box.wait_ready()
    assert box.dead == "it was not ready in time"
    agent.close()


async def test_g4_an_agent_that_floods_is_cut_off_at_its_first_lie(pool: LocalPool) -> None:
    box, agent = impostor(pool)
    agent.setblocking(False)
    memory = psutil.Process().memory_info().rss
    for _ in range(2000):
        try:
            agent.send(random.randbytes(200))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert box.dead and psutil.Process().memory_info().rss - memory < 20 << 20
    agent.close()


async def test_an_agent_of_another_version_is_refused(pool: LocalPool) -> None:
    box, agent = impostor(pool)
    agent.send(reply(1, 99))
    with pytest.raises(SandboxFailure, match="speaks version 99"):
        await box.wait_ready()
    box.bury("the test is over")
    agent.close()


async def raw_agent(pool: LocalPool) -> tuple[LocalSandbox, socket.socket]:
    """A real agent, with its socket to speak to it without the host's manners."""
    box = await pool.create()
    return box, box._socket


@pytest.mark.parametrize("seed", range(12))
async def test_h40_junk_for_the_agent_ends_at_most_its_own_sandbox(pool: LocalPool, seed: int) -> None:
    """The other side of the protocol: whatever a broken host sends, the agent answers, ignores or ends."""
    rng, bystander = random.Random(seed), await pool.create()
    box, link = await raw_agent(pool)
    box._running = _Forgiving()
    for _ in range(60):
        header = bytearray(
            wire.request(
                wire.Ask(rng.randint(1, 3)),
                rng.randint(0, 5),
                arguments=rng.randint(0, 3),
                variables=rng.randint(0, 3),
                operation=rng.randint(0, 6),
                mode=0,
                payload=0,
            )
        )
        body = rng.randbytes(rng.randint(0, 300)) if rng.random() < 0.5 else b"/\0" + b"/bin/true\0" * rng.randint(0, 4)
        if rng.random() < 0.5:
            header[-8:] = struct.pack("=Q", len(body))
        for _ in range(rng.randint(0, 3)):
            header[rng.randrange(8, len(header))] = rng.randrange(256)
        message = bytes(header) + body if rng.random() < 0.9 else rng.randbytes(rng.randint(1, 400))
        fds = [os.open("/dev/null", os.O_RDWR) for _ in range(rng.randint(0, 12))]
        try:
            socket.send_fds(link, [message], fds)
        except BlockingIOError:
            await asyncio.sleep(0.01)
        except OSError:
            break
        finally:
            for fd in fds:
                os.close(fd)
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert (await bystander.exec("echo here", timeout=20)).stdout == b"here\n"
    await box.destroy()
    await bystander.destroy()
    assert processes_in_groups() == []


class _Forgiving(dict):
    """Takes answers to requests that were never made."""

    def pop(self, key, *default):
        class Nothing:
            oom_kills_before = 0

            def end(self, *arguments: object) -> None:
                pass

            def fail(self, error: Exception) -> None:
                pass

        return super().pop(key, Nothing())


@pytest.mark.parametrize("seed", range(6))
@of_the_helper
async def test_h42_junk_for_the_zygote_does_not_end_it(pool: LocalPool, seed: int) -> None:
    rng, bystander = random.Random(seed), await pool.create()
    link = pool._zygote._socket
    for _ in range(60):
        message = bytearray(
            wire.control(
                wire.Control(rng.randint(2, 5)),
                rng.randint(100, 1 << 31),
                layer=rng.randint(1000, 1 << 31),
                layers=[rng.randint(1000, 2000)] * rng.randint(0, 5),
            )
        )
        if rng.random() < 0.3:
            message = bytearray(rng.randbytes(rng.randint(1, 700)))
            message[:4] = struct.pack("=I", rng.randint(6, 1 << 31))
        link.send(message)
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert (await bystander.exec("echo here", timeout=20)).stdout == b"here\n"
    other = await pool.create()
    assert (await other.exec("echo there", timeout=20)).stdout == b"there\n"


async def test_g5_too_many_wait_for_a_place_and_say_so_in_the_end(host_image: Image) -> None:
    async with LocalPool(host_image, max_live=2, max_wait=0.2) as pool:
        first, second = await pool.create(), await pool.create()
        with pytest.raises(ResourceExhausted, match="2 sandboxes live"):
            await pool.create()
        waiting = asyncio.create_task(pool.create())
        await first.destroy()
        third = await waiting
        assert (await third.exec("true")).ok
        assert (await second.exec("true")).ok


async def test_g5_no_more_descriptors_is_a_clear_error_and_leaks_nothing(pool: LocalPool) -> None:
    box = await pool.create()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()) + 1, limits[1])
    )
    filling = []
    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        os.close(filling.pop())
        with pytest.raises(ResourceExhausted, match="Too many open files"):
            await pool.create()
        with pytest.raises(ResourceExhausted, match="Too many open files"):
            await box.exec("true")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in filling:
            os.close(fd)
    assert (await box.exec("echo ok")).stdout == b"ok\n"


async def test_g5_the_limit_of_descriptors_is_raised_as_far_as_it_goes(host_image: Image) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        async with LocalPool(host_image, max_live=1000) as pool:
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, 1000 + 4096), hard)
            assert psutil.Process(pool._zygote.pid).rlimit(psutil.RLIMIT_NOFILE) == (min(hard, 1000 + 4096), hard)
            inside = await (await pool.create()).exec("ulimit -n; ulimit -Hn")
            assert inside.text.split() == ["1024", str(pool.limits.open_files)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


#: A host in a control group that lets it have few processes: the zygote's clone is then refused.
CRAMPED = """
import asyncio, sys
from strop.sandboxes import Image, LocalPool, ResourceExhausted
async def main():
    async with LocalPool(Image.host()) as pool:
        for _ in range(2):
            boxes = []
            try:
                while len(boxes) < 100: boxes.append(await pool.create())
            except ResourceExhausted as full:
                print(len(boxes), full.reason)
            for box in boxes: await box.destroy()
        print((await (await pool.create()).exec("echo again")).text)
asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/sys/fs/cgroup/pids").is_dir(), reason="needs a version 1 hierarchy of pids")
def test_g5_no_more_processes_is_a_clear_error_and_leaks_nothing() -> None:
    group = Path(f"/sys/fs/cgroup/pids/strop-test-{os.getpid()}")
    group.mkdir()
    try:
        (group / "pids.max").write_text("40")
        join = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        done = subprocess.run([*join, sys.executable, "-c", CRAMPED], capture_output=True, text=True)
    finally:
        assert wait_until(lambda: not (group / "cgroup.procs").read_text())
        for child in [entry for entry in group.iterdir() if entry.is_dir()]:
            child.rmdir()
        group.rmdir()
    first, second, *after = done.stdout.splitlines()
    assert "kernel.pid_max" in first and int(first.split()[0]) >= 20, done.stdout + done.stderr
    assert first == second, "the second time there is room for as many"
    assert after[0] == "again"


@of_the_helper
async def test_g5_a_zygote_that_has_no_more_of_something_says_so(pool: LocalPool) -> None:
    zygote = psutil.Process(pool._zygote.pid)
    limits = zygote.rlimit(psutil.RLIMIT_NOFILE)
    zygote.rlimit(psutil.RLIMIT_NOFILE, (8, limits[1]))
    with pytest.raises(ResourceExhausted, match="Too many open files"):
        await pool.create()
    zygote.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert (await (await pool.create()).exec("true")).ok


async def test_g5_hundreds_at_once(host_image: Image) -> None:
    async with LocalPool(host_image, limits=Limits(cpus=0)) as pool:
        boxes = await asyncio.gather(*(pool.create() for _ in range(300)))
        results = await asyncio.gather(*(box.exec(f"echo {number}", timeout=60) for number, box in enumerate(boxes)))
        assert [int(result.stdout) for result in results] == list(range(300))
        await asyncio.gather(*(box.destroy() for box in boxes))
        assert processes_in_groups() == []


async def test_g8_without_control_groups_it_refuses_unless_weakness_is_asked_for(
    host_image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.sandboxes.pool.find_roots", lambda: CgroupRoots({}, ("memory", "pids", "cpu")))
    with pytest.raises(SandboxesUnavailable, match="memory, pids, cpu"):
        await LocalPool(host_image).start()
    async with LocalPool(host_image, allow_weak=True) as pool:
        assert (await (await pool.create()).exec("echo weak")).stdout == b"weak\n"


async def test_two_pools_live_side_by_side_and_close_on_their_own(host_image: Image) -> None:
    async with LocalPool(host_image) as first:
        async with LocalPool(host_image, network="fresh") as second:
            a, b = await first.create(), await second.create()
            assert (await a.exec("echo a")).text + (await b.exec("echo b")).text == "a\nb\n"
        assert (await a.exec("echo still")).stdout == b"still\n"
        assert len(groups_of_this_process()) == len(find_roots().folders)


async def test_a_closed_pool_makes_nothing(host_image: Image) -> None:
    pool = LocalPool(host_image)
    await pool.start()
    box = await pool.create()
    await pool.close()
    with pytest.raises(SandboxDead):
        await box.exec("true")
    with pytest.raises(SandboxDead):
        await pool.create()
    await pool.close()
