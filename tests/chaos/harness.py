"""The chaos suite's machinery: real small runs in forked processes that are killed, resumed until done, and compared.

A process is killed by SIGKILL after a random time, or at a point where a half-done thing hurts most: those are wrapped
in the child by `Point`s. Besides, the child notes every finished attempt in a file of its own, the witness, so that
what was lost is told by something other than the code under test.
"""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import json
import os
import random
import shutil
import signal
import struct
import sys
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from strop.agents.attempts import AttemptRunner
from strop.config import AttemptsSettings, Recipe, parse_recipe
from strop.environments.registry import find_class
from strop.learning.embedded import EmbeddedLearner
from strop.learning.optimizer import MasterWeights
from strop.rollouts import Rollout, Scored
from strop.runs import files
from strop.runs.events import LineLog, encode_line
from strop.runs.journal import Entry, Journal
from strop.runs.run import Run
from strop.runs.store import read_groups
from strop.runs.verify import verify_run
from strop.training.collector import Collector
from strop.training.train import train
from strop.training.workshop import Workshop

HERE = Path(__file__).parent
ENVIRONMENT = f"{HERE.parent / 'letters.py'}:Letters"
SCORER_KILLED = "the scoring process is killed"
#: Longest that one life of a run may take; it takes a few seconds, on a busy machine a minute.
LIFE_SECONDS = 600.0


def recipe(model: Path, *, staleness: int = 0, seed: int = 0, steps: int = 5) -> Recipe:
    """A supervised warm-up and some reinforcement learning, with evaluations and checkpoints in between."""
    rl = {"groups": 3, "group_size": 3, "staleness": staleness, "in_flight": 10, "max_failed_share": 1.0}
    return parse_recipe(
        {
            "name": "chaos",
            "seed": seed,
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": {"name": ENVIRONMENT, "agent": {"max_tokens": 10}},
            "evaluation": {"tasks": 6, "every": 2, "temperature": 1.0},
            "stages": [
                {
                    "kind": "sft",
                    "name": "warmup",
                    "steps": 2,
                    "batch_size": 3,
                    "demonstrations": 6,
                    "schedule": {"learning_rate": 1e-3},
                },
                {
                    "kind": "rl",
                    "name": "rl",
                    "steps": steps,
                    "schedule": {"learning_rate": 1e-3, "kind": "linear", "warmup_steps": 1},
                    "collect": {**rl, "retries": 40},
                    "checkpoints": {"every": 2},
                },
            ],
        }
    )


def chain(model: Path, *, seed: int = 0) -> Recipe:
    """Everything a chain can have: two environments with a curriculum, a gate that keeps the earlier model, a fresh
    student with a teacher, and stored attempts at the end.
    """
    letters = {"name": ENVIRONMENT, "agent": {"max_tokens": 8}}
    schedule = {"learning_rate": 1e-3}
    collect = {"groups": 3, "group_size": 3, "in_flight": 10, "max_failed_share": 1.0, "retries": 40}
    return parse_recipe(
        {
            "name": "chaos-chain",
            "seed": seed,
            "threads": 1,
            "model": {"name": str(model), "dtype": "float32"},
            "sampler": {"slots": 8, "max_context": 96},
            "environment": letters,
            "evaluation": {"tasks": 4, "temperature": 1.0},
            "stages": [
                {
                    "kind": "rl",
                    "name": "rl",
                    "steps": 3,
                    "schedule": schedule,
                    "collect": collect,
                    "checkpoints": {"every": 2},
                    "environments": [
                        {**letters, "label": "one", "weight": 2.0, "curriculum": {"label": "digit"}},
                        {**letters, "label": "two", "options": {"train_tasks": 9}},
                    ],
                },
                {
                    "kind": "rl",
                    "name": "worse",
                    "steps": 2,
                    "schedule": schedule,
                    "collect": collect,
                    "gate": {"gain_above": 0.9, "otherwise": "keep"},
                },
                {
                    "kind": "distill",
                    "name": "student",
                    "steps": 3,
                    "start": "fresh",
                    "schedule": schedule,
                    "collect": {**collect, "group_size": 1},
                    "teachers": [{"stage": "rl"}],
                    "checkpoints": {"every": 1},
                },
                {
                    "kind": "distill",
                    "name": "best",
                    "steps": 2,
                    "schedule": schedule,
                    "collect": {"groups": 2},
                    "stored": {"stage": "student"},
                    "checkpoints": {"every": 1},
                },
            ],
        }
    )


