"""Log-probabilities through a model's own forward: any causal language model, adapters included.

Sequences are padded to one length, which costs time that a fused decoder doesn't spend. Padding is by length, never
by token id.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from strop.learning.microbatches import MicroBatch


def module_logprobs(
    model: Any, part: MicroBatch, temperature: float, device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Log-probability of every trained token under softmax(logits / temperature).

    Args:
        model: called with `input_ids` and `attention_mask`; gives `.logits`.
        part: what to compute.
        temperature: divides the logits.
        device: of the model.
        weights: used in place of the model's own, by parameter name.

    Returns:
        (trained,) fp32, with a gradient where one is being recorded.
    """
    paths = part.tree.paths
    lengths = [len(path) for path in paths]
    tokens = np.zeros((len(paths), max(lengths)), dtype=np.int64)
    for row, path in enumerate(paths):
        tokens[row, : len(path)] = part.tree.tokens[path]
    attended = np.arange(max(lengths)) < np.array(lengths)[:, None]

    node, token = part.rows[part.pair_rows[part.pair]], part.pair_tokens[part.pair]
    places = part.tree.positions[node]  # the predicting place within its sequence
    wanted, column = np.unique(places, return_inverse=True)
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(tokens).to(device),
        "attention_mask": torch.from_numpy(attended).to(device),
    }
    inputs["use_cache"] = False
    keep = torch.from_numpy(wanted).to(device)
    narrow = "logits_to_keep" in inspect.signature(model.forward).parameters
    if narrow:
        inputs["logits_to_keep"] = keep
    logits = (functional_call(model, dict(weights), (), inputs) if weights else model(**inputs)).logits
    if not narrow:
        logits = logits[:, keep]
    rows, columns, targets = (torch.from_numpy(a.reshape(-1)).to(device) for a in (part.sequence, column, token))
    chosen = logits[rows, columns].float() / temperature  # (trained, vocab)
    logprobs: Tensor = chosen.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return logprobs
