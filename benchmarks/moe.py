"""Forward and backward of a mixture-of-experts model beside a dense model with the same active parameters.

Qwen3-MoE with 32 experts, four of which compute a token, and Qwen3 whose MLP is as wide as four experts: the same
attention, depth and vocabulary. Both go through the learner on 2,048 tokens, in turns (A B A B), by CPU seconds of one
thread. The dense model goes through its own forward, as every model with experts does, and through strop's fused pass,
which knows dense families alone. Keep the machine otherwise idle.

    python benchmarks/moe.py [--rounds 5] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch
import transformers

from strop.learning import Batch, EmbeddedLearner, make_loss
from strop.models.policy import Policy, fastest_dtype

EXPERTS, PER_TOKEN, WIDTH = 32, 4, 512
COMMON = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
SEQUENCES, LENGTH = 8, 257  # the last token of each is only predicted: 2,048 are computed
LOSS = make_loss([{"name": "reinforce"}])


def learner(kind: str, dtype: torch.dtype) -> EmbeddedLearner:
    """A learner over a random model: "moe", "dense" (its own forward) or "fused"."""
    torch.manual_seed(0)
    if kind == "moe":
        config = transformers.Qwen3MoeConfig(
            **COMMON,
            num_experts=EXPERTS,
            num_experts_per_tok=PER_TOKEN,
            moe_intermediate_size=WIDTH,
            norm_topk_prob=True,
        )
    else:
        config = transformers.Qwen3Config(**COMMON, intermediate_size=PER_TOKEN * WIDTH)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return EmbeddedLearner(Policy(model, dtype=dtype, fused=kind != "dense"), None)


def batch() -> Batch:
    """Random sequences without a common prefix, every token of which is trained but the first."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, COMMON["vocab_size"], SEQUENCES * LENGTH).astype(np.int32)
    mask = np.arange(len(tokens)) % LENGTH > 0
    return Batch(
        tokens=tokens,
        mask=mask,
        advantages=mask.astype(np.float32),
        sampler_logprobs=np.where(mask, -8.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        lengths=np.full(SEQUENCES, LENGTH),
        groups=np.arange(SEQUENCES),
        rollouts=tuple(map(str, range(SEQUENCES))),
    )


def ratio(times: dict[str, list[float]], peer: str) -> str:
    """Median of the turns' ratios, and their range."""
    found = [moe / dense for moe, dense in zip(times["moe"], times[peer], strict=True)]
    return f"{median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype) if options.dtype else fastest_dtype()
    learners = {kind: learner(kind, dtype) for kind in ("moe", "dense", "fused")}
    given = batch()
    times: dict[str, list[float]] = {kind: [] for kind in learners}
    for turn in range(options.rounds + 1):
        for kind, one in learners.items():
            began = time.process_time()
            metrics = one.forward_backward(given, LOSS)
            seconds = time.process_time() - began
            one.masters.gradient.zero_()
            assert metrics["tokens_computed"] == SEQUENCES * (LENGTH - 1)
            if turn:  # the first one warms up
                times[kind].append(seconds)
    active = sum(w.tensor.numel() for w in learners["dense"].policy.weights)
    whole = sum(w.tensor.numel() for w in learners["moe"].policy.weights)
    print(f"{whole / 1e6:.0f} million parameters, {active / 1e6:.0f} million active, {dtype}, one thread, 2,048 tokens")
    for kind, seconds in times.items():
        print(f"{kind:6} {median(seconds):.3f} CPU seconds [{min(seconds):.3f}, {max(seconds):.3f}]")
    print("RESULT")
    print(f"moe_vs_dense {ratio(times, 'dense')}")
    print(f"moe_vs_fused_dense {ratio(times, 'fused')}")


if __name__ == "__main__":
    main()
