"""TRL's GRPOTrainer, one optimizer step for every line on standard input. Runs in an environment of its own.

Eight prompts, eight completions of at most 32 new tokens, bf16, no reference model: `benchmarks/grpo_step.py` starts
it and takes the figures from lines that begin with STEP.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from typing import Any

import numbers_task as task
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Turns(TrainerCallback):
    """Waits for its turn before a step, and reports the step's seconds and tokens after it."""

    def __init__(self) -> None:
        self.sampled = 0
        self.sampling = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        sys.stdout.write("READY\n")
        sys.stdout.flush()
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.sampled, self.sampling = 0, 0.0
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        wall, cpu = time.perf_counter() - self.began[0], time.process_time() - self.began[1]
        figures = {"wall": wall, "cpu": cpu, "sampling_cpu": self.sampling, "sampled": self.sampled}
        sys.stdout.write("STEP " + json.dumps(figures) + "\n")
        sys.stdout.flush()


def rewards(completions: list[Any], **rest: Any) -> list[float]:
    return [task.reward(completion[0]["content"]) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--micro", type=int, default=16, help="completions in one backward pass")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    questions = [{"prompt": [{"role": "user", "content": text}]} for text in task.prompts(4096)]
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=asked.model,
            processing_class=AutoTokenizer.from_pretrained(asked.model),
            reward_funcs=rewards,
            train_dataset=Dataset.from_list(questions),
            callbacks=[turns],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=True,
                model_init_kwargs={"dtype": "bfloat16"},
                per_device_train_batch_size=asked.micro,
                gradient_accumulation_steps=task.PROMPTS * task.COMPLETIONS // asked.micro,
                num_generations=task.COMPLETIONS,
                max_completion_length=task.MAX_TOKENS,
                temperature=1.0,
                beta=0.0,
                learning_rate=task.LEARNING_RATE,
                lr_scheduler_type="constant",
                max_steps=10_000,
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        generate = trainer._generate

        def counted(*arguments: Any, **options: Any) -> Any:
            began = time.process_time()
            made = generate(*arguments, **options)
            turns.sampling += time.process_time() - began
            turns.sampled += sum(map(len, made[1]))
            return made

        trainer._generate = counted
        trainer.train()


if __name__ == "__main__":
    main()
