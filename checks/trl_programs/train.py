"""TRL's trainers for ten optimizer steps in fp32. Runs in TRL's environment; `checks/trl_equivalence.py` starts it.

Writes, for every step, the batch as TRL's loss gets it and the loss that it gives, and at the end the weights.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)


def rewards(completion_ids: list[list[int]], **rest: Any) -> list[float]:
    """How many even tokens an answer has: a reward that varies, whatever a random model says."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


TRAINERS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {}),
    "dpo": (DPOTrainer, DPOConfig, {"loss_type": ["sigmoid"], "beta": 0.1}),
    "ipo": (DPOTrainer, DPOConfig, {"loss_type": ["ipo"], "beta": 0.1}),
    "kto": (KTOTrainer, KTOConfig, {"beta": 0.1}),
    "reward": (RewardTrainer, RewardConfig, {}),
    "grpo": (
        GRPOTrainer,
        GRPOConfig,
        # Every batch is trained on twice, so that the ratio leaves 1; and the KL to the reference takes part.
        {
            "beta": 0.04,
            "use_bias_correction_kl": False,  # the KL of GRPO's paper; by default TRL weighs it by the ratio
            "num_generations": 4,
            "num_iterations": 2,
            "max_completion_length": 16,
            "temperature": 1.0,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("algorithm", choices=TRAINERS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    asked = parser.parse_args()
    trainer_class, config_class, options = TRAINERS[asked.algorithm]
    extra: dict[str, Any] = {"reward_funcs": rewards} if asked.algorithm == "grpo" else {}
    trainer = trainer_class(
        model=asked.model,
        processing_class=AutoTokenizer.from_pretrained(asked.model),
        train_dataset=Dataset.from_list(json.loads(asked.rows.read_text())),
        **extra,
        args=config_class(
            output_dir=str(asked.out / "trainer"),
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            per_device_train_batch_size=asked.batch,
            gradient_accumulation_steps=1,
            learning_rate=asked.learning_rate,
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            max_steps=asked.steps,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
            **options,
        ),
    )
    steps: list[dict[str, Any]] = []
    compute_loss = trainer.compute_loss

    def kept(model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
        batch = {key: value.clone() for key, value in inputs.items() if isinstance(value, torch.Tensor)}
        loss = compute_loss(model, inputs, *arguments, **named)
        steps.append({"batch": batch, "loss": float(loss.detach())})
        return loss

    trainer.compute_loss = kept
    trainer.train()
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.save(steps, asked.out / "steps.pt")
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    save_file(weights, asked.out / "weights.safetensors")


if __name__ == "__main__":
    main()
