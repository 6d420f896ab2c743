"""Ten optimizer steps of strop beside TRL's, on the same tokens, model and seeds in fp32: losses and weights.

    python checks/trl_equivalence.py [--trl-python .peers/trl/bin/python] [--model FOLDER] [--only dpo ipo]

TRL trains first, from text, in an environment of its own (`make bench-peers` sets it up), and keeps each batch as its
loss gets it. strop then trains on these tokens and masks: reference log-probabilities, KTO's baseline, the ratio and
the rest are its own. Without --model it is a small random Llama with the start model's tokenizer, for which every
algorithm takes seconds.

The padding token of that model is one that no text has. transformers never learns the looked-up embedding of the token
whose id is the configuration's `pad_token_id`; for the start model that is the end of turn, which stands in every prompt,
so TRL leaves a part of the gradient out there and strop, by the formula, does not.

What is compared: the loss of every step (largest difference), and after the last step every weight tensor (largest
norm of a difference over the tensor's norm). What isn't, because the two mean different things by it: which tokens
of a conversation are learnt. TRL's completion mask has the newline after the end of turn, which the model never
samples; strop leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from strop.learning import Batch, EmbeddedLearner, make_loss, pack_demonstrations, pack_judged
from strop.models.load import load_model, resolve_model
from strop.models.policy import Policy
from strop.models.reward import reward_model

HERE = Path(__file__).parent
STEPS, BATCH, RATE = 10, 4, 1e-5
LOSSES: dict[str, list[dict[str, Any]]] = {
    "sft": [{"name": "cross_entropy"}],
    "dpo": [{"name": "dpo", "beta": 0.1}],
    "ipo": [{"name": "ipo", "beta": 0.1}],
    "kto": [{"name": "kto", "beta": 0.1}],
    "reward": [{"name": "bradley_terry"}],
    "grpo": [{"name": "ppo_clip"}, {"name": "kl", "weight": 0.04}],
}
WORDS = ["sun", "moon", "rain", "wind", "tree", "river", "stone", "bird", "fish", "cloud", "hill", "road", "lamp"]
Sequence = tuple[list[int], list[bool]]


def rows_of(algorithm: str) -> list[dict[str, Any]]:
    """Conversations about nothing, of unequal lengths, in the form that TRL takes."""
    rng = random.Random(f"{algorithm}, the same words in every run")

    def said(role: str, most: int) -> list[dict[str, str]]:
        return [{"role": role, "content": " ".join(rng.choices(WORDS, k=rng.randint(2, most)))}]

    rows = []
    for number in range(STEPS * BATCH):
        prompt = said("user", 12)
        match algorithm:
            case "sft":
                rows.append({"prompt": prompt, "completion": said("assistant", 20)})
            case "kto":
                rows.append({"prompt": prompt, "completion": said("assistant", 20), "label": number % 3 > 0})
            case "grpo":
                rows.append({"prompt": prompt})
            case _:
                rows.append({"prompt": prompt, "chosen": said("assistant", 20), "rejected": said("assistant", 20)})
    return rows


def small_model(folder: Path) -> Path:
    """A random Llama of four layers under the start model's tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.unk_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- TRL's batches as strop's ---------------------------------------------------------------------------------------


def sequences(ids: torch.Tensor, attended: torch.Tensor, learnt: torch.Tensor) -> list[Sequence]:
    """Rows of padded tensors, without the padding."""
    found = []
    for row, there, mask in zip(ids, attended.bool(), learnt.bool(), strict=True):
        found.append((row[there].tolist(), mask[there].tolist()))
    return found


def batch_of(algorithm: str, given: dict[str, torch.Tensor], learner: EmbeddedLearner, first: EmbeddedLearner) -> Batch:
    """What strop trains on: TRL's tokens and masks; everything that a model computes is strop's own."""
    if algorithm == "grpo":
        return grpo_batch(given, learner)
    attended = given["attention_mask"] if "attention_mask" in given else torch.ones_like(given["input_ids"])
    learnt = given.get("completion_mask", given["labels"] != -100 if "labels" in given else attended)
    rows = sequences(given["input_ids"], attended, learnt)
    if algorithm == "sft":
        return pack_demonstrations(rows)
    if algorithm == "kto":
        signs = [1.0 if good else -1.0 for good in given["label"]]
        batch = pack_judged([(row, sign, n) for n, (row, sign) in enumerate(zip(rows, signs, strict=True))])
        other = sequences(given["KL_input_ids"], given["KL_attention_mask"], given["KL_completion_mask"])
        others = pack_demonstrations(other)
        gained = (learner.logprobs(others) - first.logprobs(others)).sum(dtype=np.float64) / len(other)
        baseline = np.full(len(batch.tokens), max(0.0, gained), dtype=np.float32)
        return batch.with_extras(kl_baseline=baseline)
    if algorithm == "reward":  # the value is read before a token that nobody reads
        rows = [([*tokens, 0], [False] * len(tokens) + [True]) for tokens, _ in rows]
    pairs = len(rows) // 2  # TRL: all chosen, then all rejected
    return pack_judged([(row, 1.0 if n < pairs else -1.0, n % pairs) for n, row in enumerate(rows)])


