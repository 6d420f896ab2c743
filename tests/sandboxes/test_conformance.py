"""What every implementation of the sandbox protocol does. One suite, run over each of them."""

from __future__ import annotations

import asyncio
import io
import signal
import tarfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Literal

import pytest
from stand_ins import ScriptPool

from strop.sandboxes import (
    ExecResult,
    FileProblem,
    Image,
    Limits,
    LocalPool,
    RemotePool,
    Sandbox,
    SandboxDead,
    SandboxFailure,
    SandboxPool,
    Tier,
    serve,
)
from strop.sandboxes.cgroups import find_roots
from strop.sandboxes.sandbox import MIB
from strop.sandboxes.tiers import obstacle

LIMITS = Limits(memory=256 * MIB, processes=128, disk=64 * MIB, inodes=20000, timeout=20.0)


#: What can't be known or done where there is nothing but a shell, as docs/how-to-sandboxes-elsewhere.md says.
NOT_BY_SHELL = {
    "test_a_command_comes_back_with_all_that_is_known",
    "test_cpu_time_is_that_of_the_command",
    "test_a_program_that_can_not_be_run_is_a_result_with_an_error",
    "test_signals_are_told_from_exit_codes",
    "test_users_are_taken_by_name_number_and_group",
    "test_a_slow_reader_slows_the_command_and_loses_nothing",
    "test_a_snapshot_holds_files_and_its_children_part_ways",
    "test_forks_begin_with_the_files_of_their_parent",
    "test_a_long_chain_of_snapshots_is_flattened_and_stays_right",
    "test_a_pause_stops_everything_and_a_snapshot_may_be_taken_meanwhile",
}


@pytest.fixture(params=["local", "warm", "http", "bubblewrap", "shell"])
async def pool(request: pytest.FixtureRequest, host_image: Image) -> AsyncIterator[SandboxPool]:
    image = replace(host_image, env={**host_image.env, "FROM_IMAGE": "1"}, cwd="/tmp")
    weak = bool(find_roots().missing)  # an ordinary user's: see test_tiers.py
    if request.param == "http":
        listening: asyncio.Future[tuple[str, str]] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(image, port=0, limits=LIMITS, allow_weak=weak, on_ready=lambda *where: listening.set_result(where))
        )
        async with RemotePool(*await asyncio.wait_for(listening, 20)) as remote:
            yield remote
        serving.cancel()
        await asyncio.wait([serving], timeout=20)
        assert serving.done()
        return
    tier: Tier | Literal["auto"] = "auto"
    if request.param == "shell":
        if request.node.originalname in NOT_BY_SHELL:
            pytest.skip("not over a shell alone")
        async with LocalPool(host_image, allow_weak=weak) as machine:
            env = {"HOME": "/root", "FROM_IMAGE": "1"}
            async with ScriptPool(machine, limits=LIMITS, env=env, cwd="/tmp") as scripted:
                yield scripted
        return
    if request.param == "bubblewrap":
        tier = "bubblewrap"
        if (lack := obstacle(tier)) is not None:
            pytest.skip(f"{lack.what} is missing")
    warm = 2 if request.param == "warm" else 0
    async with LocalPool(image, limits=LIMITS, warm=warm, tier=tier, least="bubblewrap", allow_weak=weak) as local:
        yield local


@pytest.fixture
async def box(pool: SandboxPool) -> AsyncIterator[Sandbox]:
    sandbox = await pool.create(labels={"task": "7"})
    yield sandbox
    await sandbox.destroy()


async def _needs_users(box: Sandbox) -> None:
    """Without newuidmap an ordinary user's sandbox has one user."""
    if int((await box.exec("cat /proc/self/uid_map")).text.split()[-1]) == 1:
        pytest.skip("one user id alone is mapped")


async def test_a_command_comes_back_with_all_that_is_known(box: Sandbox) -> None:
    result = await box.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == (b"out\n", b"err\n", 3)
    assert (result.signal, result.timed_out, result.oom, result.truncated, result.error) == (
        None,
        False,
        False,
        False,
        None,
    )
    assert (result.stdout_bytes, result.stderr_bytes) == (4, 4) and 0 < result.wall < 20 and result.peak_memory > 0
    assert not result.ok and box.labels == {"task": "7"}


