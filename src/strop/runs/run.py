"""The run directory and its one writer: the event log, stored batches, checkpoints, and taking a run up again.

What is written here is enough to resume, replay and audit the run. What a checkpoint's files hold is the learner's
affair; when and how they become whole is decided here.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import threading
import time
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli_w

from strop.config import Recipe, parse_recipe
from strop.costs import Ledger, price_of
from strop.errors import RunError
from strop.runs import files
from strop.runs.events import BadLine, Event, LineLog, now, read_lines
from strop.runs.waits import GRACE, Waits, Watchdog

_PACKAGES = ("strop", "torch", "transformers", "tokenizers", "renderers", "numpy", "pyarrow", "peft", "reasoning-gym")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A saved state. Order: stages as in the recipe, then steps."""

    path: Path
    stage: str
    step: int


class Run:
    """One training run's directory, open for writing by this process alone.

    Attributes:
        path: the directory.
        recipe: what was asked.
        ledger: what every second and token went to.
        waits: what is being waited for.
        listeners: called with every event (progress, TensorBoard); an exception of theirs ends the run.
    """

    def __init__(self, path: Path, recipe: Recipe, *, resumed: bool) -> None:
        self.path, self.recipe, self.resumed = path, recipe, resumed
        self._lock = _lock(path)
        self.listeners: list[Callable[[Event], None]] = []
        self.ledger, began = Ledger(), time.monotonic()
        self.waits = Waits()
        self.watchdog: Watchdog | None = None
        self._writing = threading.Lock()
        last_clock = 0.0
        self._logged_steps: dict[tuple[str, int], float | None] = {}  # by earlier processes, with the loss
        self._batch_hashes: dict[str, str] = {}  # of earlier processes
        self._evaluations: dict[str, Event] = {}
        self._validations: dict[tuple[str, int], float] = {}  # held-out losses by stage and step
        self._teachers: dict[tuple[str, int], str] = {}  # content of each stage's, by number
        self._gates: dict[str, Event] = {}  # the last word on each stage
        ledger: Event = {}
        damaged = []
        for event in read_lines(path / "events.jsonl") if resumed else ():
            if isinstance(event, BadLine):
                damaged.append(event)
                continue
            last_clock = max(last_clock, float(event["clock"]))
            match event["kind"]:
                case "step":
                    self._logged_steps[event["stage"], event["step"]] = event["metrics"].get("loss")
                case "validation":
                    self._validations[event["stage"], event["step"]] = event["metrics"]["loss"]
                case "batch":
                    self._batch_hashes[event["file"]] = event["sha256"]
                case "evaluation":
                    self._evaluations[event["name"]] = event
                case "teacher":
                    self._teachers[event["stage"], event["number"]] = event["content"]
                case "gate":
                    self._gates[event["stage"]] = event
                case "cost":
                    ledger = event["ledger"]
        self.ledger.restore(_with_lost_time(ledger, last_clock))
        self._began = began - last_clock
        self.events = LineLog(path / "events.jsonl")
        if resumed:
            leftovers = [str(part.relative_to(path)) for part in files.remove_leftovers(path)]
            self.log("run", what="resumed", leftovers=leftovers, cut_bytes=self.events.cut, price=_price(recipe))
            for line in damaged:
                self.warn(f"events.jsonl line {line.number} is damaged ({line.why}) and was passed over")

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> Run:
        """Begin a run in a new directory.

        Raises:
            RunError: there is a run already, or the directory can't be written.
        """
        if (path / "config.toml").exists():
            raise RunError(
                f"{path} holds a run already. Take it up with `strop train --resume {path}`, or choose another name "
                f"with --set name=…"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{path} can't be made ({error.strerror}). Choose another folder with --runs.") from error
        asked = recipe.model_dump(exclude_none=True, mode="json")
        asked["versions"] = versions()
        with files.written_whole(path / "config.toml") as beside:
            beside.write_text(tomli_w.dumps(asked), encoding="utf-8")
        run = cls(path, recipe, resumed=False)
        run.log("run", what="started", name=recipe.name, price=_price(recipe))
        return run

    @classmethod
    def resume(cls, path: Path) -> Run:
        """Take up a run where it stopped.

        Raises:
            RunError: there is none, another process has it, or its configuration is damaged.
        """
        return cls(path, read_recipe(path), resumed=True)

    # -- events -----------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> float:
        """Seconds since the run began, time in which no process worked on it left out."""
        return time.monotonic() - self._began

    def log(self, kind: str, *, flush: bool = False, **fields: Any) -> None:
        """Append an event and tell the listeners."""
        with self._writing:  # the watchdog writes too, and clocks must not go back
            event: Event = {"time": round(now(), 3), "clock": round(self.clock, 4), "kind": kind, **fields}
            self.events.append(event, flush=flush)
        if kind == "evaluation":
            self._evaluations[event["name"]] = event
        if kind == "gate":
            self._gates[event["stage"]] = event
        for listener in self.listeners:
            listener(event)

    def tell(self, kind: str, **fields: Any) -> None:
        """Tell the listeners something that isn't kept: how far things are."""
        for listener in self.listeners:
            listener({"kind": kind, **fields})

    def warn(self, sentence: str, **fields: Any) -> None:
        """A plain sentence that people should read."""
        self.log("warning", message=sentence, **fields)

    def log_step(self, stage: str, step: int, metrics: dict[str, float]) -> None:
        """Log a trained step once: one that is replayed after a resume isn't logged again, but compared."""
        if (stage, step) not in self._logged_steps:
            self.log("step", stage=stage, step=step, metrics=metrics)
            self.log("cost", stage=stage, step=step, ledger=self.ledger.snapshot())
            return
        before, again = self._logged_steps[stage, step], metrics.get("loss")
        if before != again:
            self.warn(
                f"{stage} step {step + 1} gave a loss of {again!r} when it was replayed, and {before!r} before: this "
                f"machine, its libraries or its number of threads compute differently, so the weights differ as well"
            )

    def step_logged(self, stage: str, step: int) -> bool:
        """Whether a step was trained and logged before."""
        return (stage, step) in self._logged_steps

    def log_validation(self, stage: str, steps: int, metrics: dict[str, float]) -> None:
        """Log what was measured on held-out examples after so many steps, once."""
        if (stage, steps) not in self._validations:
            self._validations[stage, steps] = metrics["loss"]
            self.log("validation", stage=stage, step=steps, metrics=metrics)

    def validations(self, stage: str) -> dict[int, float]:
        """Losses on a stage's held-out examples by the steps after which they were measured."""
        return {steps: loss for (name, steps), loss in self._validations.items() if name == stage}

    def evaluation(self, name: str) -> Event | None:
        """The event of an evaluation that was made, or None."""
        return self._evaluations.get(name)

    @property
    def evaluations(self) -> list[Event]:
        """Evaluations in the order in which they were made."""
        return list(self._evaluations.values())

    def gate(self, stage: str) -> Event | None:
        """The last word on whether a stage's model was promoted, or None if there is none yet."""
        return self._gates.get(stage)

    def same_teacher(self, stage: str, number: int, source: str, content: str) -> None:
        """Record which weights teach a stage.

        Args:
            stage, number: the stage, and the teacher's number in it.
            source: where it came from.
            content: fingerprint of its weights.

        Raises:
            RunError: the stage began with other weights.
        """
        before = self._teachers.setdefault((stage, number), content)
        if before != content:
            raise RunError(
                f"{source} is not the teacher that stage {stage} began with (weights {content}, and {before} then). "
                "Put the model back that was there, or begin a new run."
            )
        self.log("teacher", stage=stage, number=number, source=source, content=content)

    # -- batches ----------------------------------------------------------------------------------------------------

    def batch_path(self, stage: str, step: int) -> Path:
        """File of the batch that a step trains on."""
        return self.path / "rollouts" / f"{stage}-{step:06d}.parquet"

    def batch_stored(self, path: Path) -> None:
        """Record the hash of a batch file that has just become whole."""
        self.log("batch", file=path.name, sha256=files.sha256(path), flush=True)

    def check_batch(self, path: Path) -> None:
        """Compare a stored batch with its recorded hash; one that a kill left unrecorded is recorded now.

        Raises:
            RunError: the file changed since.
        """
        recorded = self._batch_hashes.get(path.name)
        if recorded is None:
            self.batch_stored(path)
        elif files.sha256(path) != recorded:
            raise RunError(f"{path} is damaged: its SHA-256 isn't the one that events.jsonl recorded.")

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint_path(self, stage: str, step: int) -> Path:
        """Folder of the checkpoint after `step` steps of a stage."""
        return self.path / "checkpoints" / f"{stage}-{step:06d}"

    def checkpoint(
        self,
        stage: str,
        step: int,
        save: Callable[[Path], None],
        state: dict[str, Any],
        spare: Collection[int] = (),
    ) -> Path:
        """Save the state after `step` steps of a stage, whole or not at all, and drop the stage's oldest.

        Args:
            save: writes the learner's files into the folder it is given.
            state: JSON values that come back from `read_checkpoint_state`.
            spare: steps whose checkpoints are not dropped.
        """
        path = self.checkpoint_path(stage, step)
        if path.exists():
            return path
        limit = self.recipe.deadlines.checkpoint_seconds
        with (
            self.waits.during(f"checkpoint {path.name}", limit),
            self.ledger.activity("checkpoint"),
            files.written_whole(path) as beside,
        ):
            beside.mkdir()
            save(beside)
            files.write_json(beside / "state.json", {"stage": stage, "step": step, **state})
            names = sorted(str(p.relative_to(beside)) for p in beside.rglob("*") if p.is_file())
            files.write_json(beside / "manifest.json", {name: files.sha256(beside / name) for name in names})
        self.log("checkpoint", stage=stage, step=step, path=str(path.relative_to(self.path)), flush=True)
        keep = next(s.checkpoints.keep for s in self.recipe.stages if s.name == stage)
        for old in [c for c in self.checkpoints() if c.stage == stage and c.step not in spare][:-keep]:
            files.remove_folder(old.path)
        return path

    def checkpoints(self) -> list[Checkpoint]:
        """Every checkpoint folder, oldest first; not yet verified."""
        order = {stage.name: number for number, stage in enumerate(self.recipe.stages)}
        found = []
        for path in (self.path / "checkpoints").glob("*-[0-9]*"):
            stage, _, step = path.name.rpartition("-")
            if path.is_dir() and stage in order and step.isdigit():
                found.append(Checkpoint(path, stage, int(step)))
        return sorted(found, key=lambda c: (order[c.stage], c.step))

    def newest_whole_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint whose files are all as they were written; damaged ones are named in a warning."""
        for checkpoint in reversed(self.checkpoints()):
            problems = list(check_checkpoint(checkpoint.path))
            if not problems:
                return checkpoint
            self.warn(f"checkpoint {checkpoint.path.name} is passed over: {'; '.join(problems)}")
            files.remove_folder(checkpoint.path)
        return None

    # -- waits ------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Have the waits watched until the run is closed."""
        self.watchdog = self.watchdog or Watchdog(self.waits, self.warn, self._stalled)

    def _stalled(self, why: str) -> None:
        """The last event of a process that the watchdog ends; a thread may be stuck with the lock, so without it."""
        clock = round(self.clock, 4)
        self.events.append({"time": round(now(), 3), "clock": clock, "kind": "run", "what": "stalled", "message": why})

    def ending(self) -> None:
        """Work broke off: what is under way still gets a little time to end, until the run is closed."""
        self.waits.begin("the end of what was under way", GRACE)

    # -- end --------------------------------------------------------------------------------------------------------

    def finish(self, summary: dict[str, Any]) -> None:
        """Write summary.json: the run is done."""
        files.write_json(self.path / "summary.json", summary)
        self.log("run", what="finished", flush=True)

    def close(self) -> None:
        """Let go of the directory."""
        if self.watchdog:
            self.watchdog.close()
        self.events.close()
        os.close(self._lock)


def read_recipe(path: Path) -> Recipe:
    """What was asked of the run in a directory.

    Raises:
        RunError: there is none, or its configuration is damaged.
    """
    try:
        table = tomllib.loads((path / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} holds no run (no config.toml). `strop runs` lists those there are.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RunError(f"{path}/config.toml is damaged: {error}.") from error
    table.pop("versions", None)
    return parse_recipe(table)


def check_checkpoint(path: Path) -> Iterator[str]:
    """What is wrong with a checkpoint folder, a sentence each; nothing if it is whole."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        items = dict(manifest).items()
    except (OSError, ValueError, TypeError) as error:
        yield f"{path.name}/manifest.json can't be read ({error})"
        return
    for name, digest in items:
        file = path / name
        if not file.is_file():
            yield f"{path.name}/{name} is missing"
        elif files.sha256(file) != digest:
            yield f"{path.name}/{name} has changed since it was written"


def read_checkpoint_state(path: Path) -> dict[str, Any]:
    """The state that `Run.checkpoint` was given, of a folder that was verified."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state


def versions() -> dict[str, str]:
    """Versions of everything that decides results."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _with_lost_time(ledger: Event, clock: float) -> Event:
    """A process that was killed could not account for its last seconds: they are booked as lost, not left out."""
    accounts = {phase: dict(parts) for phase, parts in ledger.get("accounts", {}).items()}
    known = sum(sum(parts.values()) for parts in accounts.values())
    if clock > known:
        lost = accounts.setdefault("killed", {})
        lost["lost"] = lost.get("lost", 0.0) + clock - known
    return {**ledger, "accounts": accounts}


def _price(recipe: Recipe) -> dict[str, Any]:
    """What this machine costs, for the record: whoever reads the run may sit at another."""
    return price_of(recipe.costs.machine, recipe.costs.usd_per_hour).as_record()


def _lock(path: Path) -> int:
    """Take the directory's lock; the kernel frees it when the process ends, however it ends."""
    try:
        descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunError(
            f"{path} can't be written ({error.strerror}). Mend its permissions or choose another."
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunError(f"{path} is in use by another process. Wait for it or end it, then resume.") from None
    return descriptor
