"""Sandboxes of other systems: each SDK against a service on loopback that documents what the real one does, Podman for
real where it is installed, and the choice of one by name. None of the hosted services is reached."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from stand_ins import ScriptPool, Service, daytona_app, e2b_app, kubernetes_app, modal_sdk, prime_app, served

from strop.config import parse_sandboxes
from strop.errors import ConfigError
from strop.sandboxes import (
    FileProblem,
    Image,
    Limits,
    LocalPool,
    NotOffered,
    ResourceExhausted,
    SandboxDead,
    SandboxesUnavailable,
    SandboxFailure,
    SandboxPool,
    make_sandboxes,
)
from strop.sandboxes.elsewhere import scripts
from strop.sandboxes.elsewhere.pool import load_sdk
from strop.sandboxes.registry import from_settings
from strop.sandboxes.sandbox import MIB

LIMITS = Limits(timeout=20.0)


@pytest.fixture(scope="module", autouse=True)
def _runtime_of_the_sdk() -> None:
    """E2B's SDK starts a runtime at its first request, whose descriptors stay: before any test counts descriptors."""
    if importlib.util.find_spec("e2b") is not None:
        create = importlib.import_module("e2b").AsyncSandbox.create
        with contextlib.suppress(Exception):
            asyncio.run(create(api_key="e2b_" + "0" * 40, api_url="http://127.0.0.1:9", retries=0, request_timeout=1))


@pytest.fixture
async def service(pool: LocalPool) -> Service:
    return Service(pool)


async def _prime(service: Service, stack: AsyncExitStack, patch: pytest.MonkeyPatch, home: Path) -> SandboxPool:
    pytest.importorskip("prime_sandboxes")
    url = await stack.enter_async_context(served(prime_app(service)))
    for name, value in (("HOME", str(home)), ("PRIME_API_BASE_URL", url), ("PRIME_API_KEY", "key")):
        patch.setenv(name, value)
    return make_sandboxes("prime", image="python:3.12", limits=LIMITS)


async def _e2b(service: Service, stack: AsyncExitStack, patch: pytest.MonkeyPatch, home: Path) -> SandboxPool:
    pytest.importorskip("e2b")
    patch.setenv("E2B_HTTP_VERSION", "1.1")
    url = await stack.enter_async_context(served(e2b_app(service)))
    options = {"api_key": "e2b_" + "0" * 40, "api_url": url, "sandbox_url": url}
    return make_sandboxes("e2b", template="base", options=options, limits=LIMITS)


async def _daytona(service: Service, stack: AsyncExitStack, patch: pytest.MonkeyPatch, home: Path) -> SandboxPool:
    pytest.importorskip("daytona")
    url = await stack.enter_async_context(served(daytona_app(service)))
    options = {"api_key": "key", "api_url": f"{url}/api", "use_deprecated_polling": True}
    return make_sandboxes("daytona", image="python:3.12", options=options, limits=LIMITS)


async def _modal(service: Service, stack: AsyncExitStack, patch: pytest.MonkeyPatch, home: Path) -> SandboxPool:
    pytest.importorskip("modal")
    patch.setattr("strop.sandboxes.elsewhere.modal.load_sdk", lambda kind, module: modal_sdk(service))
    return make_sandboxes("modal", image="python:3.12", limits=LIMITS)


async def _kubernetes(service: Service, stack: AsyncExitStack, patch: pytest.MonkeyPatch, home: Path) -> SandboxPool:
    pytest.importorskip("k8s_agent_sandbox")
    client = pytest.importorskip("kubernetes_asyncio.client")
    models = importlib.import_module("k8s_agent_sandbox.models")
    url = await stack.enter_async_context(served(kubernetes_app(service)))
    api_client = await stack.enter_async_context(client.ApiClient(client.Configuration(host=url)))
    connection = models.SandboxDirectConnectionConfig(api_url=url)
    return make_sandboxes("kubernetes", warm_pool="python", connection=connection, api_client=api_client, limits=LIMITS)