async def test_cpu_time_is_that_of_the_command(box: Sandbox) -> None:
    busy = await box.exec(
        ["python3", "-c", "import time\nend=time.process_time()+0.3\nwhile time.process_time()<end: pass"]
    )
    idle = await box.exec("sleep 0.3")
    assert 0.25 < busy.cpu < 1.5 and idle.cpu < 0.1


async def test_arguments_are_not_seen_by_a_shell(box: Sandbox) -> None:
    assert (await box.exec(["echo", "$HOME", "a b", "*", "'"])).text == "$HOME a b * '\n"


async def test_shell_lines_are(box: Sandbox) -> None:
    assert (await box.exec("printf %s $HOME | tr a-z A-Z")).text == "/ROOT"


async def test_input_environment_and_directory_are_given(box: Sandbox) -> None:
    result = await box.exec("cat; echo $A $FROM_IMAGE $PWD", stdin=b"in\x00\xff", env={"A": "ü"}, cwd="/usr/bin")
    assert result.stdout == b"in\x00\xff" + "ü 1 /usr/bin\n".encode()
    assert (await box.exec("pwd")).text == "/tmp\n"


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["nowhere"], 127, "No such file"),
        (["/etc/passwd"], 126, "Permission denied"),
        (["/tmp"], 126, "Permission denied"),
    ],
)
async def test_a_program_that_can_not_be_run_is_a_result_with_an_error(
    box: Sandbox, command: list[str], code: int, words: str
) -> None:
    result = await box.exec(command)
    assert result.exit_code == code and result.error is not None and words in result.error


async def test_signals_are_told_from_exit_codes(box: Sandbox) -> None:
    killed, exited = await box.exec(["sh", "-c", "kill -TERM $$"]), await box.exec("exit 143")
    assert (killed.signal, killed.exit_code) == (signal.SIGTERM, 143)
    assert (exited.signal, exited.exit_code) == (None, 143)


async def test_a_time_out_keeps_what_was_printed(box: Sandbox) -> None:
    result = await box.exec("echo before; sleep 100", timeout=0.4)
    assert result.timed_out and result.text == "before\n" and not result.ok


async def test_users_are_taken_by_name_number_and_group(box: Sandbox) -> None:
    await _needs_users(box)
    await box.exec("useradd -m bob && groupadd -g 4242 crew && usermod -aG crew bob")
    assert (await box.exec("id -un; id -Gn; echo $HOME", user="bob")).text.split("\n")[:3] == [
        "bob",
        "bob crew",
        "/home/bob",
    ]
    assert (await box.exec("id -u; id -g", user=1234)).text.split() == ["1234", "1234"]
    assert (await box.exec("id -u; id -g", user="bob:crew")).text.split() == ["1000", "4242"]
    with pytest.raises(FileProblem, match="carol"):
        await box.exec("id", user="carol")


async def test_commands_run_side_by_side(box: Sandbox) -> None:
    started = time.monotonic()
    results = await asyncio.gather(*(box.exec(f"sleep 0.5; echo {number}") for number in range(12)))
    assert [int(result.text) for result in results] == list(range(12)) and time.monotonic() - started < 5


async def test_output_streams_as_it_is_written(box: Sandbox) -> None:
    pieces, times = [], []
    async for piece in box.stream("echo one; sleep 0.6; echo two >&2; exit 4"):
        pieces.append(piece)
        times.append(time.monotonic())
    result = pieces.pop()
    assert isinstance(result, ExecResult) and result.exit_code == 4 and result.stdout == b""
    assert [(piece.stream, piece.data) for piece in pieces] == [("stdout", b"one\n"), ("stderr", b"two\n")]


async def test_a_slow_reader_slows_the_command_and_loses_nothing(box: Sandbox) -> None:
    received = 0
    async for piece in box.stream("head -c 20000000 /dev/zero; echo end"):
        if isinstance(piece, ExecResult):
            assert piece.stdout_bytes == 20_000_004
        else:
            received += len(piece.data)
    assert received == 20_000_004


async def test_a_process_is_spoken_to(box: Sandbox) -> None:
    process = await box.start(["python3", "-c", "for line in iter(input, 'end'): print(line.upper(), flush=True)"])
    await process.write(b"one\n")
    output = aiter(process)
    assert (await anext(output)).data == b"ONE\n"
    await process.write(b"two\nend\n")
    assert b"".join([chunk.data async for chunk in output]) == b"TWO\n"
    assert (await process.wait()).exit_code == 0