# -- where to kill ------------------------------------------------------------------------------------------------------


def die(*_: Any, **__: Any) -> None:
    """What `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@dataclass(frozen=True)
class Point:
    """A function, and whether to die before it, after it, or in its middle (a replacement that dies there)."""

    owner: Any
    name: str
    when: str
    middle: Callable[..., None] = die


def _half_a_line(log: LineLog, event: dict[str, Any], **_: Any) -> None:
    data = encode_line(event).encode()
    os.write(log._file, data[: len(data) // 2])
    die()


def _half_a_checkpoint(learner: EmbeddedLearner, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"half of it")
    die()


def _half_the_weights(masters: MasterWeights) -> None:
    masters.weights[0].tensor.data.zero_()
    die()


def _half_a_removal(path: Path) -> None:
    path.replace(path.with_name(f".{path.name}.{os.getpid()}.part"))
    die()


def _scorer_dies(environment: Any, text: str) -> float:
    print(SCORER_KILLED, flush=True)  # noqa: T201  # the process's log is counted
    environment.scorer.kill()
    environment.scorer.wait()
    return float(environment.scorer.stdout.readline())


POINTS: dict[str, Point] = {
    "between write and rename": Point(files, "flush_to_disk", "after"),
    "before a file is on disk": Point(files, "flush_to_disk", "before"),
    "half an event or journal line": Point(LineLog, "append", "middle", _half_a_line),
    "after an event or journal line": Point(LineLog, "append", "after"),
    "an attempt ended, not yet journalled": Point(Journal, "append", "before"),
    "an attempt was journalled": Point(Journal, "append", "after"),
    "the journal is to be rewritten": Point(Journal, "keep_only", "before"),
    "the journal was rewritten": Point(Journal, "keep_only", "after"),
    "a batch is stored, not yet recorded": Point(Run, "batch_stored", "before"),
    "a batch was recorded": Point(Run, "batch_stored", "after"),
    "the learner's pass": Point(EmbeddedLearner, "forward_backward", "before"),
    "the learner's pass is done": Point(EmbeddedLearner, "forward_backward", "after"),
    "a weight update": Point(MasterWeights, "write_weights", "middle", _half_the_weights),
    "a weight update is done": Point(EmbeddedLearner, "step", "after"),
    "a step is to be logged": Point(Run, "log_step", "before"),
    "a checkpoint": Point(EmbeddedLearner, "save", "middle", _half_a_checkpoint),
    "a checkpoint is written, not yet renamed": Point(EmbeddedLearner, "save", "after"),
    "a checkpoint is done": Point(Run, "checkpoint", "after"),
    "an old checkpoint's removal": Point(files, "remove_folder", "middle", _half_a_removal),
    "a checkpoint is loaded": Point(EmbeddedLearner, "load", "before"),
    "the stage's end": Point(Collector, "abandon", "before"),
    "another model is taken": Point(EmbeddedLearner, "restart", "after"),
    "an earlier model is kept": Point(Workshop, "keep", "before"),
    "the run's end": Point(Run, "finish", "before"),
    "an attempt in flight": Point(AttemptRunner, "_act_and_score", "before"),
}


@dataclass(frozen=True)
class Plan:
    """How a life is to end: at the nth passage of a point, or after some seconds. The scorer may be killed, too.

    Attributes:
        point, number: where; "" for after `seconds`.
        seconds: since the process began; 0 if it isn't killed after a time.
        scorer: number of the question at which the scoring child process is killed; 0 for none.
    """

    point: str = ""
    number: int = 1
    seconds: float = 0.0
    scorer: int = 0


def arm(plan: Plan) -> None:
    """Wrap what the plan needs, in this process."""
    if plan.point:
        _wrap(POINTS[plan.point], plan.number)
    if plan.scorer:
        _wrap(Point(find_class(ENVIRONMENT), "_ask", "middle", _scorer_dies), plan.scorer)


def count_passages() -> Counter[str]:
    """How often each point is passed in this process from now on."""
    passages: Counter[str] = Counter()

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def passed(*arguments: Any, **options: Any) -> Any:
            passages[name] += 1
            return original(*arguments, **options)

        return passed

    for name, point in POINTS.items():
        setattr(point.owner, point.name, counting(name, getattr(point.owner, point.name)))
    return passages


def _wrap(point: Point, number: int) -> None:
    original = getattr(point.owner, point.name)
    passed = 0

    def wrapped(*arguments: Any, **options: Any) -> Any:
        nonlocal passed
        passed += 1
        if passed != number:
            return original(*arguments, **options)
        if point.when == "middle":
            return point.middle(*arguments, **options)
        if point.when == "after":
            original(*arguments, **options)
        return die()

    setattr(point.owner, point.name, wrapped)


def warm_up(folder: Path, model: Path) -> None:
    """Train a little in this process: what every life would import is then imported once, before the first fork."""
    run = Run.create(folder, recipe(model, steps=2))
    asyncio.run(train(run))
    run.close()


# -- lives --------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], Any], log: Path, kill_after: float = 0.0) -> tuple[int, Any]:
    """Do `work` in a forked process.

    Args:
        work: gives JSON values.
        log: what the process prints, its traceback included, is added to this file.
        kill_after: seconds after which it is killed; 0: it isn't.

    Returns:
        The signal that ended it (0 for none), and what `work` gave (None if it was killed).

    Raises:
        RuntimeError: it ended in an exception, or took longer than `LIFE_SECONDS`.
    """
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    if (child := os.fork()) == 0:
        status = 1
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            faulthandler.dump_traceback_later(LIFE_SECONDS * 0.9)  # where it hangs, if it does
            answer.write_text(json.dumps(work()))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    began, killed = time.monotonic(), False
    while (waited := os.waitpid(child, os.WNOHANG)) == (0, 0):
        elapsed = time.monotonic() - began
        if not killed and elapsed > (kill_after or LIFE_SECONDS):
            killed = True
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001)
    ended_by = os.WTERMSIG(waited[1]) if os.WIFSIGNALED(waited[1]) else 0
    if ended_by == 0 and os.WEXITSTATUS(waited[1]) != 0:
        raise RuntimeError(f"a life ended in an error:\n{log.read_text()[-4000:]}")
    if killed and not kill_after:
        raise RuntimeError(f"a life hung for {LIFE_SECONDS:g} s:\n{log.read_text()[-4000:]}")
    return ended_by, json.loads(answer.read_text()) if ended_by == 0 else None


def live(path: Path, asked: Recipe, plan: Plan) -> None:
    """Begin or take up the run, and train until done or killed."""
    _witness(path.with_suffix(".witness"))
    arm(plan)
    run = Run.resume(path) if (path / "config.toml").exists() else Run.create(path, asked)
    asyncio.run(train(run))
    run.close()


def _witness(file: Path) -> None:
    """Note every attempt once its journal line is written."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    original = Journal.append

    def append(journal: Journal, entry: Entry) -> None:
        original(journal, entry)
        os.write(descriptor, f"{entry.rollout.id} {digest(entry.rollout)}\n".encode())

    Journal.append = append  # type: ignore[method-assign]


