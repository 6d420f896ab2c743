"""Attacks with processes and time: bombs, escapes from a time-out, signals to the wrong ones."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest
from leftovers import groups_of_this_process

from strop.sandboxes import LocalPool, LocalSandbox, SandboxDead


async def living(box: LocalSandbox) -> int:
    """Processes of the sandbox, less the agent and the one that counts."""
    result = await box.exec(["/bin/sh", "-c", "set -- /proc/[0-9]*; echo $#"])
    return int(result.stdout) - 2


async def settled(box: LocalSandbox) -> int:
    """As `living`, once those that were killed are reaped: on a busy machine that is not at once."""
    for _ in range(100):
        if (count := await living(box)) == 0:
            break
        await asyncio.sleep(0.03)
    return count


@pytest.mark.parametrize(
    "command",
    [
        ["/bin/bash", "-c", "bomb(){ bomb|bomb& };bomb; sleep 30"],
        ["python3", "-c", "import os\nwhile 1:\n try: os.fork() or os.setsid()\n except OSError: pass"],
        ["/bin/bash", "-c", "while :; do (setsid sleep 50 &) ; done 2>/dev/null"],
    ],
    ids=["bash bomb", "python bomb that makes daemons", "daemons without end"],
)
async def test_a1_a2_a_fork_bomb_meets_the_limit_and_dies_at_its_time(
    box: LocalSandbox, pool: LocalPool, command: list[str]
) -> None:
    bystander = await pool.create()
    task = asyncio.create_task(box.exec(command, timeout=1.0))
    await asyncio.sleep(0.3)
    assert (await bystander.exec("echo here", timeout=20)).ok
    result = await task
    assert result.timed_out and result.signal == signal.SIGKILL
    assert await settled(box) == 0
    await bystander.destroy()


async def test_a1_processes_are_limited(box: LocalSandbox) -> None:
    script = "import os,time\nn=0\nwhile 1:\n try: pid=os.fork()\n except OSError: break\n if pid==0: time.sleep(60)\n n+=1\nprint(n)"
    result = await box.exec(["python3", "-c", script], kill_leftovers=True)
    assert 100 <= int(result.stdout) <= 128
    assert await settled(box) == 0


async def test_a3_cpu_time_is_limited_to_its_share(pool: LocalPool) -> None:
    from dataclasses import replace

    box = await pool.create(limits=replace(pool.limits, cpus=0.25))
    files = [
        file
        for name in ("cpu.cfs_quota_us", "cpu.max")
        for group in groups_of_this_process()
        for file in group.glob(f"*/{name}")
    ]
    assert "25000" in {file.read_text().split()[0] for file in files}, "a busy machine may give it less by itself"
    started = time.monotonic()
    result = await box.exec(
        "for i in 1 2 3 4; do (while :; do :; done)& done; sleep 1.2; times", timeout=20, kill_leftovers=True
    )
    wall = time.monotonic() - started
    minutes, seconds = result.text.splitlines()[1].split()[0].rstrip("s").split("m")
    assert float(minutes) * 60 + float(seconds) <= 0.25 * wall + 0.2
    await box.destroy()


async def test_a4_the_agent_can_not_be_killed_from_inside(box: LocalSandbox) -> None:
    result = await box.exec("for s in KILL STOP TERM INT HUP USR1 SEGV CHLD; do kill -$s 1; done; sleep .1; echo alive")
    assert result.stdout == b"alive\n"


async def test_a5_killing_everything_kills_only_what_is_inside(box: LocalSandbox) -> None:
    await box.exec("(sleep 100 &); kill -9 -1")
    assert psutil.Process().is_running()
    assert await settled(box) == 0


async def test_a6_no_process_of_the_host_can_be_named(box: LocalSandbox) -> None:
    result = await box.exec(f"kill -9 {os.getpid()} {os.getppid()}; echo $?")
    assert result.stdout == b"1\n" and b"No such process" in result.stderr
    script = "import os\nfound=[]\nfor pid in range(1,40000):\n try: os.kill(pid,0); found.append(pid)\n except ProcessLookupError: pass\n except PermissionError: found.append(-pid)\nprint(len(found))"
    assert int((await box.exec(["python3", "-c", script])).stdout) <= 2


async def test_a7_a_time_out_reaches_what_left_its_session_and_traps_signals(box: LocalSandbox) -> None:
    line = """trap "" TERM INT HUP; setsid bash -c 'trap "" TERM; sleep 100' & (setsid nohup sleep 101 >/dev/null 2>&1 &); wait"""
    started = time.monotonic()
    result = await box.exec(["/bin/bash", "-c", line], timeout=0.5)
    assert result.timed_out and time.monotonic() - started < 5
    assert await settled(box) == 0


async def test_h1_a_time_out_spares_what_other_commands_run(box: LocalSandbox) -> None:
    other = asyncio.create_task(box.exec("(sleep 1; echo inner) & wait; echo outer", timeout=20))
    await asyncio.sleep(0.2)
    assert (await box.exec("(setsid sleep 100 &); sleep 100", timeout=0.3)).timed_out
    assert (await other).stdout == b"inner\nouter\n"


async def test_a8_a_daemon_lives_until_the_sandbox_ends(box: LocalSandbox) -> None:
    result = await box.exec("(setsid nohup sleep 300 >/dev/null 2>&1 &); echo main-done")
    assert result.stdout == b"main-done\n" and result.wall < 3
    assert await living(box) == 1


async def test_a8_leftovers_die_when_that_is_asked_for(box: LocalSandbox) -> None:
    assert (
        await box.exec("(setsid nohup sleep 300 >/dev/null 2>&1 &); echo main-done", kill_leftovers=True)
    ).stdout == b"main-done\n"
    assert await settled(box) == 0


async def test_a9_a_daemon_that_holds_the_output_does_not_hold_the_result(box: LocalSandbox) -> None:
    result = await box.exec("(setsid sleep 30 &); echo main-done", timeout=20)
    assert result.stdout == b"main-done\n" and not result.timed_out


async def test_a10_a_command_that_stops_itself_is_killed_at_its_time(box: LocalSandbox) -> None:
    result = await box.exec("kill -STOP $$", timeout=0.5)
    assert result.timed_out and result.signal == signal.SIGKILL


@pytest.mark.parametrize(
    "place", ["/proc/self/fd/3", "/proc/1/root", "/proc/1/cwd", "/proc/self/fd/5", "/nowhere", "/etc/passwd"]
)
async def test_a13_a_working_directory_never_leads_out(box: LocalSandbox, place: str) -> None:
    result = await box.exec("pwd", cwd=place)
    assert result.exit_code in (126, 127) and result.error and "working directory" in result.error


async def test_a15_commands_that_race_with_the_end_all_come_back(pool: LocalPool) -> None:
    box = await pool.create()
    commands = [asyncio.create_task(box.exec("sleep 0.05; echo done")) for _ in range(60)]
    await asyncio.sleep(0.05)
    await box.destroy()
    results = await asyncio.wait_for(asyncio.gather(*commands, return_exceptions=True), 20)
    assert all(isinstance(result, SandboxDead) or result.ok for result in results)
    assert any(isinstance(result, SandboxDead) for result in results)
    with pytest.raises(SandboxDead):
        await box.exec("true")


async def test_h2_a_cancelled_call_takes_its_command_along(box: LocalSandbox) -> None:
    task = asyncio.create_task(box.exec("(setsid sleep 100 &); sleep 100"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if await living(box) == 0:
            break
        await asyncio.sleep(0.02)
    assert await settled(box) == 0


async def test_orphans_are_reaped(box: LocalSandbox) -> None:
    await box.exec("for i in $(seq 50); do (setsid true &); done", kill_leftovers=True)
    await asyncio.sleep(0.1)
    assert b"Z" not in (await box.exec("cat /proc/[0-9]*/stat | sed 's/.*) //' | cut -c1")).stdout


async def test_h3_ignored_signals_of_the_host_are_not_ignored_inside(box: LocalSandbox) -> None:
    """Python ignores SIGPIPE; `yes | head` would never end if that were inherited."""
    result = await box.exec("yes | head -n 1; grep SigIgn /proc/self/status")
    assert result.stdout.splitlines()[0] == b"y" and int(result.stdout.split()[-1], 16) == 0


async def test_real_time_priority_and_negative_niceness_are_refused(box: LocalSandbox) -> None:
    script = "import os\ntry:\n os.sched_setscheduler(0,os.SCHED_FIFO,os.sched_param(50)); print('rt')\nexcept PermissionError: pass\ntry:\n os.setpriority(os.PRIO_PROCESS,0,-20); print('nice')\nexcept PermissionError: pass"
    assert (await box.exec(["python3", "-c", script])).stdout == b""


async def test_h4_its_time_to_live_ends_it_whatever_it_does(pool: LocalPool) -> None:
    box = await pool.create(ttl=0.3)
    with pytest.raises(SandboxDead, match="time to live"):
        await box.exec("trap '' TERM; sleep 100", timeout=50)
