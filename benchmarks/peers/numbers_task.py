"""The task that strop and its peers are measured on: short prompts, and a reward that differs within every group.

Nothing but the standard library, since every peer's environment imports it.
"""

from __future__ import annotations

import random

PROMPTS, COMPLETIONS, MAX_TOKENS = 8, 8, 32
#: So small that the policy stays what it was: a policy that learns to be brief would have less to do, step by step.
LEARNING_RATE = 1e-8


def prompts(count: int, seed: int = 0) -> list[str]:
    """Questions to the model."""
    draw = random.Random(seed)
    return [f"Repeat this number: {draw.randint(10, 99)}" for _ in range(count)]


def reward(completion: str) -> float:
    """Share of digits among the characters. Replies of a group seldom agree in it, so none can be left untrained."""
    characters = completion.replace(" ", "")
    return sum(character.isdigit() for character in characters) / len(characters) if characters else 0.0
