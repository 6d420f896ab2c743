"""Attacks on the host's side of file transfer: links, special files, archives that leave their folder."""

from __future__ import annotations

import contextlib
import io
import tarfile
import tempfile
from pathlib import Path

import pytest

from strop.sandboxes import FileProblem, LocalSandbox
from strop.sandboxes.sandbox import MIB


async def test_e1_a_link_out_leads_to_the_sandboxes_own_file(box: LocalSandbox) -> None:
    await box.exec("ln -s /etc/shadow /tmp/l; echo mine > /etc/shadow")
    assert await box.get("/tmp/l") == b"mine\n"
    with tempfile.NamedTemporaryFile() as secret:
        await box.exec(f"ln -sf {secret.name} /tmp/l")
        with pytest.raises(FileProblem, match="does not exist"):
            await box.get("/tmp/l")


async def test_e2_writing_through_a_link_stays_inside(box: LocalSandbox) -> None:
    before = Path("/etc/hosts").read_bytes()
    await box.exec("ln -s /etc /tmp/d")
    await box.put("/tmp/d/hosts", b"theirs")
    assert await box.get("/etc/hosts") == b"theirs" and Path("/etc/hosts").read_bytes() == before


async def test_h18_a_link_at_the_target_is_replaced_not_followed(box: LocalSandbox) -> None:
    await box.exec("echo keep > /tmp/kept; ln -s /tmp/kept /tmp/l")
    await box.put("/tmp/l", b"new")
    assert (await box.get("/tmp/kept"), await box.get("/tmp/l")) == (b"keep\n", b"new")


@pytest.mark.parametrize(
    "path",
    [
        "/tmp/fifo",
        "/tmp/socket",
        "/dev/zero",
        "/dev/null",
        "/dev/tty",
        "/tmp",
        "/",
        "/proc/kmsg",
        "/proc/self/fd/0",
        "/proc/self/fd/1",
        "/proc/1/mem",
        "",
    ],
)
async def test_e4_special_files_are_refused_at_once(box: LocalSandbox, path: str) -> None:
    await box.exec(
        ["python3", "-c", "import os,socket\nos.mkfifo('/tmp/fifo')\nsocket.socket(socket.AF_UNIX).bind('/tmp/socket')"]
    )
    with pytest.raises(FileProblem):
        await box.get(path)


async def test_e4_a_file_that_grows_while_it_is_read_is_capped(box: LocalSandbox) -> None:
    writer = await box.start("while :; do head -c 1M /dev/zero >> /tmp/grows || sleep 1; done")
    for _ in range(5):
        try:
            assert len(await box.get("/tmp/grows", max_bytes=8 * MIB)) <= 8 * MIB
        except FileProblem as problem:
            assert "larger" in str(problem) or "exist" in str(problem)
    await writer.kill()


@pytest.mark.parametrize("path", ["/proc/self/root/etc/passwd", "/proc/self/cwd/etc/passwd", "/../../../etc/passwd"])
async def test_e5_magic_links_stay_inside(box: LocalSandbox, path: str) -> None:
    await box.put("/etc/passwd", b"inside")
    assert await box.get(path) == b"inside"


@pytest.mark.parametrize("path", ["/proc/1/root/etc/passwd", "/proc/1/cwd/x", "/proc/1/fd/3"])
async def test_e5_the_agents_own_links_are_closed(box: LocalSandbox, path: str) -> None:
    with pytest.raises(FileProblem):
        await box.get(path)


async def test_proc_files_that_claim_to_be_empty_are_read(box: LocalSandbox) -> None:
    assert b"Name:" in await box.get("/proc/self/status")


