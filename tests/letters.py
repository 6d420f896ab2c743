"""An environment for whole runs of a tiny model: any text scores, and a child process does the scoring, so that it can be killed."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Sequence

from strop.environments.environment import Demonstration, Environment, Session
from strop.errors import AttemptError
from strop.rollouts import FailureKind, Rollout, Scored, Task, final_text

#: Reads a text in hex, answers with the share of even characters: a score that a random model has some variance in.
SCORER = (
    "import sys\n"
    "for line in sys.stdin:\n"
    "    text = bytes.fromhex(line.strip())\n"
    "    print(sum(c % 2 == 0 for c in text) / max(1, len(text)), flush=True)\n"
)


class Letters(Environment):
    """Say anything; even characters are good ones.

    Args:
        train_tasks, test_tasks: size of the splits.
        delay: longest pause before an attempt begins, in seconds; drawn anew every time, so that orders differ.
    """

    name = "letters"

    def __init__(self, train_tasks: int = 40, test_tasks: int = 8, delay: float = 0.004) -> None:
        self.sizes, self.delay = {"train": train_tasks, "test": test_tasks}, delay
        self.scorer: subprocess.Popen[bytes] | None = None
        self.turn = asyncio.Lock()

    def tasks(self, split: str) -> Sequence[Task]:
        """Numbered ones."""
        return [
            Task(
                f"{split}-{n}",
                self.name,
                ({"role": "user", "content": f"{split} {n}: say something"},),
                labels={"digit": str(n % 3)},
            )
            for n in range(self.sizes[split])
        ]

    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        """Replies of even digits."""
        tasks = self.tasks("train")
        made = []
        for number in range(count):
            task, reply = tasks[number % len(tasks)], "".join(rng.choices("02468", k=6))
            made.append(Demonstration(task, (*task.messages, {"role": "assistant", "content": reply})))
        return made

    async def start(self, task: Task, seed: int) -> Session:
        """Somewhat later."""
        await asyncio.sleep(random.random() * self.delay)
        return Session(self, task, seed)

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        """Ask the child; one that died is replaced, and what it was asked is a failure of the system."""
        async with self.turn:
            try:
                await asyncio.to_thread(self._have_scorer)
                return Scored(await asyncio.to_thread(self._ask, final_text(rollout.transcript)))
            except (OSError, ValueError) as error:
                raise AttemptError(FailureKind.SCORER, f"the scoring process died ({error})") from error

    def _have_scorer(self) -> None:
        if self.scorer is None or self.scorer.poll() is not None:
            command = [sys.executable, "-S", "-E", "-c", SCORER]
            self.scorer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _ask(self, text: str) -> float:
        assert self.scorer and self.scorer.stdin and self.scorer.stdout
        self.scorer.stdin.write(text.encode().hex().encode() + b"\n")
        self.scorer.stdin.flush()
        return float(self.scorer.stdout.readline())
