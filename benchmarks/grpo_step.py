"""A whole GRPO step of strop against TRL's, and against the time that torch needs for the same matrix products alone.

Eight prompts, eight completions of at most 32 new tokens, the same model, prompts and reward, bf16. Both run as
processes of their own that take turns, a step each: CPU seconds with one thread each, then wall time with two. The
matrix products of each of strop's steps (prefill, decoding, forward, backward) are repeated without anything else
after it. strop's step is the loop's own: collector, packing, learner, publication. Keep the machine otherwise idle.

    python benchmarks/grpo_step.py [--trl-python .peers/trl/bin/python] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import numbers_task as task

from strop.environments import Environment
from strop.rollouts import Group, Rollout, Scored, Task, final_text

HERE = Path(__file__).parent
Figures = dict[str, float]
#: Rows that go through a weight, the weight, how often forward, and whether backward.
Product = tuple[int, Any, int, bool]


class Numbers(Environment):
    """The peers' task as an environment."""

    name = "numbers"

    def tasks(self, split: str) -> list[Task]:
        texts = task.prompts(4096, seed=0 if split == "train" else 1)
        return [Task(f"{split}-{n}", self.name, ({"role": "user", "content": text},)) for n, text in enumerate(texts)]

    async def score(self, task_: Task, rollout: Rollout) -> Scored:
        return Scored(task.reward(final_text(rollout.transcript)))


RECIPE: dict[str, Any] = {
    "name": "grpo-step",
    "environment": {"name": f"{HERE / 'grpo_step.py'}:Numbers", "agent": {"max_tokens": task.MAX_TOKENS}},
    "sampler": {"max_context": 256},
    "evaluation": {"tasks": 0},
    "stages": [
        {
            "kind": "rl",
            "name": "rl",
            "steps": 10_000,
            "schedule": {"learning_rate": task.LEARNING_RATE},
            "collect": {"groups": task.PROMPTS, "group_size": task.COMPLETIONS},
        }
    ],
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def strop_turns(model: str) -> None:
    """One step of the loop for every line on standard input."""
    from strop.config import RLSettings, parse_recipe
    from strop.learning import make_advantage, make_loss, pack
    from strop.models.load import load_model
    from strop.runs.run import Run
    from strop.training.collector import Collector
    from strop.training.train import build

    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", parse_recipe(RECIPE))
        shop = build(run, load_model(model))
        stage = run.recipe.stages[0]
        assert isinstance(stage, RLSettings)
        advantage = make_advantage(stage.advantage.spec)
        loss = make_loss([part.spec for part in stage.loss])
        async with Collector(run, stage.name, shop.tasks(stage), stage.collect, shop.seed(stage.name)) as collector:
            for step in count():
                say("READY")
                if not sys.stdin.readline():
                    break
                began = time.perf_counter(), time.process_time()
                if step:
                    collector.stepped(step - 1)
                groups = await collector.next_batch(step)
                sampling = time.process_time() - began[1]
                batch = pack(groups, advantage)
                metrics = await shop.work(shop.learner.forward_backward, batch, loss, stage.collect.temperature)
                # At rate 0: the start model was dequantised, and 4 % of its weights lie exactly between two numbers of
                # bf16. The smallest step lets all of them fall to the side of the reward, and replies become shorter.
                await shop.work(shop.learner.step, 0.0)
                wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
                figures = {"wall": wall, "cpu": cpu, "sampling_cpu": sampling}
                figures |= {"sampled": sum(r.sampled_tokens for group in groups for r in group.rollouts)}
                figures |= {"trained": metrics["tokens_trained"], "computed": metrics["tokens_computed"]}
                say("STEP " + json.dumps(figures | matmul_alone(groups, batch, shop.learner)))
        await shop.sampler.close()


def matmul_alone(groups: list[Group], batch: Any, learner: Any) -> Figures:
    """Seconds for the matrix products of linear layers that the step can't do without, on random numbers."""
    import numpy as np

    from strop.learning.microbatches import split_batch

    decoder = learner.policy.decoder
    layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in decoder.layers]
    calls = [call for group in groups for rollout in group.rollouts for call in rollout.calls]
    prefill = sum(len(group.rollouts[0].calls[0].prompt) for group in groups)
    # The first token's logits come from the prefill; each further one needs a row of a decoding step.
    decoding = [sum(len(call.tokens) > number for call in calls) for number in range(1, task.MAX_TOKENS)]
    parts = split_batch(batch, learner.budget, np.flatnonzero(batch.trained_counts))
    work: list[Product] = []
    for rows, head_rows in [(prefill, len(groups)), *((rows, rows) for rows in decoding if rows)]:
        work += [(rows, weight, 1, False) for layer in layers for weight in layer]
        work.append((head_rows, decoder.head, 1, False))
    for part in parts:
        work += trained_products(part, layers, decoder.head)
    return seconds_of(work, learner.policy.dtype)


def trained_products(part: Any, layers: list[tuple[Any, ...]], head: Any, forwards: int = 1) -> list[Product]:
    """Of a micro-batch that is learned from."""
    nodes, predicting = len(part.tree.tokens), len(part.rows)
    work: list[Product] = [(predicting, head, forwards, True)]
    for layer in layers:
        for weight in layer:
            # The last layer's output matters at predicting tokens alone, but for keys and values.
            rows = predicting if layer is layers[-1] and weight is not layer[0] else nodes
            work.append((rows, weight, forwards, True))
    return work


