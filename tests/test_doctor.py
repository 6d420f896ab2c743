"""`strop doctor` names what is wrong with a machine, and what mends it; it changes nothing and loads nothing heavy."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from strop import doctor
from strop.doctor import Finding, diagnose, show_findings
from strop.sandboxes import Lack, Report

FILES = {
    "/proc/cpuinfo": "model name\t: Test CPU\nflags\t\t: fpu avx2 avx512_bf16\n",
    "/proc/meminfo": "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n",
}


def found(name: str, tmp_path: Path) -> Finding:
    return next(finding for finding in diagnose(tmp_path) if finding.what == name)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine's /proc and /sys, as the doctor reads them."""
    contents = dict(FILES)
    monkeypatch.setattr(doctor, "_read", lambda path: contents.get(path, ""))
    return contents


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in modules else real(name, *a))


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys; from strop.doctor import diagnose; diagnose(); print({'torch', 'ray', 'vllm'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("flags", "state", "says"),
    [("avx2 amx_bf16 avx512_bf16", "ok", "AMX"), ("avx512_bf16", "ok", "vector"), ("avx2", "warning", "float32")],
)
def test_bfloat16_is_read_from_the_processors_flags(
    files: dict[str, str], tmp_path: Path, flags: str, state: str, says: str
) -> None:
    files["/proc/cpuinfo"] = f"model name\t: Test CPU\nflags\t\t: {flags}\n"
    finding = found("processor", tmp_path)
    assert finding.state == state and says in finding.detail and "Test CPU" in finding.detail


def test_memory_is_that_of_the_container_where_it_has_less(files: dict[str, str], tmp_path: Path) -> None:
    assert found("memory", tmp_path).detail == "16.0 of 32.0 GiB free"
    files["/sys/fs/cgroup/memory.max"] = str(8 * 2**30)
    files["/sys/fs/cgroup/memory.current"] = str(5 * 2**30)
    finding = found("memory", tmp_path)
    assert finding.detail == "3.0 of 8.0 GiB free (limit of this container)"
    assert finding.state == "warning" and "close other programs" in finding.mend
    files["/sys/fs/cgroup/memory.max"] = "max"
    assert found("memory", tmp_path).state == "ok"


def test_a_full_or_read_only_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    finding = found("disk for runs", tmp_path / "not" / "made" / "yet")
    assert finding.state == "warning" and finding.detail == f"1.0 GiB free at {tmp_path}" and "5.0 GiB" in finding.mend
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    finding = found("disk for runs", tmp_path)
    assert finding.state == "missing" and "--runs" in finding.mend


def test_a_missing_package_of_the_core_is_missing_and_of_an_extra_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "renderers", "peft")
    assert found("renderers", tmp_path) == Finding("renderers", "missing", "not installed", "pip install renderers")
    peft = found("peft", tmp_path)
    assert peft.state == "optional" and peft.mend == "pip install 'strop[lora]'"


def test_torch_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch")
    assert found("torch", tmp_path).mend == "pip install torch"


def test_more_threads_than_processors_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(doctor.available_vcpus() + 1))
    assert "unset OMP_NUM_THREADS" in found("torch", tmp_path).mend
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert found("torch", tmp_path).state == "ok"


def test_the_start_model_is_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path))
    assert found("start model", tmp_path).mend == "strop model get smollm2"
    folder = doctor.start_model_folder("smollm2")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert found("start model", tmp_path).state == "ok"


def test_a_gpu_that_torch_cannot_use_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559 MiB'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: None)
    finding = found("GPU", tmp_path)
    assert (
        finding.state == "warning"
        and "H100" in finding.detail
        and "pip install --force-reinstall torch" in finding.mend
    )
    monkeypatch.setattr(doctor, "_torch_cuda", lambda: "12.9")
    assert found("GPU", tmp_path).state == "ok"
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert "driver" in found("GPU", tmp_path).mend


@pytest.mark.parametrize(
    ("tier", "state"), [("namespaces", "ok"), ("rootless", "ok"), ("bubblewrap", "optional"), ("none", "optional")]
)
def test_the_sandbox_tier_is_the_probes_and_what_it_lacks_is_to_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, state: str
) -> None:
    lacks = (
        (Lack("user namespaces", "isolation", "sysctl -w user.max_user_namespaces=10000"),) if tier == "none" else ()
    )
    monkeypatch.setattr("strop.sandboxes.probe", lambda: Report(tier, "groups", lacks, (), "as tried"))
    assert found("sandboxes", tmp_path) == Finding("sandboxes", state, f"{tier}: as tried")
    monkeypatch.setattr("strop.sandboxes.probe", lambda: Report(tier, "processes", lacks, (), "as tried"))
    weak = found("sandboxes", tmp_path)
    assert weak.state == "optional" and "single processes" in weak.detail
    mends = [finding.mend for finding in diagnose(tmp_path) if finding.what.startswith("sandboxes: ")]
    assert mends == [lack.mend for lack in lacks]


def test_the_table_puts_what_is_missing_first_among_what_to_mend() -> None:
    findings = [
        Finding("a", "optional", "not there", "get a"),
        Finding("b", "warning", "slow", "mend b"),
        Finding("c", "missing", "gone", "install c"),
        Finding("d", "ok", "fine"),
    ]
    text = StringIO()
    Console(file=text, width=120, color_system=None).print(show_findings(findings))
    said = text.getvalue()
    assert said.index("install c") < said.index("mend b") < said.index("get a")
    assert "ready" not in said
    ready = StringIO()
    Console(file=ready, width=120, color_system=None).print(show_findings(findings[3:]))
    assert "ready: make quickstart" in ready.getvalue()


def test_kernels_that_were_not_built_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strop.kernels.built", lambda: False)
    finding = found("kernels in C", tmp_path)
    assert finding.state == "warning" and "gcc" in finding.mend
