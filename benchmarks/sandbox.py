# ruff: noqa: ASYNC221, ASYNC222 -- blocking is what the peers do
"""Sandboxes per CPU core: strop beside a bare process, bubblewrap, runc, SWE-ReX local and inspect_ai local.

Everything is measured in turns in one run, several rounds, medians. CPU is that of a control group that holds all
processes of a measurement, plus that of all kernel threads (which take down namespaces and mounts later): "per second
and core" is operations per second of it. Peers are installed into .peers/ on first use; what can't be had is skipped
and said. Needs root. SWE-ReX and inspect_ai local isolate nothing; their figures are there for scale.

    python benchmarks/sandbox.py [--rounds 5] [--scale 1.0] [--no-peers]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from strop.sandboxes import Image, Limits, LocalPool
from strop.sandboxes.cgroups import start_time

HERE = Path(__file__).parent
PEERS = HERE.parent / ".peers"
ECHO = ("/bin/sh", "-c", "echo hi")
TICK = 1000 / os.sysconf("SC_CLK_TCK")


class Meter:
    """CPU milliseconds of this process and everything it starts, kernel threads included."""

    def __init__(self) -> None:
        old = Path("/sys/fs/cgroup/cpuacct")
        self._root = old if old.is_dir() else Path("/sys/fs/cgroup")
        self._group = self._root / f"strop-benchmark-{os.getpid()}"
        self._group.mkdir()
        (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        (self._root / "cgroup.procs").write_text(str(os.getpid()))
        for _ in range(100):
            with contextlib.suppress(OSError):
                self._group.rmdir()
                return
            time.sleep(0.02)

    def _own(self) -> float:
        if (usage := self._group / "cpuacct.usage").exists():
            return int(usage.read_text()) / 1e6
        return int((self._group / "cpu.stat").read_text().split()[1]) / 1e3

    def _kernel(self) -> float:
        """Of all children of kthreadd, in ms; the tick is 10 ms, so a measurement must be long."""
        total = 0
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                    if fields[1] == "2":
                        total += int(fields[11]) + int(fields[12])
        return total * TICK

    def read(self) -> float:
        return self._own() + self._kernel()


async def measured(meter: Meter, count: int, work: Callable[[int], Awaitable[None]]) -> float:
    """CPU ms of one operation, what the kernel does after it included."""
    before = meter.read()
    await work(count)
    await asyncio.sleep(0.25)
    return (meter.read() - before) / count


# ---- what is measured ----


async def bare(count: int) -> None:
    """posix_spawn of `sh -c "echo hi"` with its output read: nothing can be cheaper that runs it."""
    for _ in range(count):
        reading, writing = os.pipe()
        pid = os.posix_spawn(ECHO[0], ECHO, {}, file_actions=[(os.POSIX_SPAWN_DUP2, writing, 1)])
        os.close(writing)
        os.read(reading, 100)
        os.waitpid(pid, 0)
        os.close(reading)


def cycles(pool: LocalPool) -> Callable[[int], Awaitable[None]]:
    async def work(count: int) -> None:
        for _ in range(count):
            sandbox = await pool.create()
            assert (await sandbox.exec(ECHO)).stdout == b"hi\n"
            await sandbox.destroy()

    return work


def execs(pool: LocalPool, walls: list[float]) -> Callable[[int], Awaitable[None]]:
    async def work(count: int) -> None:
        sandbox = await pool.create()
        for _ in range(count):
            started = time.perf_counter()
            await sandbox.exec(ECHO)
            walls.append((time.perf_counter() - started) * 1e3)
        await sandbox.destroy()

    return work


async def cells(pool: LocalPool, count: int, fork: bool) -> float:
    """Wall ms of a cell in a pre-warmed interpreter (median)."""
    sandbox = await pool.create()
    python = await sandbox.python(["json", "re", "subprocess", "unittest"])
    walls = []
    for _ in range(count):
        started = time.perf_counter()
        assert (await python.run("print(1)", fork=fork)).stdout == b"1\n"
        walls.append((time.perf_counter() - started) * 1e3)
    await sandbox.destroy()
    return statistics.median(walls)


def available() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) / 1024


async def idle_memory(pool: LocalPool, count: int, times: int) -> list[float]:
    """MiB that the machine has less for each idle sandbox, as their number grows by `count` some times over.

    None is destroyed in between: what the kernel keeps of one that has gone is used again by the next, which would
    then seem to cost nothing.
    """
    made, each = [await pool.create() for _ in range(count // 2)], []
    for _ in range(times):
        await asyncio.sleep(1)
        before = available()
        made += [await pool.create() for _ in range(count)]
        await asyncio.sleep(1)
        each.append((before - available()) / count)
    await asyncio.gather(*(sandbox.destroy() for sandbox in made))
    return each


HOST = """
import asyncio
from strop.sandboxes import Image, LocalPool
async def main():
    pool = LocalPool(Image.host())
    await pool.start()
    for _ in range(20):
        await (await pool.create()).exec("(setsid sleep 1000 &); (setsid sleep 1000 >/dev/null 2>&1 &)")
    print(pool._zygote.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


def descendants(pid: int) -> list[int]:
    found = [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]
    return found + [below for child in found for below in descendants(child)]


def runs(pid: int, since: int | None) -> bool:
    """Whether a process still exists as more than an entry that its parent has not collected."""
    with contextlib.suppress(OSError):
        return start_time(pid) == since and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def gone_after_kill() -> float:
    """Milliseconds from kill -9 of a host with 20 sandboxes and 40 daemons until none of their processes is left."""
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    zygote = int(host.stdout.readline())
    everyone = {pid: start_time(pid) for pid in [zygote, *descendants(zygote)]}
    assert len(everyone) >= 61, everyone
    started = time.perf_counter()
    os.kill(host.pid, signal.SIGKILL)
    while any(runs(pid, since) for pid, since in everyone.items()):
        time.sleep(0.001)
    gone = (time.perf_counter() - started) * 1e3
    host.wait()
    host.stdout.close()
    return gone


# ---- peers ----


async def bubblewrap(count: int) -> None:
    command = [
        "bwrap",
        "--unshare-all",
        "--ro-bind",
        "/usr",
        "/usr",
        "--symlink",
        "usr/bin",
        "/bin",
        "--symlink",
        "usr/lib",
        "/lib",
    ]
    command += ["--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", *ECHO]
    for _ in range(count):
        assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout == b"hi\n"


@contextlib.contextmanager
def runc_bundle() -> Iterator[Callable[[int], Awaitable[None]]]:
    """runc with the defaults of `runc spec`, the host's /usr bound read-only."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder)
        root = bundle / "rootfs"
        for name in ("usr", "proc", "dev", "tmp", "sys", "etc"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        subprocess.run(["runc", "spec"], cwd=bundle, check=True)
        spec = json.loads((bundle / "config.json").read_text())
        spec["process"].update(terminal=False, args=list(ECHO), rlimits=[])
        spec["mounts"] = [mount for mount in spec["mounts"] if mount["destination"] != "/sys/fs/cgroup"]
        spec["mounts"].append({"destination": "/usr", "source": "/usr", "options": ["rbind", "ro"]})
        (bundle / "config.json").write_text(json.dumps(spec))

        async def work(count: int) -> None:
            for number in range(count):
                name = f"strop-benchmark-{os.getpid()}-{number}"
                done = subprocess.run(["runc", "run", name], cwd=bundle, capture_output=True)
                assert done.stdout == b"hi\n", done.stderr

        yield work


@contextlib.contextmanager
def peer_process(package: str, script: str) -> Iterator[Callable[[int], Awaitable[None]]]:
    """A peer in its own virtual environment, which is made on first use."""
    home = PEERS / package
    if not (home / "bin/python").exists():
        print(f"installing {package} into {home} …", flush=True)
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin/pip", "install", "-q", package], check=True)
    process = subprocess.Popen(
        [home / "bin/python", HERE / "peers" / script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"{script} did not start")

    async def work(count: int) -> None:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    try:
        yield work
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def find_peers(stack: contextlib.ExitStack) -> dict[str, tuple[Callable[[int], Awaitable[None]], int]]:
    """Peers that are here or can be installed: name to (work, operations a round)."""
    found: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {}
    if shutil.which("bwrap"):
        found["bwrap"] = (bubblewrap, 60)
    else:
        print("skipped: bwrap (apt-get install bubblewrap)")
    tries = {
        "swe-rex local": ("swe-rex", "sandbox_swerex.py", 60),
        "inspect_ai local": ("inspect-ai", "sandbox_inspect.py", 30),
    }
    if shutil.which("runc"):
        found["runc"] = (stack.enter_context(runc_bundle()), 15)
    else:
        print("skipped: runc (apt-get install runc)")
    for name, (package, script, count) in tries.items():
        try:
            found[name] = (stack.enter_context(peer_process(package, script)), count)
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            print(f"skipped: {name} ({error})")
    for name in list(found):
        try:
            asyncio.run(found[name][0](1))
        except (AssertionError, OSError, subprocess.CalledProcessError) as error:
            print(f"skipped: {name} ({str(error)[:200]})")
            del found[name]
    return found


# ---- the run ----


async def run(
    arguments: argparse.Namespace, meter: Meter, peers: dict[str, tuple[Callable[[int], Awaitable[None]], int]]
) -> dict[str, object]:
    def scale(count: int) -> int:
        return max(1, round(count * arguments.scale))

    samples: dict[str, list[float]] = {}
    walls: list[float] = []
    other: dict[str, list[float]] = {
        "python_cell_ms": [],
        "python_cell_fork_ms": [],
        "idle_mib": [],
        "gone_after_kill_ms": [],
    }
    image, limits = Image.host(), Limits()
    async with LocalPool(image, limits=limits) as pooled, LocalPool(image, limits=limits, network="fresh") as fresh:
        other["idle_mib"] = await idle_memory(pooled, scale(1000), times=3)
        works: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {
            "bare sh -c echo": (bare, 400),
            "strop create+echo+destroy": (cycles(pooled), 200),
            "strop, fresh network": (cycles(fresh), 200),
            "strop exec in a live sandbox": (execs(pooled, walls), 400),
            **peers,
        }
        for work, _ in works.values():
            await work(5)
        walls.clear()
        for number in range(arguments.rounds):
            for name, (work, count) in works.items():
                samples.setdefault(name, []).append(await measured(meter, scale(count), work))
            other["python_cell_ms"].append(await cells(pooled, scale(100), False))
            other["python_cell_fork_ms"].append(await cells(pooled, scale(60), True))
            other["gone_after_kill_ms"].append(gone_after_kill())
            print(f"round {number + 1} of {arguments.rounds}", flush=True)
    return report(samples, walls, other, list(peers))


def report(
    samples: dict[str, list[float]], walls: list[float], other: dict[str, list[float]], peers: list[str]
) -> dict[str, object]:
    middle = {name: statistics.median(values) for name, values in samples.items()}
    base = samples["bare sh -c echo"]
    print(f"\n{'':32}{'CPU ms':>9}{'/s/core':>9}{'x bare':>8}   spread of x bare over rounds")
    ratios = {}
    for name, values in samples.items():
        each = [value / beside for value, beside in zip(values, base, strict=True)]
        ratios[name] = statistics.median(each)
        print(
            f"{name:32}{middle[name]:9.3f}{1000 / middle[name]:9.0f}{ratios[name]:8.2f}   {min(each):.2f} … {max(each):.2f}"
        )
    other_middle = {name: statistics.median(values) for name, values in other.items()}
    print(f"\nexec wall p50 {statistics.median(walls):.2f} ms, p99 {statistics.quantiles(walls, n=100)[98]:.2f} ms")
    for name, values in other.items():
        print(f"{name:24}{other_middle[name]:9.3f}   {min(values):.3f} … {max(values):.3f}")
    return {
        "create_exec_destroy_per_s_core": round(1000 / middle["strop create+echo+destroy"]),
        "create_exec_destroy_fresh_net_per_s_core": round(1000 / middle["strop, fresh network"]),
        "times_bare_sh": round(ratios["strop create+echo+destroy"], 2),
        "exec_per_s_core": round(1000 / middle["strop exec in a live sandbox"]),
        "bare_sh_per_s_core": round(1000 / middle["bare sh -c echo"]),
        "exec_p50_ms": round(statistics.median(walls), 3),
        **{name: round(value, 3) for name, value in other_middle.items()},
        "peers": {name: round(1000 / middle[name], 1) for name in peers},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the operations of a round")
    parser.add_argument("--no-peers", action="store_true")
    arguments = parser.parse_args()
    meter = Meter()
    try:
        with contextlib.ExitStack() as stack:
            peers = {} if arguments.no_peers else find_peers(stack)
            result = asyncio.run(run(arguments, meter, peers))
    finally:
        meter.close()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
