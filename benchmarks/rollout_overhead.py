"""What an attempt costs outside model and tools: collector, conversation, rendering, environment, scoring, records.

The sampler here answers at once, so every CPU second that is left belongs to the loop. Attempts go through the real
collector into a real run directory, 2,000 in flight at a time, 20,000 of each kind: single replies (arithmetic) and
attempts of two turns with a tool call in between (shopkeeper). The two kinds take turns; figures are CPU milliseconds
of this process for an attempt, median over the turns. Memory is the growth of resident memory from the first turn of
each kind to the last.

    python benchmarks/rollout_overhead.py [--model smollm2] [--rounds 5] [--attempts 20000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from strop.agents import Agent, SingleReply, ToolLoop
from strop.agents.attempts import AttemptRunner
from strop.config import CollectSettings, parse_recipe
from strop.environments import Environment, load_environment
from strop.models.load import resolve_model
from strop.rollouts import FinishReason, Scored
from strop.runs.run import Run
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import Sample, SamplingParams
from strop.training.collector import Collector

IN_FLIGHT, GROUP_SIZE = 2000, 8
RECIPE = {
    "name": "overhead",
    "environment": {"name": "arithmetic"},
    "stages": [{"kind": "rl", "name": "rl", "steps": 1, "schedule": {"learning_rate": 1e-5}}],
}
CALL = '<tool_call>{"name": "lookup", "arguments": {"item": "lamp", "field": "price"}}</tool_call><|im_end|>'
ANSWER = "It is 85 dollars.<|im_end|>"


class InstantSampler:
    """Answers at once: a tool call where one is wanted and none was made yet, else a short answer."""

    version, max_context = 0, 8192

    def __init__(self, tokenizer: Any, calls_a_tool: bool) -> None:
        self.call, self.answer, self.result_end = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (CALL, ANSWER, "</tool_response><|im_end|>\n<|im_start|>assistant\n")
        )
        self.calls_a_tool = calls_a_tool
        self.waiting = self.most_waiting = 0

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await asyncio.sleep(0)  # everyone else who can ask, asks now
        self.waiting -= 1
        first = self.calls_a_tool and list(prompt[-len(self.result_end) :]) != self.result_end
        tokens = list(self.call if first else self.answer)
        return Sample(tokens, [-0.5] * len(tokens), [0] * len(tokens), FinishReason.STOP)

    async def close(self) -> None:
        pass


class Kind:
    """One kind of attempt, and what is needed to make thousands of it."""

    def __init__(self, environment: Environment, agent: Agent, tokenizer: Any, turns: int) -> None:
        self.environment, self.agent, self.turns = environment, agent, turns
        self.sampler = InstantSampler(tokenizer, calls_a_tool=turns == 2)
        self.renderer = renderer_for(tokenizer, "smollm2")
        self.tasks = environment.tasks("train")

    async def collect(self, run: Run, stage: str, attempts: int) -> float:
        """CPU seconds for `attempts` attempts, from asking for them to having them on disk."""
        runner = AttemptRunner(
            environment=self.environment,
            agent=self.agent,
            sampler=self.sampler,
            renderer=self.renderer,
            params=SamplingParams(max_tokens=64),
            seconds=600.0,
            ledger=run.ledger,
            clock=lambda: run.clock,
        )
        groups = IN_FLIGHT // GROUP_SIZE
        settings = CollectSettings(groups=groups, group_size=GROUP_SIZE, in_flight=IN_FLIGHT)
        made, began = 0, time.process_time()
        async with Collector(
            run, stage, lambda number, _: (self.tasks[number % len(self.tasks)], runner), settings, seed=0
        ) as collector:
            for step in range(attempts // IN_FLIGHT):
                for group in await collector.next_batch(step):
                    for rollout in group.rollouts:
                        assert isinstance(rollout.ending, Scored) and len(rollout.calls) == self.turns, rollout.ending
                        made += 1
                collector.stepped(step)
        assert made == attempts, f"{made} of {attempts} attempts came out"
        return time.process_time() - began


def resident_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="whose tokenizer is used: a start model, folder or hub name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--attempts", type=int, default=20_000, help="of each kind, over all rounds")
    asked = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(asked.model))
    kinds = {
        "single_turn_ms": Kind(load_environment("arithmetic"), SingleReply(), tokenizer, turns=1),
        "two_turn_tool_ms": Kind(load_environment("shopkeeper"), ToolLoop(), tokenizer, turns=2),
    }
    per_round = max(IN_FLIGHT, asked.attempts // asked.rounds // IN_FLIGHT * IN_FLIGHT)
    milliseconds: dict[str, list[float]] = {name: [] for name in kinds}
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(asked.rounds):
            for name, kind in kinds.items():
                run = Run.create(Path(folder) / f"{turn}-{name}", parse_recipe(RECIPE))
                seconds = asyncio.run(kind.collect(run, "rl", per_round))
                milliseconds[name].append(1000 * seconds / per_round)
                run.close()
            memory.append(resident_mb())
            print(f"round {turn + 1}: " + ", ".join(f"{name} {times[-1]:.3f}" for name, times in milliseconds.items()))
    result: dict[str, float] = {}
    for name, times in milliseconds.items():
        result |= {
            name: round(median(times), 4),
            f"{name}_min": round(min(times), 4),
            f"{name}_max": round(max(times), 4),
        }
    in_flight = [kind.sampler.most_waiting for kind in kinds.values()]
    growth = [memory[-1] - memory[0], *(later - sooner for sooner, later in pairwise(memory))]
    result |= {"in_flight": min(in_flight), "in_flight_min": min(in_flight), "in_flight_max": max(in_flight)}
    result |= {"rss_growth_mb": round(growth[0], 2)}
    result |= {"rss_growth_mb_min": round(min(growth), 2), "rss_growth_mb_max": round(max(growth), 2)}
    print(f"\n{per_round * asked.rounds} attempts of each kind, {min(in_flight)} in flight, CPU ms an attempt (bound)")
    print(f"  single reply        {result['single_turn_ms']:.3f}   (0.5)")
    print(f"  two turns, a tool   {result['two_turn_tool_ms']:.3f}   (1.0)")
    print(f"  memory              {result['rss_growth_mb']:+.1f} MB from the first round to the last")
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
