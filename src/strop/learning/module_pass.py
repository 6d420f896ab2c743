"""Log-probabilities through a model's own forward: any causal language model, adapters included.

Sequences are padded to one length, which costs time that a fused decoder doesn't spend. Padding is by length, never
by token id.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from strop.learning.fused_pass import GradientOf
from strop.learning.head import TokenLogprobs
from strop.learning.microbatches import MicroBatch
from strop.learning.operators import apply
from strop.learning.prefix_tree import Ints
from strop.models.lora import base_of
from strop.models.passes import current, running
from strop.models.policy import Policy


def module_logprobs(
    policy: Policy,
    part: MicroBatch,
    temperature: float,
    gradient_of: GradientOf,
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Log-probability of every trained token under softmax(logits / temperature).

    Args:
        policy: whose model is called with `input_ids` and `attention_mask`, and gives `.logits`.
        part: what to compute.
        temperature: divides the logits.
        gradient_of: buffer of the output layer's gradient; autograd's own are left in every other weight's `.grad`.
        weights: used in place of the model's own, by parameter name.

    Returns:
        (trained,) fp32, with a gradient where one is being recorded.
    """
    device, model = policy.device, policy.model
    wanted, column = np.unique(_predicting(part), return_inverse=True)
    inputs, keep = padded_inputs(part, device), torch.from_numpy(wanted).to(device)
    narrow = "logits_to_keep" in inspect.signature(base_of(model).forward).parameters
    if narrow:
        inputs["logits_to_keep"] = keep
    with running(replace(current(), headless=policy.head is not None)):
        out = _called(model, inputs, weights).logits
    if not narrow:
        out = out[:, keep]
    token = part.pair_tokens[part.pair]
    rows, columns, targets = (torch.from_numpy(a.reshape(-1)).to(device) for a in (part.sequence, column, token))
    out = out[rows, columns]
    if policy.head is None:
        chosen = out.float() / temperature  # (trained, vocab)
        logprobs: Tensor = chosen.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        return logprobs
    own = policy.head.weight
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    head = (weights or {}).get(names[id(own)], own).detach()
    every = torch.arange(len(out), device=device)
    return apply(TokenLogprobs, out.to(head.dtype), head, gradient_of(own), every, targets, temperature)


def module_values(
    model: Any, part: MicroBatch, *, device: torch.device, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """What a sequence classification model's `score` layer gives before every trained token; the rest as above."""
    outputs: dict[str, Tensor] = {}
    hook = model.score.register_forward_hook(lambda _, __, result: outputs.update(values=result))
    try:  # the model's own output is of one place only, which it finds by the id of the padding token
        _called(model, padded_inputs(part, device), weights)
    finally:
        hook.remove()
    rows, columns = (torch.from_numpy(a.reshape(-1)).to(device) for a in (part.sequence, _predicting(part)))
    return outputs["values"][rows, columns, 0].float()  # (trained,)


def _predicting(part: MicroBatch) -> Ints:
    """(trained,) the place, within its sequence, of the token before each trained one."""
    places: Ints = part.tree.positions[part.rows[part.pair_rows[part.pair]]]
    return places


def padded_inputs(part: MicroBatch, device: torch.device) -> dict[str, Any]:
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
