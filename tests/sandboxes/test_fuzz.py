"""Random frames in place of an agent's: the host answers, refuses or buries, and nothing else of it is touched."""

from __future__ import annotations

import asyncio
import io
import random
import socket
import struct
import tarfile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strop.sandboxes import LocalPool, LocalSandbox, SandboxDead, SandboxFailure, wire
from strop.sandboxes.files import read_tree
from strop.sandboxes.sandbox import ExecResult

_REPLY = "=IIiiQQQ40s"
#: The fixtures of these tests have nothing that an example could change.
_ONCE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def near_miss(rng: random.Random, ids: int) -> bytes:
    """A reply that is nearly right: some of its fields are, or all of them at the wrong moment."""
    fields = [
        rng.choice([1, 2, 2, 2, 0, 3, 1 << 31]), rng.choice([rng.randint(1, ids), 0, 1 << 31, wire.VERSION]),
        rng.choice([0, 256, 9, -1, 0x7F, 1 << 30]), rng.choice([0, 0, 2, 13, -5, 1 << 30]),
        rng.choice([0, (1 << 64) - 1]), rng.choice([0, (1 << 64) - 1]), rng.choice([0, 3, (1 << 64) - 1]),
        rng.choice([b"", b"execute", b"\xff" * 40, rng.randbytes(40)]),
    ]  # fmt: skip
    frame = struct.pack(_REPLY, *fields)
    return frame if rng.random() < 0.8 else frame[: rng.randrange(len(frame))] + rng.randbytes(rng.randint(0, 9))


@pytest.mark.parametrize("seed", range(20))
async def test_h41_whatever_an_agent_says_every_caller_gets_an_answer(pool: LocalPool, seed: int) -> None:
    """Each command ends in a result or in SandboxDead; no handler raises into the loop; a neighbour works."""
    rng, bystander = random.Random(seed), await pool.create()
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    box = LocalSandbox(pool, 999_999, ours, pool.limits, {}, {}, ())
    theirs.send(struct.pack(_REPLY, 1, wire.VERSION, 0, 0, 0, 0, 0, b""))
    await box.wait_ready()
    commands = [asyncio.create_task(box.exec("true")) for _ in range(8)]
    await asyncio.sleep(0)
    for _ in range(40):
        try:
            theirs.send(near_miss(rng, 9))
        except OSError:
            break
        await asyncio.sleep(0)
    theirs.close()
    await asyncio.sleep(0.01)
    box.bury("the test is over")
    results = await asyncio.wait_for(asyncio.gather(*commands, return_exceptions=True), 10)
    assert all(isinstance(result, ExecResult | SandboxDead) for result in results), results
    assert (await bystander.exec("echo here", timeout=20)).stdout == b"here\n"
    assert problems == []


@_ONCE
@given(data=st.binary(max_size=200))
def test_h41_anything_is_a_message_or_a_value_error(anywhere: None, data: bytes) -> None:
    for parse in (wire.parse_reply, wire.parse_event):
        try:
            message = parse(data)
        except ValueError:
            continue
        assert len(data) in (wire.REPLY_SIZE, wire.EVENT_SIZE) and isinstance(message.stage, str)


_NAMES = st.one_of(
    st.binary(max_size=30), st.sampled_from([b"../up", b"/abs", b"a/b", b"", b".", b"x" * 300, "ü".encode(), b"\xff"])
)
_ENTRY = st.tuples(
    st.one_of(st.sampled_from([ord(kind) for kind in "fldiswo"]), st.integers(0, (1 << 32) - 1)),
    st.integers(0, (1 << 32) - 1), st.integers(0, (1 << 32) - 1), st.integers(-(1 << 63), (1 << 63) - 1),
    _NAMES, st.binary(max_size=60), st.one_of(st.none(), st.integers(0, (1 << 64) - 1)),
)  # fmt: skip


@_ONCE
@given(entries=st.lists(_ENTRY, max_size=6), cut=st.integers(0, 400), ended=st.booleans())
def test_h43_any_stream_of_a_tree_is_an_archive_or_a_refusal(
    anywhere: None, entries: list[tuple[Any, ...]], cut: int, ended: bool
) -> None:
    """What comes back is a readable tar archive no larger than what was sent allows, or SandboxFailure."""
    stream = b""
    for kind, mode, owner, time, name, data, size in entries:
        stream += wire.ENTRY.pack(kind, mode, owner, owner, len(name), 0, time, len(data) if size is None else size)
        stream += name + (data if kind in (ord("f"), ord("l")) else b"")
    stream += wire.ENTRY.pack(ord("e"), 0, 0, 0, 0, 0, 0, 0) if ended else b""
    stream = stream[: len(stream) - cut] if cut < 40 else stream

    async def answer(*arguments: object, **options: object) -> ExecResult:
        return ExecResult(stdout=stream)

    sandbox: Any = SimpleNamespace(id="fuzzed", file_operation=answer)
    try:
        archive = asyncio.run(read_tree(sandbox, "/", 1 << 20))
    except SandboxFailure:
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        assert len(opened.getmembers()) <= len(entries)