def archive(*members: tuple[str, bytes | None, dict[str, object]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for name, data, attributes in members:
            member = tarfile.TarInfo(name)
            for key, value in attributes.items():
                setattr(member, key, value)
            member.size = len(data or b"")
            made.addfile(member, io.BytesIO(data) if data is not None else None)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "member",
    [
        ("../escaped", b"x", {}),
        ("a/../../escaped", b"x", {}),
        ("link", None, {"type": tarfile.SYMTYPE, "linkname": "/etc"}),
        ("link", None, {"type": tarfile.SYMTYPE, "linkname": "../../etc"}),
        ("device", None, {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        ("hard", None, {"type": tarfile.LNKTYPE, "linkname": "../../etc/passwd"}),
    ],
    ids=["up", "up inside", "absolute link", "relative link", "device", "hard link"],
)  # fmt: skip
async def test_e7_archives_that_leave_their_folder_are_refused(
    box: LocalSandbox, member: tuple[str, bytes | None, dict[str, object]]
) -> None:
    with pytest.raises(FileProblem):
        await box.put_archive("/tmp/in", archive(("fine", b"y", {}), member))
    assert not (await box.exec("ls /tmp/escaped /escaped")).ok


async def test_e7_an_absolute_member_lands_below_the_folder(box: LocalSandbox) -> None:
    await box.put_archive("/tmp/in", archive(("/etc/passwd", b"x", {})))
    assert await box.get("/tmp/in/etc/passwd") == b"x" and b"root" in await box.get("/etc/passwd")


async def test_e7_a_link_in_the_folder_can_not_redirect_an_archive_to_the_host(box: LocalSandbox) -> None:
    with tempfile.TemporaryDirectory() as outside:
        await box.exec(f"mkdir -p /tmp/in; ln -s {outside} /tmp/in/sub")
        with contextlib.suppress(FileProblem):
            await box.put_archive("/tmp/in", archive(("sub/file", b"x", {})))
        assert list(Path(outside).iterdir()) == []


async def test_h19_an_archive_of_a_hostile_tree_unpacks_safely(box: LocalSandbox, tmp_path: Path) -> None:
    await box.exec(
        "mkdir -p /tmp/t/d; cd /tmp/t; echo a > d/f; ln -s /etc/passwd out; ln -s d in; mkfifo pipe; ln d/f hard; chmod 4755 d/f; touch -- '-rf' \"$(printf 'new\\nline')\""
    )
    data = await box.get_archive("/tmp/t")
    with tarfile.open(fileobj=io.BytesIO(data)) as opened:
        names = set(opened.getnames())
        assert names == {"d", "d/f", "out", "in", "hard", "-rf", "new\nline"}
        with pytest.raises(tarfile.FilterError):
            opened.extractall(tmp_path, filter="data")


async def test_e8_trees_make_the_round_trip(box: LocalSandbox) -> None:
    sent = archive(
        ("a", None, {"type": tarfile.DIRTYPE, "mode": 0o755}),
        ("a/run", b"#!/bin/sh\necho ran", {"mode": 0o755, "mtime": 1234567890}),
        ("a/l", None, {"type": tarfile.SYMTYPE, "linkname": "run"}),
        ("empty", b"", {}),
    )
    await box.put_archive("/srv/x", sent)
    assert (await box.exec("/srv/x/a/l; stat -c '%Y %a' /srv/x/a/run")).text.split() == ["ran", "1234567890", "755"]
    with tarfile.open(fileobj=io.BytesIO(await box.get_archive("/srv/x"))) as opened:
        assert sorted(opened.getnames()) == ["a", "a/l", "a/run", "empty"]
        member = opened.extractfile("a/run")
        assert member is not None and member.read() == b"#!/bin/sh\necho ran"


async def test_h20_a_deep_or_endless_tree_is_refused(box: LocalSandbox) -> None:
    await box.exec(
        [
            "python3",
            "-c",
            "import os\nos.mkdir('/tmp/deep');os.chdir('/tmp/deep')\nfor _ in range(300): os.mkdir('d'); os.chdir('d')",
        ]
    )
    with pytest.raises(FileProblem):
        await box.get_archive("/tmp/deep")
    await box.exec("mkdir /tmp/big; head -c 20M /dev/zero > /tmp/big/f")
    with pytest.raises(FileProblem, match="larger than"):
        await box.get_archive("/tmp/big", max_bytes=10 * MIB)


async def test_e8_a_file_keeps_its_mode_and_belongs_to_its_user(box: LocalSandbox) -> None:
    await box.exec("useradd -m bob")
    await box.put("/home/bob/f", b"x", mode=0o640, user="bob")
    assert (await box.exec("stat -c '%U %a' /home/bob/f")).text.split() == ["bob", "640"]
    with pytest.raises(FileProblem):
        await box.put("/etc/f", b"x", user="bob")
    with pytest.raises(FileProblem, match="no user named 'carol'"):
        await box.put("/tmp/f", b"x", user="carol")


async def test_e8_a_reader_sees_the_old_file_or_the_new_one(box: LocalSandbox) -> None:
    await box.put("/tmp/f", b"a" * MIB)
    watch = "import time\nseen=set()\nend=time.time()+1\nwhile time.time()<end: d=open('/tmp/f').read(); seen.add((d[0],d[-1],len(d)))\nprint(sorted(seen))"
    watcher = await box.start(["python3", "-c", watch])
    for letter in b"bcdefgh" * 2:
        await box.put("/tmp/f", bytes([letter]) * MIB)
    output = b"".join([chunk.data async for chunk in watcher])
    assert all(first == last and size == MIB for first, last, size in eval(output))


async def test_h21_a_full_disk_is_said_to_be_full_and_nothing_half_written_stays(box: LocalSandbox) -> None:
    with pytest.raises(FileProblem, match="disk or inode limit"):
        await box.put("/tmp/f", bytes(80 * MIB))
    assert (await box.list("/tmp")) == []


async def test_h22_a_hostile_passwd_is_only_data(box: LocalSandbox) -> None:
    for content in (
        b"bob:x:99999999:0:::\n",
        b"bob:x:-1:0::/:\n",
        b"bob\n" * 10,
        b"\xff\xfe:x:1:1:::\n",
        b"bob:x:0x0:0:::\n",
    ):
        await box.put("/etc/passwd", content)
        with pytest.raises(FileProblem):
            await box.exec("id", user="bob")
    await box.exec("rm /etc/passwd; mkfifo /etc/passwd")
    with pytest.raises(FileProblem):
        await box.exec("id", user="bob")
