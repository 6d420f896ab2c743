"""A made-up run directory: the format of a real one, numbers that were drawn and mean nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from strop.costs import Ledger, MachinePrice, summarise
from strop.rollouts import Failed, FailureKind, FinishReason, Group, Message, ModelCall, Rollout, Scored, Task
from strop.runs.events import LineLog
from strop.runs.reading import RunRecord
from strop.runs.store import write_groups
from strop.statistics import Evaluation, TaskResult

PRICE = MachinePrice(0.09, "synthetic: 2 vCPU × $0.045")


class Writer:
    """Writes the directory, with a clock of its own."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.random, self.now = path, np.random.default_rng(seed), 0.0
        (path / "rollouts").mkdir(parents=True)
        self.ledger = Ledger(lambda: self.now)
        self.log = LineLog(path / "events.jsonl")

    def event(self, kind: str, **fields: Any) -> None:
        self.log.append({"time": 1.7e9 + self.now, "clock": self.now, "kind": kind, **fields})

    def spend(self, **seconds: float) -> None:
        for activity, spent in seconds.items():
            with self.ledger.activity(activity):
                self.now += spent

    def batch(self, name: str, groups: list[tuple[Group, str]]) -> None:
        write_groups(self.path / "rollouts" / name, groups, {})
        self.event("batch", file=name, sha256="")

    def cost(self, stage: str, step: int) -> None:
        self.event("cost", stage=stage, step=step, ledger=self.ledger.snapshot())


def make_rollout(writer: Writer, group: str, member: int, task: Task, skill: float, version: int) -> Rollout:
    """One attempt with one tool call that may fail once; or one that the system failed."""
    random = writer.random
    rollout = Rollout(
        f"{group}/{member}", task.id, task.environment, member, int(random.integers(2**40)), started=writer.now
    )
    turns = int(random.integers(1, 4))
    for turn in range(turns):
        count = int(random.integers(4, 30))
        rollout.calls.append(
            ModelCall(
                parent=None if turn == 0 else turn - 1,
                prompt=[int(t) for t in random.integers(0, 1000, 40 if turn == 0 else 12)],
                tokens=[int(t) for t in random.integers(0, 1000, count)],
                logprobs=[float(x) for x in -random.exponential(0.7, count)],
                versions=[max(0, version - (turn == 0))] * count,
                finish_reason=FinishReason.LENGTH if random.random() < 0.05 else FinishReason.STOP,
                cached=0 if turn == 0 else 40,
                started=writer.now + turn,
                ended=writer.now + turn + 0.8,
            )
        )
    rollout.transcript = [dict(message) for message in task.messages]
    for turn in range(turns - 1):
        call = {"name": "lookup", "arguments": json.dumps({"city": "Synthetica", "turn": turn})}
        rollout.transcript.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": f"c{turn}", "type": "function", "function": call}],
            }
        )
        bad = turn == 0 and random.random() < 0.5
        text = "Error: the table timed out, try again." if bad else "population 12,345 <b>&amp; not markup</b>"
        result: Message = {"role": "tool", "tool_call_id": f"c{turn}", "name": "lookup", "content": text}
        rollout.transcript.append({**result, "error": "timeout"} if bad else result)
    rollout.transcript.append({"role": "assistant", "content": "The answer is 12345.\nSynthetic, of course </script>."})
    met = float(turns > 1 and random.random() < 0.6)
    rollout.ended = writer.now + turns
    rollout.seconds = {"sampler": 0.8 * turns, "tools": 0.15 * turns, "scoring": 0.05}
    if random.random() < 0.04:
        rollout.ending = Failed(FailureKind.SANDBOX, "the sandbox died (synthetic)")
    else:
        solved = bool(random.random() < skill)
        metrics = {"errors_met": met, "errors_recovered": met * solved, "tool_calls": float(turns - 1)}
        rollout.ending = Scored(float(solved) + 0.1 * met, metrics, solved)
    return rollout


def make_task(number: int, split: str) -> Task:
    messages = (
        {"role": "system", "content": "You may look things up."},
        {"role": "user", "content": f"Synthetic question {number}?"},
    )
    return Task(f"{split}-{number}", "synthetic", messages, labels={"steps": str(1 + number % 3)})


