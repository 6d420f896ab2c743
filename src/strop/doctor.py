"""What this machine can do and what is missing, with the command that mends it. Loads neither torch nor ray nor vllm.

Each check looks at one thing and says one `Finding`; what a check finds is never changed here.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strop.costs import available_vcpus, machine_price
from strop.models.start import START_MODELS, cache_folder, start_model_folder

State = Literal["ok", "warning", "missing", "optional"]

GIB = 2**30
#: Peak of the quickstart: fp32 weights, gradients and two Adam moments of 135 M parameters are 2.2 GB, keys and values
#: and activations of a batch the rest.
MEMORY_NEEDED = 6 * GIB
#: A run of the start model: two checkpoints of 0.5 GB weights and 1.1 GB optimizer each, attempts, and the cached model.
DISK_NEEDED = 6 * GIB
#: What the core imports; without one of them nothing trains.
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "renderers", "numpy", "pyarrow", "pydantic")
#: Optional packages: (module, extra, what it is for).
EXTRAS = (
    ("peft", "lora", "low-rank adapters"),
    ("bitsandbytes", "low-memory", "optimizer moments in 8 bits"),
    ("reasoning_gym", "reasoning-gym", "the tasks of reasoning-gym"),
    ("tensorboard", "tensorboard", "curves in TensorBoard"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        what: the thing, for example "memory".
        state: "ok"; "warning": it works, but badly or not everywhere; "missing": training can't work without it;
            "optional": it isn't there, and only what is named needs it.
        detail: what was found, in a phrase.
        mend: the command that mends it, or what to do; "" where nothing needs to be done.
    """

    what: str
    state: State
    detail: str
    mend: str = ""


def diagnose(folder: Path = Path()) -> list[Finding]:
    """Look at the machine.

    Args:
        folder: where runs would be written.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _torch,
        _processor,
        _kernels,
        _memory,
        lambda: _disk(folder),
        _start_model,
        _accelerators,
        _packages,
        _sandboxes,
        _price,
    ]
    return [finding for check in checks for finding in check()]


def show_findings(findings: list[Finding]) -> RenderableType:
    """The findings as a table, and below it what to do, the most pressing first."""
    looks = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "missing": ("✗", "bold red"), "optional": ("–", "dim")}
    table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, show_edge=False)
    for finding in findings:
        mark, style = looks[finding.state]
        table.add_row(
            Text(mark, style=style), finding.what, Text(finding.detail, style="dim" if style == "dim" else "")
        )
    parts: list[RenderableType] = [table]
    order = ("missing", "warning", "optional")
    todo = sorted((f for f in findings if f.mend), key=lambda finding: order.index(finding.state))
    if todo:
        parts.append(Text("\nTo mend:", style="bold"))
        parts += [Text.assemble((f"  {f.what}: ", looks[f.state][1]), f.mend) for f in todo]
    if not any(finding.state in ("missing", "warning") for finding in findings):
        parts.append(Text("\nThis machine is ready: make quickstart", style="green"))
    return Group(*parts)


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _torch() -> Iterator[Finding]:
    for package in REQUIRED:
        if importlib.util.find_spec(package) is None:
            yield Finding(package, "missing", "not installed", f"pip install {package}")
    if importlib.util.find_spec("torch") is None:
        return
    version, cuda = metadata.version("torch"), _torch_cuda()
    built = f"for CUDA {cuda}" if cuda else "for the CPU"
    threads = os.environ.get("OMP_NUM_THREADS") or str(available_vcpus())
    detail = f"{version}, built {built}, {threads} threads"
    if threads.isdigit() and int(threads) > available_vcpus():
        mend = "unset OMP_NUM_THREADS (more threads than processors wait for each other)"
        yield Finding("torch", "warning", detail, mend)
    else:
        yield Finding("torch", "ok", detail)


def _torch_cuda() -> str | None:
    """Version of CUDA that torch was built for, read from its files: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    match = (
        re.search(r"^cuda[^=]*= *['\"]([^'\"]+)['\"]", file.read_text(encoding="utf-8"), re.M)
        if file.exists()
        else None
    )
    return match[1] if match else None


def _processor() -> Iterator[Finding]:
    text = _read("/proc/cpuinfo")
    name = re.search(r"^model name\s*: (.+)$", text, re.M)
    flags = set(re.findall(r"\w+", (re.search(r"^(?:flags|Features)\s*: (.+)$", text, re.M) or [""])[0]))
    count = available_vcpus()
    what = f"{count} × {name[1] if name else platform.processor() or platform.machine()}"
    if flags & {"amx_bf16"}:
        yield Finding("processor", "ok", f"{what}, bfloat16 in matrix units (AMX): fastest")
    elif flags & {"avx512_bf16", "bf16"}:
        yield Finding("processor", "ok", f"{what}, bfloat16 in vector units")
    elif text:
        yield Finding(
            "processor",
            "warning",
            f"{what}, no bfloat16 instructions: compute is float32, a few times slower",
            "nothing here; a processor with AMX (Intel Xeon since 2023) or AVX-512 BF16 (AMD EPYC since 2022) has them",
        )
    else:
        yield Finding("processor", "ok", what)


