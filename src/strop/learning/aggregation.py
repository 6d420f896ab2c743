"""How per-token losses become one number: weights that are fixed by the whole batch before it is split.

Every aggregation is a weighted sum over the trained tokens, with weights that depend on lengths alone. Splitting a
batch into micro-batches therefore changes nothing, and a masked token is in no numerator and in no denominator.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "sequence_mean", "sequence_sum", "constant")


def token_weights(counts: NDArray[np.int64], kind: Aggregation, constant: int | None = None) -> NDArray[np.float64]:
    """The weight of every trained token of a batch.

    Args:
        counts: (sequences,) trained tokens of each sequence; a sequence without any counts nowhere.
        kind: with N tokens in all, S sequences that have any, and n of them in the token's own sequence:
            "token_mean" 1 / N (DAPO, arXiv:2503.14476, eq. 12); "sequence_mean" 1 / (S n), the mean of token means
            (GRPO, arXiv:2402.03300, eq. 3); "sequence_sum" 1 / S (log-probability of whole sequences);
            "constant" 1 / (S · constant) (Dr. GRPO, arXiv:2503.20783, where the constant is the token limit).
        constant: for "constant".

    Returns:
        (sequences,) weight of each token of that sequence; 0 for a sequence without trained tokens.

    Raises:
        ValueError: "constant" without a positive constant.
    """
    trained = counts > 0
    sequences, tokens = max(int(trained.sum()), 1), max(int(counts.sum()), 1)
    if kind == "token_mean":
        weights = np.full(len(counts), 1 / tokens)
    elif kind == "sequence_mean":
        weights = 1 / (sequences * np.maximum(counts, 1.0))
    elif kind == "sequence_sum":
        weights = np.full(len(counts), 1 / sequences)
    elif constant is None or constant <= 0:
        raise ValueError("aggregation 'constant' needs constant, the number of tokens to divide by")
    else:
        weights = np.full(len(counts), 1 / (sequences * constant))
    return np.where(trained, weights, 0.0)
