"""Memory of a long run: attempts of an instant environment through the real collector, with its files. RSS must stay flat.

    python benchmarks/memory.py --attempts 1000000
    python benchmarks/memory.py --attempts 20000      # what the tests run

The sampler answers at once; everything else is what a training run does between two updates: attempts, scoring, journal,
stored batches with their hashes, events, the ledger, the watch over the run's health. Stored batches are removed as
soon as they are read back, so that the disk doesn't fill. Ends with a RESULT line: RSS after the first fifth, at the
end, and the slope between, in bytes an attempt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tiny import make_tokenizer

from strop.agents import SingleReply
from strop.agents.attempts import AttemptRunner
from strop.config import CollectSettings, parse_recipe
from strop.environments.environment import Environment
from strop.rollouts import FinishReason, Rollout, Scored, Task
from strop.runs.run import Run
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import Sample, SamplingParams
from strop.training.collector import Collector
from strop.training.health import HealthWatch
from strop.training.metrics import batch_metrics

GROUPS, GROUP_SIZE = 64, 8


class InstantSampler:
    """Answers at once with four tokens that depend on the seed."""

    version, max_context = 0, 256

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        tokens = [3 + ((params.seed or 0) >> 8 * n) % 200 for n in range(4)]
        return Sample(tokens, [-0.5] * 4, [self.version] * 4, FinishReason.STOP)

    async def close(self) -> None:
        """Nothing to end."""


class Instant(Environment):
    """Scores whatever is said by its length."""

    name = "instant"

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        return Scored(float(rollout.calls[-1].tokens[0] % 2), {"length": float(rollout.sampled_tokens)})


async def collect(run: Run, attempts: int, staleness: int) -> list[tuple[int, int]]:
    """Collect so many attempts; gives (attempts so far, RSS in bytes) after every batch."""
    sampler, process = InstantSampler(), psutil.Process()
    runner = AttemptRunner(
        environment=Instant(),
        agent=SingleReply(),
        sampler=sampler,
        renderer=renderer_for(make_tokenizer(), "tiny"),
        params=SamplingParams(max_tokens=8),
        seconds=60.0,
        ledger=run.ledger,
        clock=lambda: run.clock,
        waits=run.waits,
    )

    def source(number: int, _: int) -> tuple[Task, AttemptRunner]:
        return Task(f"task-{number}", "instant", ({"role": "user", "content": f"Question {number}"},)), runner

    settings = CollectSettings(groups=GROUPS, group_size=GROUP_SIZE, staleness=staleness)
    seen, began = [], time.monotonic()
    async with Collector(run, "rl", source, settings, 0) as collector:
        for step in range(attempts // (GROUPS * GROUP_SIZE)):
            groups = await collector.next_batch(step)
            sampler.version = step + 1
            collector.stepped(step)
            run.log_step("rl", step, batch_metrics(groups, step))
            run.batch_path("rl", step - 1).unlink(missing_ok=True)  # the newest one says where the collector was
            seen.append(((step + 1) * GROUPS * GROUP_SIZE, process.memory_info().rss))
            if step % 100 == 0:
                print(
                    f"{seen[-1][0]:9,} attempts  {seen[-1][1] / 2**20:7.1f} MiB  {time.monotonic() - began:6.0f} s",
                    flush=True,
                )
        await collector.abandon()
    return seen


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--staleness", type=int, default=1)
    asked = parser.parse_args()
    stage = {"kind": "rl", "name": "rl", "steps": 10**6, "schedule": {"learning_rate": 1e-5}}
    recipe = parse_recipe({"name": "memory", "environment": {"name": "arithmetic"}, "stages": [stage]})
    with tempfile.TemporaryDirectory(prefix="strop-memory-") as folder:
        run = Run.create(Path(folder) / "run", recipe)
        run.listeners.append(HealthWatch(run).hear)
        seen = asyncio.run(collect(run, asked.attempts, asked.staleness))
        run.close()
    warm = seen[len(seen) // 5 :]
    slope = float(np.polyfit([count for count, _ in warm], [rss for _, rss in warm], 1)[0])
    result = {
        "attempts": seen[-1][0],
        "rss_start_mib": round(warm[0][1] / 2**20, 1),
        "rss_end_mib": round(warm[-1][1] / 2**20, 1),
        "rss_peak_mib": round(max(rss for _, rss in seen) / 2**20, 1),
        "bytes_an_attempt": round(slope, 2),
    }
    print("RESULT", json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