async def test_a_process_reads_the_end_of_its_input_and_takes_signals(box: Sandbox) -> None:
    process = await box.start("cat; echo closed")
    await process.write(b"x")
    await process.close_stdin()
    assert b"".join([chunk.data async for chunk in process]) == b"xclosed\n"
    process = await box.start("trap 'echo got; exit 5' USR1; echo up; while :; do sleep 0.05; done")
    output = aiter(process)
    assert (await anext(output)).data == b"up\n"
    await process.signal(signal.SIGUSR1)
    assert b"".join([chunk.data async for chunk in output]) == b"got\n"
    assert (await process.wait()).exit_code == 5
    process = await box.start("(setsid sleep 100 &) ; sleep 100")
    await process.kill()
    assert (await process.wait()).signal == signal.SIGKILL


async def test_a_shell_remembers(box: Sandbox) -> None:
    shell = await box.shell()
    assert (await shell.run("cd /usr; x=5; f() { echo f$1; }; export Y=6; false")).exit_code == 1
    assert (await shell.run("echo $x $PWD; f 1; sh -c 'echo $Y'")).text == "5 /usr\nf1\n6\n" and shell.cwd == "/usr"
    assert (await shell.run("cat; echo err >&2")).stderr == b"err\n"
    assert (await shell.run("printf 'status\\0/etc\\0' >&1; echo 'a\nb'")).stdout == b"status\0/etc\0a\nb\n"
    await shell.close()


async def test_a_shell_survives_a_time_out_and_is_replaced_if_it_does_not(box: Sandbox) -> None:
    shell = await box.shell()
    await shell.run("x=5")
    assert (await shell.run("sleep 100", timeout=0.4)).timed_out
    assert (await shell.run("echo $x")).text == "5\n"
    assert (await shell.run("while :; do :; done", timeout=0.4)).timed_out
    assert (await shell.run("echo new$x")).text == "new\n"
    assert (await shell.run("exit 7")).exit_code == 7
    assert (await shell.run("echo again")).text == "again\n"


async def test_cells_keep_their_names_and_show_their_values(box: Sandbox) -> None:
    python = await box.python(["json"])
    assert (await python.run("x = 20\nprint('hi')\nx + 1")).value == "21"
    result = await python.run("def f():\n    raise ValueError('bad')\nf()")
    assert result.error is not None and result.error.endswith("ValueError: bad\n") and "cell_runner" not in result.error
    assert (await python.run("print(x)")).stdout == b"20\n"
    assert "SyntaxError" in str((await python.run("x =")).error)
    assert (await python.run("import sys; sys.exit(3)")).error == "SystemExit: 3"
    assert (await python.run("x")).value == "20"


async def test_a_forked_cell_leaves_nothing_behind(box: Sandbox) -> None:
    python = await box.python()
    await python.run("x = 1")
    assert (await python.run("x += 1", fork=True)).value is None
    assert (await python.run("x += 1\nx", fork=True)).value == "2"
    assert (await python.run("import os; os._exit(9)", fork=True)).error is not None
    assert (await python.run("import time; time.sleep(100)", fork=True, timeout=0.4)).timed_out
    result = await python.run("x")
    assert result.value == "1" and not result.lost


async def test_a_cell_that_runs_too_long_or_ends_its_interpreter_is_lost_and_the_next_works(box: Sandbox) -> None:
    python = await box.python()
    result = await python.run("while True: pass", timeout=0.4)
    assert result.timed_out and result.lost
    assert (await python.run("1 + 1")).value == "2"
    assert (await python.run("import os; os._exit(1)")).lost
    assert (await python.run("1 + 1")).value == "2"


async def test_cells_can_not_forge_answers_by_printing(box: Sandbox) -> None:
    python = await box.python()
    result = await python.run("import os, struct\nos.write(1, struct.pack('<I', 2) + b'{}')\n'real'")
    assert result.value == "'real'" and result.stdout == b"\x02\0\0\0{}"


async def test_an_interpreter_that_can_not_start_says_why(box: Sandbox) -> None:
    with pytest.raises(SandboxFailure, match="no_such_module"):
        await box.python(["no_such_module"])


