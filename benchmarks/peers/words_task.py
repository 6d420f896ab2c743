"""Texts of a given number of tokens: words that are one token each. For `benchmarks/sft_dpo.py` and its peer."""

from __future__ import annotations

import random
from typing import Any

LENGTH, BATCH, PROMPT = 256, 8, 128
LEARNING_RATE = 1e-6


def words(tokenizer: Any) -> list[str]:
    """English words that are, with the space before them, one token."""
    found = [
        text[1:]
        for text in tokenizer.get_vocab()
        if text.startswith("Ġ") and text[1:].isalpha() and text[1:].isascii() and len(text) > 4
    ]
    return sorted(found)[:4000]


def text(rng: random.Random, known: list[str], count: int) -> str:
    """So many words, each after a space."""
    return "".join(f" {word}" for word in rng.choices(known, k=count))


def sft_rows(tokenizer: Any, steps: int) -> list[dict[str, str]]:
    """Texts that are LENGTH tokens with the end of text."""
    rng, known = random.Random(0), words(tokenizer)
    return [{"text": text(rng, known, LENGTH - 1)} for _ in range(steps * BATCH)]


def dpo_rows(tokenizer: Any, steps: int) -> list[dict[str, str]]:
    """Prompts of PROMPT tokens, with two answers that fill up LENGTH."""
    rng, known = random.Random(1), words(tokenizer)
    lengths = {"prompt": PROMPT, "chosen": LENGTH - PROMPT - 1, "rejected": LENGTH - PROMPT - 1}
    return [{name: text(rng, known, count) for name, count in lengths.items()} for _ in range(steps * BATCH)]
