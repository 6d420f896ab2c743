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
from strop.learning.prefix_tree import Ints


def module_logprobs(
    model: Any,
    part: MicroBatch,
    *,
    temperature: float,
    device: torch.device,
    weights: Mapping[str, Tensor] | None = None,
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
    wanted, column = np.unique(_predicting(part), return_inverse=True)
    inputs, keep = _inputs(part, device), torch.from_numpy(wanted).to(device)
    narrow = "logits_to_keep" in inspect.signature(model.forward).parameters
    if narrow:
        inputs["logits_to_keep"] = keep
    logits = _called(model, inputs, weights).logits
    if not narrow:
        logits = logits[:, keep]
    token = part.pair_tokens[part.pair]
    rows, columns, targets = (torch.from_numpy(a.reshape(-1)).to(device) for a in (part.sequence, column, token))
    chosen = logits[rows, columns].float() / temperature  # (trained, vocab)
    logprobs: Tensor = chosen.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    return logprobs


def module_values(
    model: Any, part: MicroBatch, *, device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """What a sequence classification model's `score` layer gives before every trained token; the rest as above."""
    outputs: dict[str, Tensor] = {}
    hook = model.score.register_forward_hook(lambda _, __, result: outputs.update(values=result))
    try:  # the model's own output is of one place only, which it finds by the id of the padding token
        _called(model, _inputs(part, device), weights)
    finally:
        hook.remove()
    rows, columns = (torch.from_numpy(a.reshape(-1)).to(device) for a in (part.sequence, _predicting(part)))
    return outputs["values"][rows, columns, 0].float()  # (trained,)


def _predicting(part: MicroBatch) -> Ints:
    """(trained,) the place, within its sequence, of the token before each trained one."""
    places: Ints = part.tree.positions[part.rows[part.pair_rows[part.pair]]]
    return places


def _inputs(part: MicroBatch, device: torch.device) -> dict[str, Any]:
    """The sequences padded to one length."""
    paths = part.tree.paths
    lengths = [len(path) for path in paths]
    tokens = np.zeros((len(paths), max(lengths)), dtype=np.int64)
    for row, path in enumerate(paths):
        tokens[row, : len(path)] = part.tree.tokens[path]
    attended = np.arange(max(lengths)) < np.array(lengths)[:, None]
    return {
        "input_ids": torch.from_numpy(tokens).to(device),
        "attention_mask": torch.from_numpy(attended).to(device),
        "use_cache": False,
    }


def _called(model: Any, inputs: dict[str, Any], weights: Mapping[str, Tensor] | None) -> Any:
    return functional_call(model, dict(weights), (), inputs) if weights else model(**inputs)