def grpo_batch(given: dict[str, torch.Tensor], learner: EmbeddedLearner) -> Batch:
    prompts, answers = given["prompt_mask"].bool(), given["completion_mask"].bool()
    ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
    rows = sequences(ids, torch.cat([prompts, answers], 1), torch.cat([torch.zeros_like(prompts), answers], 1))
    advantages = given["advantages"].tolist()
    batch = pack_judged([(row, value, n) for n, (row, value) in enumerate(zip(rows, advantages, strict=True))])
    if "old_per_token_logps" in given:
        old = batch.mask.astype(np.float32)
        old[batch.mask] = torch.cat([o[a] for o, a in zip(given["old_per_token_logps"], answers, strict=True)]).numpy()
    else:
        old = learner.logprobs(batch)
    return Batch(**{**vars(batch), "sampler_logprobs": old})


# -- both, and their difference -------------------------------------------------------------------------------------


def learner_of(algorithm: str, folder: str) -> EmbeddedLearner:
    if algorithm == "reward":
        from transformers import AutoModelForSequenceClassification

        model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    else:
        model = load_model(folder).model
    return EmbeddedLearner(Policy(model, dtype=torch.float32), None)


def compare(algorithm: str, model: str, python: Path, folder: Path) -> dict[str, float]:
    """Train with both."""
    if algorithm == "reward":
        model = reward_folder(model, folder / "judge")
    (folder / "rows.json").write_text(json.dumps(rows_of(algorithm)))
    command = [str(python), str(HERE / "trl_programs" / "train.py"), algorithm, "--model", model]
    command += ["--rows", str(folder / "rows.json"), "--out", str(folder), "--steps", str(STEPS)]
    command += ["--batch", str(BATCH), "--learning-rate", str(RATE)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"TRL ended with {ended.returncode}:\n{ended.stderr[-3000:]}")
    steps = torch.load(folder / "steps.pt", weights_only=True)
    learner, first, loss = learner_of(algorithm, model), learner_of(algorithm, model), make_loss(LOSSES[algorithm])
    before = {name: value.clone() for name, value in learner.masters.named_values().items()}
    apart = []
    for step in steps:
        batch = batch_of(algorithm, step["batch"], learner, first)
        if "reference_logprobs" in loss.needs:
            batch = batch.with_extras(reference_logprobs=first.logprobs(batch))
        apart.append(abs(learner.forward_backward(batch, loss)["loss"] - step["loss"]))
        learner.step(RATE)
    theirs, ours = load_file(folder / "weights.safetensors"), learner.masters.named_values()
    if theirs.keys() != ours.keys():
        raise SystemExit(f"{algorithm}: the two trained other weights: {sorted(theirs.keys() ^ ours.keys())[:4]}")
    norm = torch.linalg.vector_norm
    moved = sum(float(norm(ours[name] - before[name])) ** 2 for name in ours) ** 0.5
    between = sum(float(norm(ours[name] - theirs[name])) ** 2 for name in ours) ** 0.5
    return {
        "steps": len(steps),
        "max_loss_diff": max(apart),
        "max_weight_rel_diff": max(float(norm(ours[n] - theirs[n]) / norm(theirs[n])) for n in ours),
        "share_of_the_way": between / moved,
    }


def reward_folder(model: str, folder: Path) -> str:
    """A reward model of the policy, which both begin with."""
    loaded = load_model(model)
    made = reward_model(loaded.model, loaded.tokenizer, dict(loaded.model.named_parameters()), seed=0)
    made.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trl-python", type=Path, default=HERE.parent / ".peers" / "trl" / "bin" / "python")
    parser.add_argument("--model", help="a folder or start model; default a small random one")
    parser.add_argument("--only", nargs="*", choices=LOSSES, default=list(LOSSES))
    asked = parser.parse_args()
    if not asked.trl_python.exists():
        raise SystemExit(f"TRL is not installed at {asked.trl_python}: run `make bench-peers`, or name --trl-python.")
    failed, result = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        model = resolve_model(asked.model) if asked.model else str(small_model(Path(scratch) / "model"))
        print(f"{'':8}{'steps':>6}{'loss, largest diff':>20}{'weights, relative':>20}{'of the way moved':>20}")
        for algorithm in asked.only:
            place = Path(scratch) / algorithm
            place.mkdir()
            found = result[algorithm] = compare(algorithm, model, asked.trl_python, place)
            same = found["max_loss_diff"] <= 1e-4 and found["max_weight_rel_diff"] <= 1e-5
            failed += [] if same else [algorithm]
            figures = [f"{found[key]:.2e}" for key in ("max_loss_diff", "max_weight_rel_diff", "share_of_the_way")]
            print(f"{algorithm:8}{found['steps']:>6}" + "".join(f"{figure:>20}" for figure in figures), flush=True)
    print("RESULT " + json.dumps(result))
    if failed:
        sys.exit(f"further apart than 1e-4 in loss or 1e-5 in weights: {', '.join(failed)}")


if __name__ == "__main__":
    main()