def seconds_of(work: list[Product], dtype: Any) -> Figures:
    """How long matrix products take alone, one after the other, on random numbers that are there before."""
    import torch

    shapes = {(rows, width) for rows, weight, _, _ in work for width in weight.shape}
    inputs = {shape: torch.randn(shape).to(dtype) for shape in shapes}

    def product(rows: int, weight: torch.Tensor, forwards: int, backward: bool) -> None:
        x = inputs[rows, weight.shape[1]]
        for _ in range(forwards):
            x @ weight.T
        if backward:
            upstream = inputs[rows, weight.shape[0]]
            upstream @ weight
            upstream.T @ x

    with torch.no_grad():
        for one in {(one[0], one[1].shape): one for one in work}.values():
            product(*one)  # each shape once to warm up
        began = time.perf_counter(), time.process_time()
        for one in work:
            product(*one)
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
    return {"matmul_wall": wall, "matmul_cpu": cpu}


class Peer:
    """A process that does a step when it is asked."""

    def __init__(self, command: list[str], threads: int, log: Path) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"HF_HUB_OFFLINE": "1"}
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )
        self._until("READY")

    def step(self) -> Figures:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        figures: Figures = json.loads(self._until("STEP "))
        self._until("READY")
        return figures

    def _until(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
        said = "\n".join(self.log.read_text().splitlines()[-15:])
        raise SystemExit(f"{' '.join(self.process.args)} ended:\n{said}")  # type: ignore[arg-type]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def in_turns(model: str, trl_python: Path, threads: int, rounds: int, folder: Path) -> dict[str, list[Figures]]:
    """Steps of both, one after the other, after a step of each that doesn't count."""
    commands = {
        "strop": [sys.executable, __file__, "--worker", "--model", model],
        "trl": [str(trl_python), str(HERE / "peers" / "trl_grpo.py"), "--model", model, "--threads", str(threads)],
    }
    peers = {name: Peer(command, threads, folder / f"{name}-{threads}.log") for name, command in commands.items()}
    taken: dict[str, list[Figures]] = {name: [] for name in peers}
    try:
        for number in range(rounds + 1):
            for name, peer in peers.items():
                figures = peer.step()
                if number:
                    taken[name].append(figures)
                    numbers = ", ".join(f"{key} {value:.2f}" for key, value in figures.items())
                    say(f"  {threads} thread{'s' * (threads > 1)}, round {number}, {name:5} {numbers}")
    finally:
        for peer in peers.values():
            peer.close()
    return taken


def spread(name: str, values: list[float]) -> Figures:
    return {name: round(median(values), 3), f"{name}_min": round(min(values), 3), f"{name}_max": round(max(values), 3)}


def ratios(over: list[Figures], above: str, under: list[Figures], below: str) -> list[float]:
    return [first[above] / second[below] for first, second in zip(over, under, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="start model, or a local folder")
    parser.add_argument("--trl-python", type=Path, default=HERE.parent / ".peers" / "trl" / "bin" / "python")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each that count, for each number of threads")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from strop.models.load import resolve_model

    if asked.worker:
        asyncio.run(strop_turns(asked.model))
        return
    if not asked.trl_python.exists():
        raise SystemExit(f"TRL is not installed at {asked.trl_python}: run `make bench-peers`, or name --trl-python.")
    model = resolve_model(asked.model)
    with tempfile.TemporaryDirectory() as folder:
        one = in_turns(model, asked.trl_python, 1, asked.rounds, Path(folder))
        two = in_turns(model, asked.trl_python, 2, asked.rounds, Path(folder))
    report(one, two)


def report(one: dict[str, list[Figures]], two: dict[str, list[Figures]]) -> None:
    """The table for people, and the line for programs."""
    result = spread("steps_vs_trl", ratios(one["trl"], "cpu", one["strop"], "cpu"))
    result |= spread("times_matmul_limit", ratios(one["strop"], "cpu", one["strop"], "matmul_cpu"))
    result |= spread("steps_vs_trl_wall", ratios(two["trl"], "wall", two["strop"], "wall"))
    columns: list[tuple[str, Callable[[str], str]]] = [
        ("CPU s a step, 1 thread", lambda name: f"{median(f['cpu'] for f in one[name]):.2f}"),
        ("of it sampling", lambda name: f"{median(f['sampling_cpu'] for f in one[name]):.2f}"),
        ("wall s, 2 threads", lambda name: f"{median(f['wall'] for f in two[name]):.2f}"),
        ("sampled tokens", lambda name: f"{median(f['sampled'] for f in one[name]):.0f}"),
    ]
    say(f"\n{'':24}{'strop':>10}{'TRL':>10}")
    for heading, cell in columns:
        say(f"{heading:24}{cell('strop'):>10}{cell('trl'):>10}")
    say(f"{'matrix products alone':24}{median(f['matmul_cpu'] for f in one['strop']):>10.2f}")
    say(f"{'steps for one of TRL':24}{result['steps_vs_trl']:>10.2f}   (5 asked for)")
    say(f"{'times the matmul limit':24}{result['times_matmul_limit']:>10.2f}   (3 allowed)")
    say("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
