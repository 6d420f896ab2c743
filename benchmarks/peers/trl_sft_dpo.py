"""TRL's SFTTrainer or DPOTrainer, one optimizer step for every line on standard input. Runs in an environment of its
own: `benchmarks/sft_dpo.py` starts it and takes the figures from lines that begin with STEP.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import torch
import words_task as task
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

STEPS = 40


class Turns(TrainerCallback):
    """Waits for its turn before a step, and reports the step's seconds after it."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        sys.stdout.write("READY\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.tokens = 0
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        sys.stdout.write("STEP " + json.dumps({"wall": wall, "cpu": cpu, "tokens": self.tokens}) + "\n")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("sft", "dpo"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    trainer_class, config_class = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}[asked.kind]
    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    rows = {"sft": task.sft_rows, "dpo": task.dpo_rows}[asked.kind](tokenizer, STEPS)
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            model=asked.model,
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            callbacks=[turns],
            args=config_class(
                output_dir=folder,
                use_cpu=True,
                bf16=True,
                model_init_kwargs={"dtype": "bfloat16"},
                per_device_train_batch_size=task.BATCH,
                gradient_accumulation_steps=1,
                max_length=task.LENGTH,
                learning_rate=task.LEARNING_RATE,
                lr_scheduler_type="constant",
                max_steps=STEPS,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        compute_loss = trainer.compute_loss

        def counted(model: Any, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
            turns.tokens += inputs["input_ids"].numel()
            return compute_loss(model, inputs, *arguments, **options)

        trainer.compute_loss = counted
        trainer.train()


if __name__ == "__main__":
    main()
