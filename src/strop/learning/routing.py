"""What a learner does with the routers of mixture-of-experts models: hands them the sampler's choices, measures how the
load falls on the experts, and computes the loss that balances it. How a choice is forced is in `strop.models.experts`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.learning.batch import Batch
from strop.learning.microbatches import MicroBatch
from strop.models.experts import ExpertLayout, Routing


def given_choices(batch: Batch, part: MicroBatch, layout: ExpertLayout, device: torch.device) -> Tensor | None:
    """The sampler's choices for the places of a padded micro-batch.

    Returns:
        (sequences · longest, layers, per_token) int64, -1 where none is known; None if the batch carries none.
    """
    if batch.experts is None:
        return None
    lengths = [len(path) for path in part.tree.paths]
    given = np.full((len(lengths), max(lengths), layout.layers, layout.per_token), -1, dtype=np.int64)
    for row, (number, length) in enumerate(zip(part.sequences, lengths, strict=True)):
        start = batch.span(int(number)).start + 1  # a batch keeps them at the token that they led to
        given[row, :length] = batch.experts[start : start + length]
    return torch.from_numpy(given.reshape(-1, layout.layers, layout.per_token)).to(device)


def real_places(part: MicroBatch, device: torch.device) -> Tensor:
    """(sequences, longest) bool: which places of a padded micro-batch hold a token."""
    lengths = torch.tensor([len(path) for path in part.tree.paths], device=device)
    return torch.arange(int(lengths.max()), device=device) < lengths[:, None]


def balance_loss(routing: Routing, real: Tensor) -> Tensor:
    """Sequence-wise balance loss, DeepSeek-V3 (arXiv:2412.19437), eq. 17-20: Σ_i f_i P_i, the mean over layers.

    With f_i the share of a sequence's tokens that expert i computed, times experts / per_token, and P_i the expert's
    mean probability. It is 1 where the load is even. A sequence's loss is its own, so that no split of a batch
    changes it.

    Args:
        routing: what was chosen and the scores of all experts.
        real: (sequences, longest), see `real_places`.

    Returns:
        (sequences,) fp32.
    """
    total = torch.zeros(len(real), device=real.device)
    lengths = real.sum(1)
    for layer, scores in routing.scores.items():
        experts, per_token = scores.shape[-1], routing.chosen[layer].shape[-1]
        shares = _counts(routing.chosen[layer], real, experts) * experts / (per_token * lengths[:, None])
        means = (scores.view(*real.shape, experts) * real[..., None]).sum(1) / lengths[:, None]
        total = total + (shares * means).sum(-1)
    return total / max(len(routing.scores), 1)


def _counts(chosen: Tensor, real: Tensor, experts: int) -> Tensor:
    """(sequences, experts) fp32: tokens that each expert computed."""
    per_token = chosen.shape[-1]
    places = chosen.view(len(real), -1)
    ones = real[..., None].expand(*real.shape, per_token).reshape(len(real), -1).float()
    return torch.zeros((len(real), experts), device=real.device).scatter_add_(1, places, ones)


class LoadMeter:
    """Adds up over a batch how many tokens each expert of each layer computed.

    Args:
        layout: the model's sparse layers.

    Attributes:
        balance: the balance loss.
    """

    def __init__(self, layout: ExpertLayout) -> None:
        self.counts: NDArray[np.float64] = np.zeros((layout.layers, layout.experts))
        self.choices = self.differing = 0
        self.balance = 0.0

    def add(self, routing: Routing, real: Tensor) -> None:
        """Add a micro-batch's."""
        for layer, chosen in routing.chosen.items():
            self.counts[layer] += _counts(chosen, real, self.counts.shape[1]).sum(0).double().cpu().numpy()
        for differing in routing.differing.values():
            self.choices += int(real.sum())
            self.differing += int((differing.view(real.shape) & real).sum())

    def result(self) -> dict[str, float]:
        """Metrics, each the mean over layers, and the worst layer's.

        "experts_load_max": the busiest expert's tokens as a multiple of the mean; "experts_idle": share of experts
        without any token; "experts_load_entropy": 1 where the load is even, 0 where one expert has it all;
        "experts_replay_differs": share of choices that the learner's routers would have made otherwise;
        "experts_balance": the balance loss, where it is part of the loss.
        """
        total = self.counts.sum(1, keepdims=True)
        share = self.counts / np.maximum(total, 1)
        entropy = -np.sum(share * np.log(np.maximum(share, 1e-300)), axis=1) / np.log(max(share.shape[1], 2))
        busiest = share.max(1) * share.shape[1]
        found = {
            "experts_load_max": float(busiest.mean()),
            "experts_load_max_worst": float(busiest.max()),
            "experts_load_entropy": float(entropy.mean()),
            "experts_idle": float((self.counts == 0).mean()),
        }
        if self.choices:
            found["experts_replay_differs"] = self.differing / self.choices
        if self.balance:
            found["experts_balance"] = self.balance
        return found