def evaluate(writer: Writer, name: str, stage: str, step: int, skill: float, tasks: int) -> None:
    with writer.ledger.within("evaluation"):
        writer.spend(sampler=20.0, scoring=1.0)
        writer.ledger.count(prompt=40 * tasks, sampled=60 * tasks)
    groups, results = [], []
    for number in range(tasks):
        task = make_task(number, "test")
        # A task has a fixed difficulty, so that two evaluations are paired as real ones are.
        hard = (number * 7919 % tasks) / tasks
        rollout = make_rollout(writer, f"evaluation-{name}-{number}", 0, task, 1.0 if hard < skill else 0.0, step)
        groups.append((Group(f"evaluation-{name}-{number}", task, [rollout], step), "evaluation"))
        if isinstance(rollout.ending, Scored):
            solved = (float(bool(rollout.ending.solved)),)
            results.append(TaskResult(task.id, f"steps {task.labels['steps']}", (rollout.ending.reward,), solved))
    writer.batch(f"evaluation-{name.replace(' ', '-')}.parquet", groups)
    found = Evaluation(name, tuple(results), {"recovery": 0.2 + 0.6 * skill, "tokens_per_attempt": 60.0})
    writer.event("evaluation", stage=stage, step=step, **found.as_record())
    writer.cost(stage, step)


def make_run(
    path: Path, *, seed: int = 0, warmup: int = 4, steps: int = 12, every: int = 4, tasks: int = 60
) -> RunRecord:
    """A finished run: start, a supervised warm-up, then RL with evaluations along it."""
    writer = Writer(path, seed)
    random = writer.random
    stages = [{"name": "warmup", "kind": "sft", "steps": warmup}, {"name": "rl", "kind": "rl", "steps": steps}]
    config = {
        "name": path.name,
        "seed": seed,
        "model": {"name": "synthetic-model"},
        "environment": {"name": "synthetic"},
        "stages": stages,
    }
    (path / "config.toml").write_text(tomli_w.dumps({**config, "versions": {"strop": "0.1.0", "python": "3.11"}}))
    writer.event("run", what="started", name=path.name, price=PRICE.as_record())
    writer.spend(setup=12.0)
    evaluate(writer, "start", "", 0, 0.05, tasks)
    writer.ledger.phase = "warmup"
    for step in range(1, warmup + 1):
        writer.spend(learner=6.0)
        writer.ledger.count(trained=900)
        writer.event(
            "step",
            stage="warmup",
            step=step - 1,
            metrics={"loss": 2.0 / step, "grad_norm": 1.0 / step, "learning_rate": 1e-4},
        )
        writer.cost("warmup", step)
    evaluate(writer, "warmup", "warmup", warmup, 0.3, tasks)
    writer.ledger.phase = "rl"
    for step in range(1, steps + 1):
        skill = 0.3 + 0.5 * step / steps
        writer.spend(sampler=14.0, tools=2.0, scoring=0.5)
        groups = []
        for number in range(4):
            task = make_task(100 * step + number, "train")
            members = [make_rollout(writer, f"rl-{step}-{number}", member, task, skill, step) for member in range(8)]
            groups.append((Group(f"rl-{step}-{number}", task, members, step), "trained" if number else "no variance"))
        writer.batch(f"rl-{step - 1:06d}.parquet", groups)
        rollouts = [rollout for group, _ in groups for rollout in group.rollouts]
        sampled = sum(rollout.sampled_tokens for rollout in rollouts)
        writer.spend(learner=9.0, weights=0.2, records=0.1)
        writer.now += 0.7
        writer.ledger.count(prompt=40 * 32, cached=500, sampled=sampled, trained=sampled)
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        metrics = {
            "reward": float(np.mean(rewards)),
            "solved": skill,
            "tokens_per_attempt": sampled / 32,
            "tokens_longest": 80.0,
            "recovery": skill * 0.9,
            "truncated": 0.05,
            "groups_without_variance": 0.25 + 0.5 * step / steps,
            "staleness_mean": 0.5 * float(random.random()),
            "staleness_max": 1.0,
            "mismatch_kl": 2e-4 * float(random.random()),
            "mismatch_max": 0.02 * float(random.random()),
            "entropy": 1.2 - 0.5 * step / steps,
            "grad_norm": 0.4 + 0.2 * float(random.random()),
            "loss": 0.01 * float(random.standard_normal()),
            "learning_rate": 1e-5,
            "failed": float(32 - len(rewards)),
        }
        writer.event("step", stage="rl", step=step - 1, metrics=metrics)
        writer.cost("rl", step)
        if step % every == 0:
            evaluate(writer, f"rl {step}" if step < steps else "rl", "rl", step, skill, tasks)
    writer.event(
        "warning", message="3 of 4 groups had no variance: they taught nothing (synthetic)", stage="rl", step=steps
    )
    writer.spend(checkpoint=3.0)
    writer.cost("rl", steps)
    (path / "summary.json").write_text(json.dumps(summarise(RunRecord(path))))
    writer.event("run", what="finished")
    writer.log.close()
    return RunRecord(path)
