"""Supervised fine-tuning: what a step of demonstrations is made of. The loop is that of `training.given`."""

from __future__ import annotations

from collections.abc import Sequence

from strop.data import Rendered
from strop.learning import Batch, make_loss, pack_demonstrations


class SFTUpdate:
    """Demonstrations: cross-entropy on the learnt tokens."""

    def __init__(self) -> None:
        self.loss = make_loss([{"name": "cross_entropy"}])

    async def batch(self, examples: Sequence[Rendered]) -> Batch:
        """See `training.given.Update`."""
        return pack_demonstrations([sequence for example in examples for sequence in example.sequences])
