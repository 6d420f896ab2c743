"""What durability costs: the share of a quickstart step that goes into stored batches and events, and how long a killed
quickstart takes to be where it was.

    python benchmarks/durability.py

Trains the quickstart recipe with a shorter warm-up in a process of its own, in which everything that persists (journal,
batches, hashes, events) is timed; kills it with SIGKILL in the middle of collecting a batch; and resumes it with
`strop train --resume`, from the start of the process to the moment at which the checkpoint is verified and loaded and
the run goes on. Ends with a RESULT line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.config import load_recipe
from strop.runs.events import BadLine, read_lines
from strop.runs.journal import Journal
from strop.runs.run import Run
from strop.training import collector

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.toml"
#: What a step's share is taken over, and how often the resume is measured.
STEPS, RESUMES = 2, 2


class PersistenceTimer:
    """Adds up the time inside the functions that persist; those called by one another are counted once."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False
        for owner, name in (
            (Journal, "append"),
            (Journal, "keep_only"),
            (collector, "write_groups"),
            (Run, "batch_stored"),
            (Run, "log"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return function(*arguments, **options)
            self._inside, began = True, time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._inside, self.seconds = False, self.seconds + time.perf_counter() - began

        return timed


def train_timed(path: Path, settings: list[str]) -> None:
    """Train; write what persisting took so far, and the clock, at every step."""
    from strop.training.train import train

    timer = PersistenceTimer()
    run = Run.create(path, load_recipe(RECIPE, settings))

    def hear(event: dict[str, Any]) -> None:
        if event["kind"] == "step" and event["stage"] == "rl":
            with path.with_suffix(".times").open("a") as file:
                file.write(json.dumps([time.perf_counter(), timer.seconds]) + "\n")

    run.listeners.append(hear)
    asyncio.run(train(run))


def wait_for(process: subprocess.Popen[bytes], found: Callable[[], Any], what: str, seconds: float = 900.0) -> None:
    """Wait until something is there.

    Raises:
        SystemExit: the process ended before, or it took too long.
    """
    deadline = time.monotonic() + seconds
    while not found():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit(f"no {what}: the process ended with {process.poll()}")
        time.sleep(0.02)


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    """Events of a kind."""
    return [e for e in read_lines(path / "events.jsonl") if not isinstance(e, BadLine) and e["kind"] == kind]


def kill(process: subprocess.Popen[bytes]) -> None:
    """As `kill -9` does."""
    process.send_signal(signal.SIGKILL)
    process.wait()


def resume_seconds(path: Path) -> float:
    """Seconds from the start of `strop train --resume` until the run goes on; it is killed then."""
    before = sum(event["what"] == "ready" for event in events(path, "run"))
    began = time.monotonic()
    command = [sys.executable, "-c", "from strop.cli import main; main()", "train", "--resume", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(process, lambda: sum(e["what"] == "ready" for e in events(path, "run")) > before, "resume")
    took = time.monotonic() - began
    kill(process)
    return took


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="another model than the recipe's")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked, settings = parser.parse_known_args()
    if asked.child:
        train_timed(asked.child, settings)
        return 0
    settings = [
        "evaluation.tasks=0",
        "stages.warmup.steps=4",
        "stages.rl.collect.attempt_seconds=1800",
        "stages.rl.checkpoints.every=" + str(STEPS + 1),
    ]
    settings += [f"model.name={asked.model}"] if asked.model else []
    with tempfile.TemporaryDirectory(prefix="strop-durability-") as folder:
        path = Path(folder) / "run"
        process = subprocess.Popen([sys.executable, __file__, "--child", str(path), *settings])
        journal = path / "rollouts" / "rl.journal"
        wait_for(
            process,
            lambda: (
                any(e["stage"] == "rl" for e in events(path, "checkpoint"))
                and journal.exists()
                and journal.stat().st_size
            ),
            "checkpoint and attempts after it",
        )
        kill(process)
        times = [json.loads(line) for line in path.with_suffix(".times").read_text().splitlines()]
        shares = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(times)]
        resumes = [resume_seconds(path) for _ in range(RESUMES)]
    print(f"steps of {', '.join(f'{b[0] - a[0]:.1f}' for a, b in itertools.pairwise(times))} s, of which persisting "
          f"{', '.join(f'{share:.3%}' for share in shares)}; resumes of {', '.join(f'{s:.1f}' for s in resumes)} s")  # fmt: skip
    result = {
        "overhead_share": round(statistics.median(shares), 5),
        "resume_seconds": round(statistics.median(resumes), 2),
    }
    print("RESULT", json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
