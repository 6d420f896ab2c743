"""The learner protocol: a batch and a loss in, updated and published weights out.

A learner is blind to algorithms: supervised learning, preferences, distillation and reinforcement learning are losses.
Every learner passes one conformance suite, tests/learning/learner_conformance.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from strop.learning.batch import Batch
from strop.learning.losses import Loss

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, float]


@runtime_checkable
class Learner(Protocol):
    """Trains a policy's weights.

    Constraints on every implementation:
      * Losses are normalised over the whole batch: any split into micro-batches gives the same gradient.
      * The same batches and rates, from the same state, give the same weights bit for bit on the same machine.
      * Weights are published only by `step` and `load`, and every publication has a version of its own.
    """

    @property
    def version(self) -> int:
        """Version of the weights that the next batch is computed with."""
        ...

    def forward_backward(self, batch: Batch, loss: Loss, temperature: float = 1.0) -> Metrics:
        """Add a batch's gradient to what `step` will apply.

        Args:
            batch: what to train on. "proximal_logprobs" (under the present weights) and "reference_logprobs" (under the
                weights at the stage's beginning) are computed where the loss needs them and the batch lacks them.
            loss: its components.
            temperature: that the tokens were sampled at.

        Returns:
            "loss" and its parts, "tokens_trained", "tokens_computed", how far the sampler's and the learner's
            log-probabilities differ ("mismatch_…"), "entropy" (estimated from the sampled tokens), and what the loss
            itself measures. {"skipped": 1.0, …} where no token has a gradient: then nothing was computed.

        Raises:
            BatchError: the batch lacks what the loss needs, is too long, or runs out of memory; no gradient is left.
        """
        ...

    def measure(self, batch: Batch, loss: Loss, temperature: float = 1.0) -> Metrics:
        """What `forward_backward` would say of a batch, held-out data for instance. Leaves weights and gradient alone."""
        ...

    def step(self, learning_rate: float) -> Metrics:
        """Apply the gradient and publish the weights.

        Returns:
            "grad_norm" before clipping, "learning_rate", "version". {"skipped": 1.0} where there is no gradient: then
            neither weights nor moments changed, and nothing was published.

        Raises:
            BatchError: the gradient is not finite; nothing changed.
        """
        ...

    def logprobs(self, batch: Batch, temperature: float = 1.0) -> NDArray[np.float32]:
        """(tokens,) log-probability of every trained token under the present weights; 0 where not trained."""
        ...

    def begin_stage(self) -> None:
        """Forget the optimizer's moments and the reference; weights stay, and are what the next reference is."""
        ...

    def restart(self, weights: Mapping[str, Tensor]) -> None:
        """Take other weights, by parameter name, publish them as the next version, and begin a stage with them.

        Raises:
            ModelError: one is missing or has another shape.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write weights (in transformers or peft format), tokenizer and optimizer state into an existing folder."""
        ...

    def load(self, folder: Path, version: int | None = None) -> None:
        """Take back, exactly, what `save` wrote, and publish it as `version` (None: the next one).

        Raises:
            ModelError: a file is missing, damaged or of another model.
        """
        ...
