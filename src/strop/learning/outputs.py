"""What a policy gives at the trained tokens of a micro-batch: log-probabilities, or values where it ends in such a head.

The one way through a model, for the learner, its reference, and models that are only asked (teachers).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.learning.batch import Batch
from strop.learning.fused_pass import GradientOf, hidden_states
from strop.learning.head import TokenLogprobs
from strop.learning.microbatches import MicroBatch, split_batch
from strop.learning.module_pass import module_logprobs, module_values
from strop.learning.operators import Linear, apply
from strop.learning.tree_attention import plan_attention
from strop.models.fused import Decoder
from strop.models.passes import current
from strop.models.policy import Policy


def fused_outputs(
    policy: Policy,
    decoder: Decoder,
    part: MicroBatch,
    temperature: float,
    anchor: Tensor,
    gradient_of: GradientOf,
) -> Tensor:
    """Outputs of a fused decoder, through the adapter and with the recomputing that the pass says.

    Args:
        policy: whose device and head are meant.
        decoder: its weights, or others of the same shape.
        part: what to compute.
        temperature: divides the logits.
        anchor, gradient_of: see `strop.learning.fused_pass.hidden_states`.

    Returns:
        (trained,) fp32.
    """
    tensor, settings = partial(to_tensor, device=policy.device), current()
    hidden = hidden_states(
        decoder,
        tensor(part.tree.tokens),
        tensor(part.tree.positions),
        plan_attention(part.tree, decoder.heads, policy.device),
        tensor(part.rows),
        anchor,
        gradient_of,
        policy.adapter if settings.adapter is None else settings.adapter,
        settings.recompute,
    )
    pairs = tensor(part.pair_rows), tensor(part.pair_tokens)
    head, gradient = decoder.head.detach(), gradient_of(decoder.head)
    if policy.gives_values:
        values = apply(Linear, hidden, head, None, gradient, None).float().squeeze(1)  # (rows,)
        return values[pairs[0]][tensor(part.pair)]
    return apply(TokenLogprobs, hidden, head, gradient, *pairs, temperature)[tensor(part.pair)]


def module_outputs(
    policy: Policy,
    part: MicroBatch,
    temperature: float,
    gradient_of: GradientOf,
    weights: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Outputs of any other model, through its own forward, with its own `weights` or others: (trained,) fp32."""
    if policy.gives_values:
        return module_values(policy.model, part, device=policy.device, weights=weights)
    return module_logprobs(policy, part, temperature, gradient_of, weights)


def frozen_logprobs(policy: Policy, batch: Batch, temperature: float, budget: int) -> NDArray[np.float32]:
    """Log-probabilities under a policy that is only asked, never trained.

    Args:
        policy: the model.
        batch: tokens and mask.
        temperature: that the tokens were sampled at; divides this model's logits as well.
        budget: most tokens that are computed at once.

    Returns:
        (tokens,) log-probability of every trained token; 0 where not trained.

    Raises:
        BatchError: a sequence is longer than the budget.
    """
    result = np.zeros(len(batch.tokens), dtype=np.float32)
    shared = policy.decoder is not None
    with torch.no_grad():
        for part in split_batch(batch, budget, np.flatnonzero(batch.trained_counts), shared=shared):
            if policy.decoder is None:
                outputs = module_outputs(policy, part, temperature, no_gradient)
            else:
                anchor = torch.zeros((), device=policy.device)
                outputs = fused_outputs(policy, policy.decoder, part, temperature, anchor, no_gradient)
            result[part.trained] = outputs.cpu().numpy()
    return result


def no_gradient(weight: Tensor) -> None:
    """Stands where a gradient's buffer is asked for and there is none."""


def to_tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    """A NumPy array as a tensor of its own kind."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
