"""SFT and DPO steps of strop against TRL's, and against the time that torch needs for the same matrix products alone.

Sequences of 256 tokens, batch 8 (DPO: 8 pairs that share a prompt of 128 tokens), bf16, one thread. Both run as
processes of their own that take turns, a step each; CPU seconds are compared, so that other work on the machine counts
little. A DPO step of either has the reference's forward pass in it, which strop's stage makes once for each pair and
TRL in every step. The matrix products of each of strop's steps are repeated without anything else after it.

    python benchmarks/sft_dpo.py [--trl-python .peers/trl/bin/python] [--rounds 3] [--only sft]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))
import words_task as task
from grpo_step import Figures, Peer, ratios, say, seconds_of, spread, trained_products

HERE = Path(__file__).parent
#: Steps that a stage of either has data for.
STEPS = 40
Example = tuple[list[int], list[bool]]


def strop_turns(kind: str, model: str) -> None:
    """One step for every line on standard input."""
    import numpy as np
    import torch

    from strop.learning import EmbeddedLearner, make_loss, pack_demonstrations, pack_judged
    from strop.learning.microbatches import split_batch
    from strop.models.load import load_model
    from strop.models.policy import Policy

    torch.set_num_threads(1)
    loaded = load_model(model)
    masters = {name: parameter.detach().clone() for name, parameter in loaded.model.named_parameters()}
    learner = EmbeddedLearner(Policy(loaded.model, dtype=torch.bfloat16), loaded.tokenizer, masters=masters)
    loss = make_loss([{"name": "cross_entropy" if kind == "sft" else "dpo"}])

    def encoded(prompt: str, text: str) -> Example:
        first, second = (loaded.tokenizer.encode(part, add_special_tokens=False) for part in (prompt, text))
        tokens = [*first, *second, loaded.tokenizer.eos_token_id]
        return tokens, [place >= max(len(first), 1) for place in range(len(tokens))]

    if kind == "sft":
        rows = [encoded("", row["text"]) for row in task.sft_rows(loaded.tokenizer, STEPS)]
    else:
        rows = [
            encoded(row["prompt"], row[name])
            for row in task.dpo_rows(loaded.tokenizer, STEPS)
            for name in ("chosen", "rejected")
        ]
    size = task.BATCH * (1 if kind == "sft" else 2)
    thread = ThreadPoolExecutor(1)  # a run computes beside its event loop, too
    for step in range(STEPS):
        say("READY")
        if not sys.stdin.readline():
            return
        began = time.perf_counter(), time.process_time()
        part = rows[step * size : (step + 1) * size]
        if kind == "sft":
            batch = pack_demonstrations(part)
        else:
            batch = pack_judged([(row, (1.0, -1.0)[n % 2], n // 2) for n, row in enumerate(part)])
            batch = batch.with_extras(reference_logprobs=learner.logprobs(batch))
        thread.submit(learner.forward_backward, batch, loss).result()
        thread.submit(learner.step, task.LEARNING_RATE).result()
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        figures = {"wall": wall, "cpu": cpu, "tokens": float(len(batch.tokens))}
        parts = split_batch(batch, learner.budget, np.flatnonzero(batch.trained_counts))
        say("STEP " + json.dumps(figures | matmul_alone(parts, learner, passes=1 if kind == "sft" else 2)))


def matmul_alone(parts: list[Any], learner: Any, passes: int) -> Figures:
    """Seconds for the matrix products of linear layers that the step can't do without, on random numbers.

    Args:
        parts: the step's micro-batches.
        learner: whose weights they are.
        passes: forward passes, of which one has a backward pass.
    """
    decoder = learner.policy.decoder
    layers = [(layer.qkv, layer.out, layer.gate_up, layer.down) for layer in decoder.layers]
    work = [product for part in parts for product in trained_products(part, layers, decoder.head, passes)]
    return seconds_of(work, learner.policy.dtype)


def in_turns(kind: str, model: str, trl_python: Path, rounds: int, folder: Path) -> dict[str, list[Figures]]:
    """Steps of both, one after the other, after a step of each that doesn't count."""
    commands = {
        "strop": [sys.executable, __file__, "--worker", kind, "--model", model],
        "trl": [str(trl_python), str(HERE / "peers" / "trl_sft_dpo.py"), kind, "--model", model, "--threads", "1"],
    }
    peers = {name: Peer(command, 1, folder / f"{name}-{kind}.log") for name, command in commands.items()}
    taken: dict[str, list[Figures]] = {name: [] for name in peers}
    try:
        for number in range(rounds + 1):
            for name, peer in peers.items():
                figures = peer.step()
                if number:
                    taken[name].append(figures)
                    numbers = ", ".join(f"{key} {value:.2f}" for key, value in figures.items())
                    say(f"  {kind}, round {number}, {name:5} {numbers}")
    finally:
        for peer in peers.values():
            peer.close()
    tokens = {name: {figures["tokens"] for figures in steps} for name, steps in taken.items()}
    if tokens["strop"] != tokens["trl"]:
        raise SystemExit(f"the two trained on other numbers of tokens: {tokens}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="start model, or a local folder")
    parser.add_argument("--trl-python", type=Path, default=HERE.parent / ".peers" / "trl" / "bin" / "python")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each that count")
    parser.add_argument("--only", choices=("sft", "dpo"), help="one of the two")
    parser.add_argument("--worker", choices=("sft", "dpo"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    from strop.models.load import resolve_model

    if asked.worker:
        strop_turns(asked.worker, asked.model)
        return
    if not asked.trl_python.exists():
        raise SystemExit(f"TRL is not installed at {asked.trl_python}: run `make bench-peers`, or name --trl-python.")
    model = resolve_model(asked.model)
    result: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in [asked.only] if asked.only else ["sft", "dpo"]:
            taken = in_turns(kind, model, asked.trl_python, asked.rounds, Path(folder))
            ours, theirs = taken["strop"], taken["trl"]
            result |= spread(f"{kind}_vs_trl", ratios(theirs, "cpu", ours, "cpu"))
            result |= spread(f"{kind}_times_matmul_limit", ratios(ours, "cpu", ours, "matmul_cpu"))
            speeds = [median(f["tokens"] / f[key] for f in some) for some, key in
                      ((ours, "cpu"), (theirs, "cpu"), (ours, "matmul_cpu"))]  # fmt: skip
            say(
                f"{kind}: {speeds[0]:.0f} tokens per second, TRL {speeds[1]:.0f}, matrix products alone {speeds[2]:.0f}; "
                f"{result[f'{kind}_vs_trl']:.2f} times TRL (4 asked for), "
                f"{result[f'{kind}_times_matmul_limit']:.2f} times the matmul limit (2 allowed)"
            )
    say("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
