"""The weaker tiers: what is taken when the helper or root is missing, that nobody gets one unasked, and that the suite
holds in them. The suite itself is run as an ordinary user here, with and without a range of user ids and limits."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from strop.errors import ConfigError
from strop.sandboxes import Image, Limits, LocalPool, SandboxesUnavailable, probe
from strop.sandboxes.bubblewrap import FILTER, find_interpreter
from strop.sandboxes.cgroups import CgroupRoots, find_roots
from strop.sandboxes.idmaps import find_id_map
from strop.sandboxes.sandbox import MIB
from strop.sandboxes.tiers import candidates, obstacle
from strop.sandboxes.zygote import HELPER

HERE = Path(__file__).parent
#: An ordinary user of the tests' own making, and the ids that it may give to sandboxes.
USER, FIRST_ID = 54321, 600000

needs_bubblewrap = pytest.mark.skipif(obstacle("bubblewrap") is not None, reason="bubblewrap is missing")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user")


@pytest.fixture
def no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which the helper was not built."""
    monkeypatch.setattr("strop.sandboxes.tiers.HELPER", Path("/nowhere"))


def test_tiers_weaker_than_the_least_are_never_candidates(anywhere: None) -> None:
    assert candidates("auto", "namespaces") == ("namespaces",)
    assert candidates("auto", "bubblewrap") == ("namespaces", "rootless", "bubblewrap")
    assert candidates("bubblewrap", "bubblewrap") == ("bubblewrap",)
    with pytest.raises(ConfigError, match='weaker than the least that is taken, "rootless"'):
        candidates("bubblewrap", "rootless")
    for asked, least in (("docker", "rootless"), ("auto", "none")):
        with pytest.raises(ConfigError, match="not known"):
            candidates(asked, least)  # type: ignore[arg-type]


async def test_a_missing_helper_is_no_reason_for_a_weaker_sandbox(host_image: Image, no_helper: None) -> None:
    with pytest.raises(SandboxesUnavailable, match=r"namespaces needs the compiled helper .*gcc"):
        await LocalPool(host_image).start()


@needs_bubblewrap
async def test_who_takes_bubblewrap_gets_it_and_is_told(host_image: Image, no_helper: None) -> None:
    async with LocalPool(host_image, least="bubblewrap") as pool:
        assert pool.tier == "bubblewrap"
        assert (await (await pool.create()).exec("echo here")).text == "here\n"
    report = probe()
    assert report.tier == "bubblewrap" and report.lacks[0].what == "the compiled helper"


