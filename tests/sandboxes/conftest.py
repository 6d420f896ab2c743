"""Pools and sandboxes for the tests, and what must hold after every one of them: nothing is left, nobody else felt it."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

pytest.importorskip("strop.sandboxes")
psutil = pytest.importorskip("psutil")

from leftovers import groups_of_this_process, processes_in_groups, zygotes  # noqa: E402

from strop.sandboxes import Image, Limits, LocalPool, LocalSandbox, probe  # noqa: E402
from strop.sandboxes.sandbox import MIB  # noqa: E402
from strop.sandboxes.tiers import Tier, obstacle  # noqa: E402

#: What the attacks run under.
TIGHT = Limits(memory=256 * MIB, processes=128, disk=64 * MIB, inodes=20000, timeout=5.0)


def _refusal() -> str | None:
    if sys.platform != "linux":
        return "sandboxes need Linux"
    report = probe()
    return None if report.tier in ("namespaces", "rootless") else f"no namespace sandboxes here: {report}"


REFUSAL = _refusal()


@pytest.fixture(autouse=True)
def _needs_namespaces(request: pytest.FixtureRequest) -> None:
    if REFUSAL and "anywhere" not in request.fixturenames:
        pytest.skip(REFUSAL)


@pytest.fixture
def anywhere() -> None:
    """Marks a test that needs no namespaces."""


@pytest.fixture(scope="session")
def host_image() -> Image:
    return Image.host()


@pytest.fixture(params=["namespaces", pytest.param("bubblewrap", marks=pytest.mark.slow)])
def tier(request: pytest.FixtureRequest) -> Tier:
    """Every attack is made in both: with the helper in C, and with bubblewrap and the agent in Python."""
    if (lack := obstacle(request.param)) is not None:
        pytest.skip(str(lack))
    return request.param


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No process, group, mount or descriptor outlives a test."""
    mounts = Path("/proc/self/mounts").read_text()
    descriptors = sum(1 for _ in Path("/proc/self/fd").iterdir())
    before = {process.pid for process in zygotes()}
    yield
    assert {process.pid for process in zygotes()} <= before, "a zygote is left"
    if not before:
        assert not groups_of_this_process(), "control groups are left"
    assert Path("/proc/self/mounts").read_text() == mounts
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= descriptors + 1, (
        "descriptors are left"
    )  # the loop's own may come and go


@pytest.fixture
async def pool(host_image: Image, tier: Tier) -> AsyncIterator[LocalPool]:
    async with LocalPool(host_image, limits=TIGHT, tier=tier, least=tier) as pool:
        yield pool


@pytest.fixture
async def box(pool: LocalPool) -> AsyncIterator[LocalSandbox]:
    """The sandbox under attack. After the attack it works or is dead for a reason, a bystander answers, the host did
    not grow, and destroying it leaves no process."""
    sandbox, bystander = await pool.create(), await pool.create()
    await bystander.exec("true")
    memory = psutil.Process().memory_info().rss
    yield sandbox
    assert (await bystander.exec("echo here", timeout=30)).stdout == b"here\n"
    if sandbox.dead is None:
        assert (await sandbox.exec("echo ok", timeout=30, kill_leftovers=True)).stdout == b"ok\n"
    else:
        assert sandbox.dead
    assert psutil.Process().memory_info().rss - memory < 50 * MIB
    await sandbox.destroy()
    await bystander.destroy()
    assert processes_in_groups() == []
