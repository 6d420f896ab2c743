"""The other ways in: without async, over HTTP with the wrong token, and what a machine is told that can't."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from strop.errors import ConfigError
from strop.sandboxes import (
    BlockingPool,
    ExecResult,
    Image,
    Limits,
    LocalPool,
    RemotePool,
    SandboxDead,
    SandboxesUnavailable,
    SandboxFailure,
    probe,
    serve,
)
from strop.sandboxes.cgroups import CgroupRoots
from strop.sandboxes.encoding import error_from_json, error_to_json, from_json, to_json
from strop.sandboxes.running import Capture
from strop.sandboxes.server import SandboxServer
from strop.sandboxes.shared import SharedPool


def test_everything_works_without_async(host_image: Image) -> None:
    with BlockingPool(host_image) as pool, pool.create(env={"A": "1"}, labels={"b": "2"}) as box:
        assert box.exec("echo $A", timeout=20).text == "1\n" and box.labels == {"b": "2"}
        *chunks, result = box.stream("echo x; exit 3")
        assert b"".join(chunk.data for chunk in chunks) == b"x\n" and result.exit_code == 3
        shell, python = box.shell(), box.python()
        assert shell.run("cd /usr && pwd").text == "/usr\n" and python.run("1 + 1").value == "2"
        shell.close()
        python.close()
        box.put("/f", b"data")
        assert box.get("/f") == b"data" and [info.path for info in box.list("/home")] == []
        box.put_archive("/copy", box.get_archive("/home"))
        snapshot = box.snapshot()
        with pool.create(snapshot=snapshot) as child:
            assert child.get("/f") == b"data"
        (fork,) = box.fork(1)
        assert fork.get("/f") == b"data"
        snapshot.delete()
        box.pause()
        box.resume()
    with pytest.raises(SandboxDead):
        box.exec("true")


def test_a_pool_that_can_not_be_made_leaves_no_thread(host_image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setattr("strop.sandboxes.pool.find_roots", lambda: CgroupRoots({}, ("memory",)))
    before = threading.active_count()
    with pytest.raises(SandboxesUnavailable):
        BlockingPool(host_image)
    assert threading.active_count() == before


async def test_a_wrong_token_opens_nothing(host_image: Image) -> None:
    async with LocalPool(host_image) as pool:
        app = SandboxServer(pool, "right").app
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic right"},
                {"Authorization": "right"},
            ):
                for method, path in (
                    ("POST", "/v1/sandboxes"),
                    ("GET", "/v1/health"),
                    ("POST", "/v1/sandboxes/x/exec"),
                ):
                    assert (await http.request(method, path, headers=headers)).status_code == 401
            assert (await http.get("/v1/health", headers={"Authorization": "Bearer right"})).json() == {
                "sandboxes": 0,
                "snapshots": 0,
            }
        async with RemotePool("http://x", "wrong", transport=httpx.ASGITransport(app)) as remote:
            with pytest.raises(SandboxFailure, match="401"):
                await remote.create()


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{",
        b'{"unknown": 1}',
        b'{"command": 5}',
        b'{"command": ["a", 1]}',
        b'{"command": "true", "timeout": "x"}',
        b'{"command": "true", "stdin": "%%%"}',
        b'{"command": "true", "timeout": true}',
        b"{}",
    ],
)
async def test_requests_that_make_no_sense_are_refused(host_image: Image, body: bytes) -> None:
    async with LocalPool(host_image) as pool:
        app = SandboxServer(pool, "t").app
        headers = {"Authorization": "Bearer t"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", headers=headers) as http:
            name = (await http.post("/v1/sandboxes", json={"ttl": 50})).json()["id"]
            assert (await http.post(f"/v1/sandboxes/{name}/exec", content=body)).status_code == 400
            assert (await http.post("/v1/sandboxes/nobody/exec", content=b'{"command": "true"}')).status_code == 410


async def test_an_open_address_needs_a_token_of_ones_own(anywhere: None) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ConfigError, match="other machines"):
            await serve(host=host)


async def test_a_server_that_is_not_there_is_a_failure_of_the_place(anywhere: None) -> None:
    async with RemotePool("http://127.0.0.1:9", "t") as pool:
        with pytest.raises(SandboxFailure, match="could not be reached"):
            await pool.create()


def test_plain_data_and_errors_make_the_round_trip(anywhere: None) -> None:
    result = ExecResult(stdout=b"\xff", exit_code=137, signal=9, oom_kills=2, wall=1.5)
    assert from_json(ExecResult, to_json(result)) == result
    assert from_json(Limits, to_json(Limits())) == Limits()
    for bad in ({"nope": 1}, {"stdout": "%"}, []):
        with pytest.raises(ValueError):
            from_json(ExecResult, bad)  # type: ignore[arg-type]
    for error in (SandboxDead("x"), SandboxFailure("y"), ValueError("z")):
        back = error_from_json(error_to_json(error)[1])
        assert type(back) is type(error) and str(back) == str(error)
    assert error_to_json(RuntimeError("secret /path"))[1]["reason"] == "the server failed: RuntimeError"


@pytest.mark.parametrize("most", [2, 3, 10, 64])
def test_a_capture_keeps_head_and_tail_whatever_the_pieces(anywhere: None, most: int) -> None:
    data = bytes(range(50))
    for size in (1, 2, 7, 50):
        capture = Capture(most)
        for start in range(0, len(data), size):
            capture.feed(data[start : start + size])
        head = most - most // 2
        expected = data if most >= len(data) else data[:head] + data[len(data) - most // 2 :]
        assert capture.content() == expected and capture.total == len(data)


@pytest.mark.parametrize(
    "bad",
    [{"memory": 1}, {"processes": 0}, {"disk": 1}, {"cpus": -1.0}, {"cpus": 0.001}, {"timeout": 0.0}, {"output": 0}],
)
def test_limits_that_can_not_be_are_refused(anywhere: None, bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"limits.{next(iter(bad))}"):
        Limits(**bad)  # type: ignore[arg-type]


def test_the_probe_names_what_is_missing_and_what_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe().tier == "namespaces" and probe().limits == "groups" and not any(lack.fatal for lack in probe().lacks)
    with monkeypatch.context() as patched:
        patched.setattr("strop.sandboxes.tiers.HELPER", Path("/nowhere"))
        report = probe()
        assert (
            report.tier != "namespaces"
            and report.lacks[0].what == "the compiled helper"
            and "gcc" in report.lacks[0].mend
        )
    with monkeypatch.context() as patched:
        patched.setattr("strop.sandboxes.probing.find_roots", lambda: CgroupRoots({}, ("memory", "pids", "cpu")))
        report = probe()
        assert report.limits == "processes" and "memory, pids, cpu" in str(report) and "To mend" in str(report)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 1000)
        assert "root" in [lack.what for lack in probe().lacks]


async def test_the_probe_may_be_asked_from_within_a_loop() -> None:
    assert probe().tier == "namespaces"


async def test_a_shared_pool_opens_with_its_first_user_and_closes_with_its_last(host_image: Image) -> None:
    shared = SharedPool(lambda: host_image)
    first, second = await asyncio.gather(shared.acquire(), shared.acquire())
    assert first is second
    await shared.release()
    assert (await (await second.create()).exec("echo open")).text == "open\n"
    await shared.release()
    with pytest.raises(SandboxDead):
        await second.create()
    async with shared as again:
        assert again is not first


def test_importing_the_door_loads_no_http_library(anywhere: None) -> None:
    code = "import sys, strop.sandboxes; print([m for m in ('httpx', 'starlette', 'uvicorn', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