def digest(rollout: Rollout) -> str:
    """What was sampled and what it scored."""
    found = hashlib.sha256()
    for call in rollout.calls:
        found.update(json.dumps([call.prompt, call.tokens, call.versions]).encode())
        found.update(struct.pack(f"{len(call.logprobs)}f", *call.logprobs))
    reward = rollout.ending.reward if isinstance(rollout.ending, Scored) else None
    found.update(repr(reward).encode())
    return found.hexdigest()


# -- judging ------------------------------------------------------------------------------------------------------------


def weights(path: Path) -> dict[str, str]:
    """Hashes of the last checkpoint's weights and optimizer state."""
    stage = tomllib.loads((path / "config.toml").read_text())["stages"][-1]["name"]
    last = max((path / "checkpoints").glob(f"{stage}-*"))
    return {file.name: files.sha256(file) for file in sorted(last.glob("*.safetensors"))}


def judge(path: Path) -> dict[str, Any]:
    """What a finished run lost and did twice."""
    stored: dict[str, str] = {}
    times: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for file in (path / "rollouts").glob("*.parquet"):
        if file.stem.endswith("-stored"):  # a stage's copy of attempts that are in the files of another
            continue
        for group, used in read_groups(file):
            for rollout in group.rollouts:
                stored[rollout.id] = digest(rollout)
                times[rollout.id] += 1
                trained[rollout.id] += used == "trained"
    witnessed = [line.split() for line in path.with_suffix(".witness").read_text().splitlines()]
    return {
        "lost": [name for name, what in witnessed if stored.get(name) != what],
        "twice": [name for name, count in trained.items() if count > 1],
        "stored_twice": [name for name, count in times.items() if count > 1],
        "attempts": len(stored),
        "left": [file.name for file in path.rglob("*") if file.suffix in (".journal", ".part")],
        "problems": [f"{problem.file}: {problem.sentence}" for problem in verify_run(path) if not problem.mended],
        "weights": weights(path),
    }


