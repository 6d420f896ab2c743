"""Learning rate over the optimizer steps of a stage: warm-up, then constant, linear or cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """A learning rate for every step.

    The first step of a warm-up has a rate above 0 (a step with rate 0 would be thrown away), and the step after the
    warm-up has the whole rate. Decay reaches `final_share` of it at the last step.

    Attributes:
        learning_rate: the peak.
        steps: how many steps there are.
        kind: what follows the warm-up. Cosine as in Loshchilov & Hutter 2016, arXiv:1608.03983, eq. 5, one period.
        warmup_steps: steps of linear rise.
        final_share: share of the peak at the last step (linear and cosine).

    Raises:
        ValueError: the warm-up takes all the steps, or a number is out of range.
    """

    learning_rate: float
    steps: int
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_share: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "cosine"):
            raise ValueError(f"kind = {self.kind!r}: there are constant, linear and cosine")
        if not 0 <= self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps = {self.warmup_steps} must be below steps = {self.steps}")
        if self.learning_rate <= 0 or not 0 <= self.final_share <= 1:
            raise ValueError("learning_rate must be above 0, and final_share between 0 and 1")

    def at(self, step: int) -> float:
        """The learning rate of step 0, 1, … `steps` - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        if self.kind == "constant":
            return self.learning_rate
        done = (step - self.warmup_steps) / max(self.steps - 1 - self.warmup_steps, 1)
        left = 1 - done if self.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.learning_rate * (self.final_share + (1 - self.final_share) * left)