def _kernels() -> Iterator[Finding]:
    from strop.kernels import built

    if built():
        yield Finding("kernels in C", "ok", "sampling and training on the CPU use them")
    else:
        mend = "apt-get install gcc && pip install --force-reinstall --no-deps strop"
        yield Finding("kernels in C", "warning", "not built: decoding on the CPU is several times slower", mend)


def _memory() -> Iterator[Finding]:
    total = _number(r"^MemTotal:\s+(\d+)", _read("/proc/meminfo")) * 1024
    free = _number(r"^MemAvailable:\s+(\d+)", _read("/proc/meminfo")) * 1024
    if not total:
        return
    limit = _number(
        r"^(\d+)", _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    )
    within = ""
    if 0 < limit < total:
        used = _number(
            r"^(\d+)", _read("/sys/fs/cgroup/memory.current") or _read("/sys/fs/cgroup/memory/memory.usage_in_bytes")
        )
        total, free, within = limit, min(free, limit - used), " (limit of this container)"
    detail = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free{within}"
    if free < MEMORY_NEEDED:
        need = f"the quickstart wants {MEMORY_NEEDED / GIB:.0f} GiB: close other programs, or lower learner.tokens_per_micro_batch"
        yield Finding("memory", "warning", detail, need)
    else:
        yield Finding("memory", "ok", detail)


def _disk(folder: Path) -> Iterator[Finding]:
    for what, place in (("disk for runs", folder.resolve()), ("disk for models", cache_folder())):
        there = next(path for path in (place, *place.parents) if path.exists())
        free = shutil.disk_usage(there).free
        detail = f"{free / GIB:.1f} GiB free at {there}"
        if not os.access(there, os.W_OK):
            mend = "choose another folder: --runs FOLDER for runs, STROP_CACHE=FOLDER for models"
            yield Finding(what, "missing", f"{there} can't be written", mend)
        elif free < DISK_NEEDED:
            yield Finding(
                what, "warning", detail, f"free {(DISK_NEEDED - free) / GIB:.1f} GiB, or choose another folder"
            )
        else:
            yield Finding(what, "ok", detail)


def _start_model() -> Iterator[Finding]:
    for name in START_MODELS:
        if (start_model_folder(name) / "manifest.json").exists():
            yield Finding("start model", "ok", f"{name} in {start_model_folder(name)}")
        else:
            yield Finding(
                "start model", "optional", f"{name} isn't cached yet; training fetches it", f"strop model get {name}"
            )


def _accelerators() -> Iterator[Finding]:
    if shutil.which("nvidia-smi"):
        yield from _nvidia()
    elif Path("/dev/kfd").exists():
        yield Finding("GPU", "warning", "an AMD GPU is there; the embedded sampler and learner use the CPU")
    else:
        yield Finding("GPU", "optional", "none: everything runs on the CPU")


def _nvidia() -> Iterator[Finding]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("GPU", "warning", f"nvidia-smi fails ({error})", "mend the driver: nvidia-smi must list the GPUs")
        return
    names = "; ".join(said.splitlines())
    if not _torch_cuda():
        mend = "pip install --force-reinstall torch   (from the index for your CUDA version: pytorch.org)"
        yield Finding("GPU", "warning", f"{names}; but torch is built for the CPU", mend)
    else:
        yield Finding("GPU", "ok", names)


def _packages() -> Iterator[Finding]:
    for module, extra, purpose in EXTRAS:
        if importlib.util.find_spec(module) is None:
            yield Finding(module, "optional", f"not installed: {purpose}", f"pip install 'strop[{extra}]'")
        else:
            yield Finding(module, "ok", f"{_version(module)}: {purpose}")
    for module, purpose in (("vllm", "sampling at scale"), ("ray", "clusters")):
        if importlib.util.find_spec(module) is not None:
            yield Finding(module, "ok", f"{_version(module)}: {purpose}")


def _sandboxes() -> Iterator[Finding]:
    from strop.sandboxes import probe

    report = probe()
    # Only environments that run model-written code need them; these refuse to start without.
    strong = report.tier in ("namespaces", "rootless") and report.limits == "groups"
    limits = "" if report.limits == "groups" else ", with limits of single processes alone"
    yield Finding("sandboxes", "ok" if strong else "optional", f"{report.tier}{limits}: {report.detail}")
    for lack in report.lacks:
        yield Finding(f"sandboxes: {lack.what}", "optional", f"missing, for {lack.why}", lack.mend)


def _price() -> Iterator[Finding]:
    price = machine_price()
    yield Finding(
        "price", "ok", f"{price.text}: ${price.usd_per_hour:.3g} an hour; yours: costs.usd_per_hour in a recipe"
    )


def _version(module: str) -> str:
    try:
        return metadata.version(module.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return "version unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text, re.M)
    return int(match[1]) if match else 0