def _whole_life(path: Path, asked: Recipe) -> dict[str, Any]:
    passages, began = count_passages(), time.monotonic()
    live(path, asked, Plan())
    return judge(path) | {"seconds": time.monotonic() - began, "passages": passages}


def train_again(path: Path) -> dict[str, str]:
    """Train a copy of the run on its stored batches alone, from the first step: the weights that those batches make."""
    copy = path.with_name(f"{path.name}-again")
    shutil.copytree(path / "rollouts", copy / "rollouts", ignore=shutil.ignore_patterns("evaluation-*", "*rest*"))
    table = tomllib.loads((path / "config.toml").read_text())
    table["evaluation"]["tasks"] = 0
    (copy / "config.toml").write_text(tomli_w.dumps(table))
    run = Run.resume(copy)
    asyncio.run(train(run))
    run.close()
    return weights(copy)


@dataclass
class Chaos:
    """Runs that were killed and resumed, and what came of them.

    Attributes:
        folder: where the runs are.
        random: every plan is drawn from it.
        kills: how many lives ended by a kill, by where; "the scorer" are kills of the scoring child.
        runs, lost, twice: finished runs, attempts that were lost, attempts that were trained twice.
        unequal: runs whose weights were not those they should be.
        problems: what `strop verify` found in finished runs, and files that were left behind.
    """

    folder: Path
    random: random.Random
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    lost: int = 0
    twice: int = 0
    unequal: int = 0
    problems: list[str] = field(default_factory=list)
    references: dict[tuple[str, int], Any] = field(default_factory=dict)

    def reference(self, asked: Recipe) -> dict[str, Any]:
        """A run that is not killed, of the same recipe: what `judge` says of it, its "seconds" and "passages"."""
        key = asked.name, asked.seed
        if key not in self.references:
            path = self.folder / f"whole-{asked.name}-{asked.seed}"
            self.references[key] = in_child(lambda: _whole_life(path, asked), path.with_suffix(".log"))[1]
        return self.references[key]

    def run(self, asked: Recipe, plans: Callable[[], Plan | None]) -> None:
        """Let a run live and be killed until it is done, then judge it.

        Args:
            asked: the recipe.
            plans: how each life is to end; None lets it live to its end.
        """
        path = self.folder / f"run-{self.runs}"
        log = path.with_suffix(".log")
        while True:
            plan = plans() or Plan()
            ended_by, _ = in_child(lambda p=plan: live(path, asked, p), log, plan.seconds)
            if ended_by == 0:
                break
            self.kills[plan.point or "any moment"] += 1
        self.kills["the scorer"] += log.read_text().count(SCORER_KILLED)
        self._judge(path, asked)
        shutil.rmtree(path)
        self.runs += 1

    def _judge(self, path: Path, asked: Recipe) -> None:
        log = path.with_suffix(".log")
        found = in_child(lambda: judge(path), log)[1]
        if all(stage.collect.staleness == 0 for stage in asked.stages if isinstance(stage, AttemptsSettings)):
            should = self.reference(asked)["weights"]
        else:
            should = in_child(lambda: train_again(path), log)[1]
        self.lost += len(found["lost"])
        self.twice += len(found["twice"])
        self.unequal += found["weights"] != should
        wrong = [*found["problems"], *found["left"], *(f"{name} is stored twice" for name in found["stored_twice"])]
        self.problems += [f"{path.name}: {sentence}" for sentence in wrong]

    def result(self) -> dict[str, Any]:
        """The figures."""
        return {
            "kills": sum(self.kills.values()),
            "attempts_lost": self.lost,
            "trained_twice": self.twice,
            "weights_equal": self.unequal == 0,
            "runs": self.runs,
        }
