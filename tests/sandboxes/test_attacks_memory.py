"""Attacks with memory, disk and output: floods that must stay inside, or be cut, or be told apart from crashes."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from strop.sandboxes import FileProblem, LocalPool, LocalSandbox
from strop.sandboxes.sandbox import MIB


async def test_b1_memory_is_limited_and_said_to_be_the_reason(box: LocalSandbox) -> None:
    result = await box.exec(["python3", "-c", "x=[]\nwhile 1: x.append(bytearray(10<<20))"], timeout=30)
    assert result.oom and result.exit_code == 137 and not result.timed_out
    assert not (await box.exec("echo ok")).oom, "the kill is counted once"


async def test_a_kill_by_signal_is_not_mistaken_for_memory(box: LocalSandbox) -> None:
    result = await box.exec("kill -9 $$")
    assert result.signal == 9 and not result.oom


async def test_b2_children_killed_for_memory_are_counted_though_the_main_process_ends_well(box: LocalSandbox) -> None:
    line = "for i in 1 2 3 4 5 6; do python3 -c 'import time; x=bytearray(90<<20); time.sleep(1)' & done; wait; exit 0"
    result = await box.exec(line, timeout=60)
    assert result.exit_code == 0 and result.oom_kills >= 1


@pytest.mark.parametrize("place", ["/dev/shm/x", "/big", "/tmp/x", "/var/tmp/x"])
async def test_b3_b5_the_disk_is_limited_wherever_one_writes(box: LocalSandbox, place: str) -> None:
    free = os.statvfs("/").f_bavail
    result = await box.exec(f"dd if=/dev/zero of={place} bs=1M count=1000; stat -c %s {place}", timeout=30)
    assert b"No space left" in result.stderr
    assert int(result.stdout) <= 64 * MIB
    assert abs(os.statvfs("/").f_bavail - free) * os.statvfs("/").f_frsize < 2048 * MIB
    assert (await box.exec(f"rm {place}")).ok


async def test_h5_one_quota_covers_disk_and_shared_memory(box: LocalSandbox) -> None:
    result = await box.exec("head -c 40M /dev/zero > /a; head -c 40M /dev/zero > /dev/shm/b; stat -c %s /a /dev/shm/b")
    assert sum(map(int, result.stdout.split())) <= 64 * MIB


async def test_b6_inodes_are_limited(box: LocalSandbox) -> None:
    script = "import os\nos.mkdir('/tmp/d')\nn=0\ntry:\n while n<100000: open(f'/tmp/d/{n}','w').close(); n+=1\nexcept OSError as e: print(n, e.errno)"
    count, error = (await box.exec(["python3", "-c", script], timeout=60)).text.split()
    assert int(count) < 20000 and error == "28"


async def test_b7_a_sparse_terabyte_is_refused_unread(box: LocalSandbox) -> None:
    assert (await box.exec("truncate -s 1T /sparse")).ok
    with pytest.raises(FileProblem, match="larger than"):
        await box.get("/sparse")


async def test_b9_a_flood_is_cut_counted_and_its_ends_kept(box: LocalSandbox) -> None:
    result = await box.exec("echo first; yes | head -c 200M; echo last", timeout=60)
    assert result.truncated and result.stdout_bytes == 200 * MIB + len("first\nlast\n")
    assert (
        len(result.stdout) == MIB and result.stdout.startswith(b"first\ny\n") and result.stdout.endswith(b"y\nlast\n")
    )


async def test_both_streams_are_cut_on_their_own(box: LocalSandbox) -> None:
    result = await box.exec("head -c 3000 /dev/zero; head -c 10 /dev/zero >&2", max_output=1000)
    assert result.truncated and (len(result.stdout), result.stdout_bytes) == (1000, 3000)
    assert (len(result.stderr), result.stderr_bytes) == (10, 10)


async def test_b10_a_flood_without_end_is_killed_at_its_time(box: LocalSandbox) -> None:
    result = await box.exec("yes", timeout=0.5)
    assert result.timed_out and result.truncated


async def test_b12_a_line_without_end_is_bounded(box: LocalSandbox) -> None:
    result = await box.exec("head -c 100M /dev/zero", max_output=65536, timeout=60)
    assert result.stdout == bytes(65536) and result.stdout_bytes == 100 * MIB


async def test_b13_input_that_nobody_reads_does_not_block(box: LocalSandbox) -> None:
    result = await box.exec("sleep 0.2", stdin=bytes(10 * MIB))
    assert result.ok


async def test_large_input_arrives_whole(box: LocalSandbox) -> None:
    data = os.urandom(5 * MIB)
    assert (await box.exec("cat", stdin=data, max_output=6 * MIB)).stdout == data


async def test_b14_no_input_is_an_empty_input(box: LocalSandbox) -> None:
    assert (await box.exec("cat; echo eof")).stdout == b"eof\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["x" * 100_000], 100_000), (["a"] * 3000, 3000), (["x" * 120_000, "y" * 120_000], 240_000)],
    ids=["one long", "many", "beyond one message"],
)
async def test_b15_arguments_are_never_cut(box: LocalSandbox, arguments: list[str], expected: int) -> None:
    result = await box.exec(["python3", "-c", "import sys; print(sum(map(len, sys.argv[1:])))", *arguments])
    assert int(result.stdout) == expected


async def test_b15_an_argument_beyond_the_kernels_limit_is_a_clean_error(box: LocalSandbox) -> None:
    result = await box.exec(["/bin/echo", "x" * 200_000])
    assert result.exit_code == 126 and result.error == "could not run the program: Argument list too long"


async def test_b15_a_large_environment_arrives_whole(box: LocalSandbox) -> None:
    result = await box.exec(
        ["python3", "-c", "import os; print(sum(len(v) for k, v in os.environ.items() if k[0]=='V'))"],
        env={f"V{i}": "x" * 1000 for i in range(1000)},
    )
    assert int(result.stdout) == 1_000_000


@pytest.mark.parametrize("command", [["/bin/echo", "a\0b"], "echo a\0b"])
async def test_b15_nul_bytes_are_refused(box: LocalSandbox, command: list[str] | str) -> None:
    with pytest.raises(ValueError, match="NUL"):
        await box.exec(command)
    with pytest.raises(ValueError, match="NUL"):
        await box.exec("true", env={"A": "b\0C=d"})


async def test_h6_a_variable_name_can_not_smuggle_another(box: LocalSandbox) -> None:
    with pytest.raises(ValueError, match="name of a variable"):
        await box.exec("true", env={"A=B": "c"})


async def test_b16_bytes_that_are_not_text_come_back_as_they_are(box: LocalSandbox) -> None:
    result = await box.exec(r"printf '\377\376\000ok'")
    assert result.stdout == b"\xff\xfe\x00ok" and result.text == "\ufffd\ufffd\x00ok"


async def test_no_core_is_dumped(box: LocalSandbox) -> None:
    result = await box.exec("ulimit -Hc; ulimit -c unlimited; cd /tmp; sh -c 'kill -SEGV $$'; ls /tmp")
    assert result.stdout in (b"0\n", b"1\n")


async def test_h7_descriptors_are_limited(pool: LocalPool) -> None:
    box = await pool.create(limits=replace(pool.limits, open_files=64))
    result = await box.exec(
        ["python3", "-c", "import os\nn=0\ntry:\n while 1: os.dup(0); n+=1\nexcept OSError: print(n)"]
    )
    assert int(result.stdout) <= 61
    await box.destroy()


async def test_h8_pinned_and_anonymous_memory_files_count(box: LocalSandbox) -> None:
    script = "import os\nfd=os.memfd_create('x')\nb=bytes(1<<20)\nfor _ in range(400): os.write(fd,b)\nprint('escaped')"
    result = await box.exec(["python3", "-c", script], timeout=30)
    assert b"escaped" not in result.stdout and result.oom


async def test_h9_pipes_filled_and_left_count_against_it(box: LocalSandbox) -> None:
    """Kernel memory of pipe buffers belongs to the sandbox too; it ends in a refusal or in its own death."""
    script = "import os,fcntl\nb=bytes(65536)\nfor _ in range(8000):\n r,w=os.pipe(); os.set_blocking(w,False)\n try: os.write(w,b)\n except BlockingIOError: pass"
    result = await box.exec(["python3", "-c", script], timeout=30)
    assert not result.ok