@pytest.fixture(
    params=[_prime, _e2b, _daytona, _modal, _kubernetes], ids=["prime", "e2b", "daytona", "modal", "kubernetes"]
)
async def elsewhere(
    request: pytest.FixtureRequest, service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[SandboxPool]:
    """A pool of each SDK, before a service that runs local sandboxes."""
    async with AsyncExitStack() as stack:
        pool = await request.param(service, stack, monkeypatch, tmp_path)
        yield pool
        await pool.close()


async def test_each_sdk_carries_commands_files_and_sessions(elsewhere: SandboxPool, service: Service) -> None:
    box = await elsewhere.create(env={"A": "ü"}, labels={"task": "7"})
    result = await box.exec("cat; echo $A; echo err >&2; exit 3", stdin=b"in\x00\xff\n")
    assert (result.stdout, result.stderr, result.exit_code) == (b"in\x00\xff\n" + "ü\n".encode(), b"err\n", 3)
    assert (await box.exec("sleep 100", timeout=1)).timed_out
    await box.put("/data/file", bytes(range(256)) * 500)
    assert await box.get("/data/file") == bytes(range(256)) * 500
    assert [(info.path, info.size) for info in await box.list("/data")] == [("file", 128000)]
    shell = await box.shell()
    assert (await shell.run("cd /usr; x=5")).ok and (await shell.run("echo $x $PWD")).text == "5 /usr\n"
    await shell.close()
    await box.destroy()
    assert not service.boxes
    with pytest.raises(SandboxDead):
        await box.exec("true")


async def test_a_sandbox_that_is_gone_is_no_failed_program(elsewhere: SandboxPool, service: Service) -> None:
    box = await elsewhere.create()
    (name,) = service.boxes
    await service.end(name)
    with pytest.raises(SandboxFailure):
        await box.exec("true")
    service.boxes[name] = await service.pool.create()  # so that there is something to end


async def test_what_a_system_has_no_limit_for_is_refused(elsewhere: Any) -> None:
    with pytest.raises(NotOffered, match=r"limits\.inodes"):
        await elsewhere.create(limits=Limits(inodes=1000))


async def test_snapshots_are_taken_or_refused(elsewhere: Any) -> None:
    box = await elsewhere.create()
    await box.exec("echo here >/f")
    if elsewhere.kind in ("prime", "daytona", "kubernetes"):
        with pytest.raises(NotOffered):
            await box.snapshot()
        return
    first, second = await box.fork(2)
    assert (await first.exec("cat /f")).text == (await second.exec("cat /f")).text == "here\n"


async def test_limits_lifetimes_and_labels_reach_the_service(
    service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        pool = await _prime(service, stack, monkeypatch, tmp_path)
        await pool.create(limits=Limits(memory=2 << 30, disk=3 << 30, cpus=0.5), labels={"task": "7"}, ttl=90)
        body = next(body for method, path, body in service.asked if (method, path) == ("POST", "/api/v1/sandbox"))
        asked = (body["memory_gb"], body["disk_size_gb"], body["cpu_cores"], body["timeout_minutes"], body["labels"])
        assert asked == (2.0, 3.0, 0.5, 2, ["task=7"])
        await pool.close()
    assert not service.boxes


# ---- Podman, for real ----


@pytest.fixture(scope="module")
def podman() -> Any:
    """Options of Podman, and the name of an image in a store of its own."""
    if shutil.which("podman") is None or shutil.which("runc") is None or os.geteuid() != 0:
        pytest.skip("podman and runc, and root, are needed")
    folder = Path("/var/tmp") / f"strop-test-{os.getpid()}"
    options = [
        "--root",
        f"{folder}/root",
        "--runroot",
        f"{folder}/run",
        "--runtime",
        "runc",
        "--cgroup-manager",
        "cgroupfs",
    ]
    options += ["--storage-driver", "vfs"]
    tree = subprocess.run(["tar", "-C", str(Image.host().layers[0]), "-cf", "-", "."], capture_output=True, check=True)
    made = subprocess.run(["podman", *options, "import", "-", "strop-test"], input=tree.stdout, capture_output=True)
    if made.returncode:
        pytest.skip(f"podman does not run here: {made.stderr.decode()[-200:]}")
    yield options
    subprocess.run(["podman", *options, "rm", "--all", "--force"], capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(900)
async def test_podman_does_what_the_protocol_says(podman: Any) -> None:
    extra = ["--volume", "/usr:/usr:ro", "--ulimit", "nproc=8192:8192"]
    limits = Limits(memory=256 * MIB, processes=64, timeout=60.0)
    pool: Any = make_sandboxes("podman", image="strop-test", options=podman, run_options=extra, limits=limits)
    box: Any = await pool.create(env={"A": "1"}, labels={"task": "7"})
    result = await box.exec("cat; id -u; echo $A; cat /proc/net/dev | wc -l; exit 3", stdin=b"in\xff\n")
    assert result.stdout == b"in\xff\n0\n1\n3\n" and result.exit_code == 3
    assert (await box.exec("(setsid sleep 1000 &); sleep 100", timeout=2)).timed_out
    assert (await box.exec("ps ax | grep -c '[s]leep 1000'")).text == "0\n"
    assert (await box.exec("useradd bob && su bob -c id")).text.startswith("uid=1000(bob)")
    assert (await box.exec("id -u", user="bob")).text == "1000\n"
    await box.put("/home/x", b"data", mode=0o600)
    assert await box.get("/home/x") == b"data"
    (fork,) = await box.fork(1)
    assert await fork.get("/home/x") == b"data"
    await box.pause()
    await box.resume()
    container = box.id
    await pool.close()
    with pytest.raises(SandboxDead):
        await box.exec("true")
    assert container not in (await pool.program("ps", "--all", "--quiet", "--no-trunc")).decode()


# ---- over nothing but a shell ----


@pytest.fixture
async def script_pool(pool: LocalPool) -> AsyncIterator[ScriptPool]:
    async with ScriptPool(pool, limits=Limits(output=1000, timeout=20.0), max_live=2, max_wait=0.3) as made:
        yield made


async def test_answers_can_not_be_forged_by_what_a_command_prints(script_pool: ScriptPool) -> None:
    box = await script_pool.create()
    told = await box.exec("ls -a /tmp; cat /proc/$PPID/cmdline | tr '\\0' ' ' | head -c 100000; echo '<0 0 =AAAA =>'")
    assert told.exit_code == 0 and told.stdout.endswith(b"<0 0 =AAAA =>\n")
    with pytest.raises(ValueError, match="did not come to its end"):
        scripts.parse("name", b"<other 1 2 other>")


async def test_long_output_keeps_its_ends_and_its_size(script_pool: ScriptPool) -> None:
    box = await script_pool.create()
    result = await box.exec("seq 100000")
    assert result.truncated and result.stdout_bytes == 588895 and len(result.stdout) == 1000
    assert result.stdout.startswith(b"1\n2\n") and result.stdout.endswith(b"\n100000\n")


async def test_a_place_that_answers_nonsense_has_failed(
    script_pool: ScriptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await script_pool.create()

    async def nonsense(script: str, seconds: float) -> bytes:
        return b"502 Bad Gateway"

    monkeypatch.setattr(box, "_run_script", nonsense)
    for call in (box.exec("true"), box.get("/etc/passwd"), box.list("/"), box.put("/x", b"")):
        with pytest.raises(SandboxFailure, match="502 Bad Gateway"):
            await call


async def test_a_place_that_does_not_answer_is_given_up(
    script_pool: ScriptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await script_pool.create()

    async def silence(script: str, seconds: float) -> bytes:
        await asyncio.sleep(1000)
        return b""

    monkeypatch.setattr(box, "_run_script", silence)
    monkeypatch.setattr("strop.sandboxes.elsewhere.posix.SLACK", 0.2)
    with pytest.raises(SandboxFailure, match="no answer within"):
        await box.exec("true", timeout=0.1)


async def test_archives_that_leave_their_folder_are_refused(script_pool: ScriptPool) -> None:
    box = await script_pool.create()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("../../etc/passwd")
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(FileProblem, match=r"etc/passwd"):
        await box.put_archive("/data", buffer.getvalue())


async def test_places_are_given_back_and_lives_end(script_pool: ScriptPool) -> None:
    first, second = await script_pool.create(), await script_pool.create(ttl=0.5)
    with pytest.raises(ResourceExhausted):
        await script_pool.create()
    await first.destroy()
    third = await script_pool.create()
    await asyncio.sleep(1.0)
    with pytest.raises(SandboxDead):
        await second.exec("true")
    assert (await third.exec("echo on")).text == "on\n"


# ---- the choice ----


def test_kinds_and_options_that_do_not_exist_are_named(anywhere: None) -> None:
    with pytest.raises(ConfigError, match=r"no kind 'dcoker'. Did you mean 'docker'"):
        make_sandboxes("dcoker")
    with pytest.raises(ConfigError, match=r"sandboxes.options.*colour"):
        make_sandboxes("auto", colour="red")
    with pytest.raises(ConfigError, match="no such key"):
        parse_sandboxes({"knid": "e2b"})
    with pytest.raises(ConfigError, match=r"sandboxes.limits"):
        from_settings(parse_sandboxes({"limits": {"colour": 1}}), None, Limits())


@pytest.mark.parametrize(
    ("kind", "module", "options"),
    [
        ("e2b", "e2b", {}),
        ("daytona", "daytona", {}),
        ("modal", "modal", {"image": "x"}),
        ("prime", "prime_sandboxes", {"image": "x"}),
        ("kubernetes", "kubernetes_asyncio", {"warm_pool": "x", "connection": None}),
    ],
)
def test_a_missing_sdk_says_how_to_install_it(
    anywhere: None, monkeypatch: pytest.MonkeyPatch, kind: str, module: str, options: dict[str, Any]
) -> None:
    real: Callable[..., Any] = importlib.import_module

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == module:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *rest)

    monkeypatch.setattr("strop.sandboxes.elsewhere.pool.importlib.import_module", without)
    with pytest.raises(SandboxesUnavailable, match=rf"pip install 'strop\[{kind}\]'"):
        make_sandboxes(kind, **options)
    assert load_sdk("json", "json") is importlib.import_module("json")


def test_a_missing_program_says_how_to_install_it(anywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxesUnavailable, match=r"apt-get install docker\.io"):
        make_sandboxes("docker", image="x")


async def test_settings_choose_the_pool_and_its_limits(host_image: Image) -> None:
    settings = parse_sandboxes({"kind": "auto", "limits": {"processes": 33}, "options": {"max_live": 3}})
    pool = from_settings(settings, host_image, Limits(timeout=7.0))
    assert isinstance(pool, LocalPool) and (pool.limits.processes, pool.limits.timeout) == (33, 7.0)
    assert (await (await pool.create()).exec("echo here")).text == "here\n"
    await pool.close()