async def test_files_and_folders_come_and_go(box: Sandbox) -> None:
    await box.put("/data/deep/file", b"\x00\xff", mode=0o600)
    assert await box.get("/data/deep/file") == b"\x00\xff"
    (info,) = await box.list("/data/deep")
    assert (info.path, info.kind, info.size, info.mode, info.uid) == ("file", "file", 2, 0o600, 0)
    with pytest.raises(FileProblem, match="does not exist"):
        await box.get("/nowhere")
    with pytest.raises(FileProblem, match="larger than 1 bytes"):
        await box.get("/data/deep/file", max_bytes=1)
    await box.exec("ln -s deep /data/link; mkfifo /data/pipe")
    assert {info.path: info.kind for info in await box.list("/data")} == {
        "deep": "folder",
        "link": "link",
        "pipe": "special",
    }
    archive = await box.get_archive("/data")
    if not hasattr(tarfile, "data_filter"):
        pytest.skip("Python before 3.11.4 can't check archives")
    await box.put_archive("/copy", archive)
    assert await box.get("/copy/deep/file") == b"\x00\xff"
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert sorted(opened.getnames()) == ["deep", "deep/file", "link"]


async def test_a_snapshot_holds_files_and_its_children_part_ways(box: Sandbox, pool: SandboxPool) -> None:
    await _needs_users(box)
    await box.exec(
        "echo base > /a; rm -f /etc/hosts; mkdir /d; echo x > /d/x; ln /d/x /d/y; chown 1000 /a; chmod 640 /a; ln -s /a /l; truncate -s 1G /sparse"
    )
    snapshot = await box.snapshot()
    await box.exec("echo later > /a")
    first, second = await pool.create(snapshot=snapshot), await pool.create(snapshot=snapshot)
    assert (
        await first.exec("cat /a /l; ls /etc/hosts; stat -c '%u %a' /a; stat -c %h /d/x; stat -c %s /sparse")
    ).text == "base\nbase\n1000 640\n2\n1073741824\n"
    await first.exec("echo mine > /a; rm -rf /d; mkdir /d")
    assert (await second.exec("cat /a; ls /d")).text == "base\nx\ny\n"
    again = await first.snapshot()
    third = await pool.create(snapshot=again)
    assert (await third.exec("cat /a; ls /d")).text == "mine\n"
    await snapshot.delete()
    assert (await second.exec("cat /a")).text == "base\n", "those made from it live on"
    for sandbox in (first, second, third):
        await sandbox.destroy()
    await again.delete()


async def test_forks_begin_with_the_files_of_their_parent(box: Sandbox) -> None:
    await box.exec("echo here > /f")
    children = await box.fork(3)
    assert [(await child.exec("cat /f")).text for child in children] == ["here\n"] * 3
    assert len({child.id for child in children} | {box.id}) == 4
    for child in children:
        await child.destroy()


async def test_a_long_chain_of_snapshots_is_flattened_and_stays_right(pool: SandboxPool) -> None:
    box = await pool.create()
    for number in range(23):
        await box.exec(
            f"echo {number} > /n{number}; rm -f /n{number - 3}; rm -rf /d; mkdir /d; echo {number} > /d/{number}"
        )
        snapshot = await box.snapshot()
        await box.destroy()
        box = await pool.create(snapshot=snapshot)
        await snapshot.delete()
    assert (await box.exec("cat /n*; cat /d/*; ls /d | wc -l")).text.split() == ["20", "21", "22", "22", "1"]
    await box.destroy()


async def test_a_pause_stops_everything_and_a_snapshot_may_be_taken_meanwhile(box: Sandbox) -> None:
    await box.start("while :; do echo x >> /count; sleep 0.01; done")
    await asyncio.sleep(0.3)
    await box.pause()
    # Nothing can be asked of it now: its size is seen in forks, which share no programs.
    await box.resume()
    before = len(await box.get("/count"))
    await asyncio.sleep(0.3)
    assert len(await box.get("/count")) > before


async def test_what_is_gone_says_so(box: Sandbox) -> None:
    await box.destroy()
    with pytest.raises(SandboxDead):
        await box.exec("true")
    with pytest.raises(SandboxDead):
        await box.get("/etc/passwd")
    await box.destroy()


async def test_a_sandbox_gets_limits_of_its_own(pool: SandboxPool) -> None:
    box = await pool.create(limits=replace(LIMITS, processes=12), env={"OWN": "1"})
    script = "import os,time\nn=0\ntry:\n while 1:\n  if os.fork()==0: time.sleep(5); os._exit(0)\n  n+=1\nexcept OSError: print(n, os.environ['OWN'])"
    count, own = (await box.exec(["python3", "-c", script], kill_leftovers=True)).text.split()
    assert int(count) <= 11 and own == "1"
    await box.destroy()