@needs_bubblewrap
async def test_bubblewrap_that_does_not_work_says_why(host_image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's are for root alone
        program = Path(folder, "bwrap")
        program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        for path in (program, program.parent):
            path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        with pytest.raises(SandboxesUnavailable, match="No permissions to create new namespace"):
            await LocalPool(host_image, tier="bubblewrap", least="bubblewrap").start()


async def test_a_pool_that_has_begun_with_one_tier_stays_with_it(host_image: Image, no_helper: None) -> None:
    pool = LocalPool(host_image, tier="auto", least="bubblewrap")
    if obstacle("bubblewrap") is None:
        await pool.start()
        assert pool._candidates == ("bubblewrap",)
        await pool.close()


@pytest.mark.skipif(not HELPER.exists() or not FILTER.exists(), reason="no helper, or no filter for this machine")
def test_the_stored_filter_is_the_one_that_the_helper_assembles(anywhere: None) -> None:
    assembled = subprocess.run([HELPER, "filter"], capture_output=True, check=True).stdout
    assert assembled == FILTER.read_bytes(), f"run: zygote_helper filter > filters/{platform.machine()}.bpf"


@needs_bubblewrap
@pytest.mark.parametrize("tier", ["bubblewrap", "namespaces"])
async def test_without_control_groups_each_process_has_the_limits(
    host_image: Image, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    monkeypatch.setattr("strop.sandboxes.pool.find_roots", lambda: CgroupRoots({}, ("memory", "pids", "cpu")))
    with pytest.raises(SandboxesUnavailable, match="allow_weak"):
        await LocalPool(host_image, tier=tier, least=tier).start()  # type: ignore[arg-type]
    limits = Limits(memory=256 * MIB, processes=20, timeout=20.0)
    async with LocalPool(host_image, limits=limits, tier=tier, least=tier, allow_weak=True) as pool:  # type: ignore[arg-type]
        box = await pool.create()
        grown = await box.exec(["python3", "-c", "bytearray(400 << 20)"])
        assert "MemoryError" in grown.error_text and not grown.oom
        script = "import os,time\nn=0\ntry:\n while 1:\n  if os.fork()==0: time.sleep(5); os._exit(0)\n  n+=1\nexcept OSError: print(n)"
        assert int((await box.exec(["python3", "-c", script], kill_leftovers=True)).text) < 20
        await box.start("while :; do echo x >> /count; sleep 0.01; done")
        await box.exec("while [ ! -s /count ]; do sleep 0.02; done")
        await box.pause()
        before = await box.get("/count")
        assert await box.get("/count") == before
        await box.resume()
        assert (await (await box.fork(1))[0].exec("wc -c < /count")).text


@needs_bubblewrap
async def test_a_killed_host_takes_its_sandboxes_along(host_image: Image) -> None:
    sleep = ["sleep", str(900_000_000 + os.getpid())]
    script = f"""
import asyncio
from strop.sandboxes import Image, LocalPool
async def main():
    async with LocalPool(Image.host(), tier="bubblewrap", least="bubblewrap", allow_weak=True) as pool:
        for _ in range(3):
            box = await pool.create()
            await box.start("(setsid {" ".join(sleep)} &); exec {" ".join(sleep)}")
            await box.exec("until [ $(pgrep -fc '^{" ".join(sleep)}') = 2 ]; do sleep 0.02; done")
        print(pool._zygote._folder, flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""
    host = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    try:
        assert host.stdout is not None
        folder = Path((await host.stdout.readline()).decode().strip())
        asked = [found for found in psutil.process_iter(["cmdline"]) if found.info["cmdline"] == sleep]
        assert folder.is_dir() and len(asked) == 6
    finally:
        host.kill()
        await host.wait()
    gone, alive = psutil.wait_procs(asked, timeout=20)
    assert len(gone) == 6 and not alive
    async with LocalPool(host_image, tier="bubblewrap", least="bubblewrap", allow_weak=True):
        assert not folder.exists()


@pytest.mark.parametrize(("text", "writer", "count"), [("tester:600000:65536\n", "newuidmap", 65536), ("", "self", 1)])
def test_the_users_inside_are_those_that_the_host_lends(
    anywhere: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, writer: str, count: int
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: USER)
    monkeypatch.setattr(os, "getegid", lambda: USER)
    monkeypatch.setattr("strop.sandboxes.idmaps.pwd.getpwuid", lambda uid: SimpleNamespace(pw_name="tester"))
    monkeypatch.setattr("strop.sandboxes.idmaps.shutil.which", lambda name: f"/usr/bin/{name}")
    real = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: text if path.name in ("subuid", "subgid") else real(path))
    found = find_id_map()
    assert (found.writer, found.count) == (writer, count) and found.users[0] == (0, USER, 1)
    assert found.users[1:] == (((1, 600000, 65535),) if count > 1 else ())


# ---- as an ordinary user ----


@pytest.fixture(params=["with ids and limits", "alone"])
def user(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    """A command line before Python that makes it an ordinary user's."""
    become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    groups: list[Path] = []
    if request.param == "alone":
        yield become
        return
    for name, text in (
        ("passwd", f"root:x:0:0::/root:/bin/sh\ntester:x:{USER}:{USER}::/:/bin/sh\n"),
        ("group", f"root:x:0:\ntester:x:{USER}:\n"),
        ("subuid", f"tester:{FIRST_ID}:65536\n"),
        ("subgid", f"tester:{FIRST_ID}:65536\n"),
    ):
        (tmp_path / name).write_text(text)
    for name in ("memory", "pids", "cpu"):
        folder = find_roots().folders.get(name)
        if folder is None:
            pytest.skip("limits can be handed to a user through version 1 hierarchies alone here")
        groups.append(folder / f"test-{os.getpid()}")
    for folder in groups:
        folder.mkdir()
        for path in (folder, *folder.iterdir()):
            os.chown(path, USER, USER)
    names = ("passwd", "group", "subuid", "subgid")
    lines = [f"mount --bind {tmp_path / name} /etc/{name}" for name in names]
    lines += [f"echo $$ > {folder}/cgroup.procs" for folder in groups]
    yield ["unshare", "--mount", "sh", "-ec", "; ".join([*lines, 'exec "$@"']), "sh", *become]
    for folder in groups:
        folder.rmdir()


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of the user's: pytest's own are for root alone."""
    with tempfile.TemporaryDirectory(prefix="strop-test-") as folder:
        os.chown(folder, USER, USER)
        yield Path(folder)


@needs_root
@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_suite_holds_for_an_ordinary_user(user: list[str], home: Path) -> None:
    interpreter = find_interpreter()
    version = "import sys; print(sys.version_info[:2])"
    found = subprocess.run([str(interpreter), "-c", version], capture_output=True, text=True, check=True).stdout
    if found.strip() != str(sys.version_info[:2]):
        pytest.skip(f"{interpreter} can't load the packages of {sys.executable}")
    paths = [str(Path(path).resolve()) for path in sys.path if path]
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "TMPDIR": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join([str(Path(sys.modules["strop"].__path__[0]).parent), *paths]),
    }
    command = [
        str(interpreter), "-m", "pytest", str(HERE / "test_conformance.py"), "-p", "no:cacheprovider", "-k", "not http and not warm",
        "--timeout=300", f"--basetemp={home / 'pytest'}",
    ]  # fmt: skip
    done = subprocess.run([*user, *command], env=env, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0 and "failed" not in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
