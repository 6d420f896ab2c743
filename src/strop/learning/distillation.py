"""Distillation on the student's own tokens: the loss, and which teacher scores which attempt's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from strop.learning.batch import Batch
from strop.learning.losses import LOSSES, PerToken, PolicyLoss, Tokens

if TYPE_CHECKING:
    from torch import Tensor

#: (tokens,) log-probability of every trained token of a batch; 0 where not trained.
Logprobs = NDArray[np.float32]


@LOSSES.add("reverse_kl")
@dataclass(frozen=True, kw_only=True)
class ReverseKL(PolicyLoss):
    """KL(π ‖ teacher) of the next token, at prefixes that the student sampled. Agarwal et al. 2023, arXiv:2306.13649
    (on-policy GKD with the reverse KL); as a policy gradient with the advantage log π_teacher - log π of each token
    by itself, without a sum over what follows: Lu 2025, "On-Policy Distillation", Thinking Machines Lab.

    The sampled token estimates both: its log-ratio the KL (k1), and the ratio π / π_anchor times it the gradient. What
    is stored of another policy's attempts is corrected by the same ratio.
    """

    @property
    def needs(self) -> frozenset[str]:
        """See `Component`."""
        return super().needs | {"teacher_logprobs"}

    @property
    def scales_with_advantage(self) -> bool:
        """See `Component`. Its advantages are its own: those of the batch, from rewards, play no part."""
        return False

    def objective(self, tokens: Tokens, log_ratio: Tensor) -> PerToken:
        """See `PolicyLoss`."""
        distance = tokens.logprobs.detach() - tokens.extra("teacher_logprobs")
        ratio = log_ratio.exp()
        return ratio * distance, {"reverse_kl": distance, "ratio": ratio.detach()}


def taught(batch: Batch, teacher_of: Sequence[int], teachers: Mapping[int, Callable[[Batch], Logprobs]]) -> Batch:
    """The batch with every trained token's log-probability under its teacher.

    Args:
        batch: what is to be trained on.
        teacher_of: (sequences,) number of the teacher that scores each sequence.
        teachers: by number: log-probabilities of a batch's trained tokens.

    Returns:
        The batch with the extra "teacher_logprobs", (tokens,).
    """
    logprobs = np.zeros(len(batch.tokens), dtype=np.float32)
    chosen = np.asarray(teacher_of, dtype=np.int64)[batch.sequence] if len(batch.lengths) else np.zeros(0, np.int64)
    for number, ask in teachers.items():
        theirs = batch.mask & (chosen == number)
        if theirs.any():
            logprobs[theirs] = ask(batch.masked(theirs))[theirs]
    return batch.with_extras(teacher_logprobs=logprobs)
