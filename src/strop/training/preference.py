"""Preferences: DPO and its family on pairs, KTO on judged answers. The loop is that of `training.given`.

The reference is the policy as it was when the stage began; under an adapter that had learnt nothing yet, its frozen
base. Its log-probabilities are computed once and stored, see `training.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from strop.config import PreferenceSettings
from strop.data import Rendered
from strop.errors import ConfigError
from strop.learning import Batch, Loss, make_loss, pack_demonstrations, pack_judged
from strop.training.examples import batch_numbers, gather
from strop.training.reference import StoredReference

if TYPE_CHECKING:
    from strop.training.workshop import Workshop


class PreferenceUpdate:
    """What a step of a preference stage is made of. `prepare` comes first.

    Args:
        stage: the recipe's.
        shop: whose learner it is.
    """

    def __init__(self, stage: PreferenceSettings, shop: Workshop) -> None:
        self.shop, self.loss = shop, preference_loss(stage)
        found = gather(stage, shop)
        visited = sorted(
            {n for step in range(stage.steps) for n in batch_numbers(stage, len(found.trained), step, shop.recipe.seed)}
        )
        known = [*(found.trained[number] for number in visited), *found.held_out]
        self._others: dict[int, Rendered] = {}
        if "kl_baseline" in self.loss.needs:
            for part in (found.trained, found.held_out):
                following = [*part[1:], *part[:1]]
                self._others |= {id(e): mismatched(e, other) for e, other in zip(part, following, strict=True)}
        others = [self._others[id(example)] for example in known if id(example) in self._others]
        self._reference: StoredReference | None = None
        if "reference_logprobs" in self.loss.needs:
            self._reference = StoredReference(shop, stage.name, [*known, *others])

    async def prepare(self, done: int) -> None:
        """Have the reference ready; see `StoredReference.prepare`."""
        if self._reference:
            await self._reference.prepare(done)

    async def batch(self, examples: Sequence[Rendered]) -> Batch:
        """See `training.given.Update`."""
        batch = judged_batch(examples)
        if self._reference:
            batch = batch.with_extras(reference_logprobs=self._reference.of(examples))
        if self._others:
            baseline = await self._baseline([self._others[id(example)] for example in examples])
            batch = batch.with_extras(kl_baseline=np.full(len(batch.tokens), baseline, dtype=np.float32))
        return batch

    async def _baseline(self, others: Sequence[Rendered]) -> float:
        """KTO's z₀: how much likelier than under the reference the batch's answers to other prompts are, at least 0."""
        batch = pack_demonstrations([example.sequences[0] for example in others])
        learner = self.shop.learner
        now = await self.shop.compute("the baseline", "learner", learner.logprobs, batch)
        assert self._reference is not None  # a loss that needs the baseline needs the reference
        gained = float((now - self._reference.of(others)).sum(dtype=np.float64))
        return max(0.0, gained / len(others))


def preference_loss(stage: PreferenceSettings) -> Loss:
    """The stage's loss.

    Raises:
        ConfigError: it isn't a preference loss, or it asks for pairs and for single answers at once.
    """
    key = f"stages.{stage.name}.loss"
    loss = make_loss([part.spec for part in stage.loss], key)
    pairs, judges = loss.compares_sequences, "kl_baseline" in loss.needs
    if pairs == judges:
        wrong = (
            "it compares pairs and judges single answers" if pairs else "nothing in it prefers one answer to another"
        )
        raise ConfigError(key, wrong, "Name one of dpo, ipo, simpo, orpo or, for judged answers, kto")
    if loss.reads != {"logprobs"}:
        raise ConfigError(key, "it is for reward models", 'Use kind = "reward"')
    return loss


def judged_batch(examples: Sequence[Rendered]) -> Batch:
    """Pairs, or judged answers, each a group of its own."""
    return pack_judged(
        [
            (sequence, 1.0 if example.desirable and not second else -1.0, number)
            for number, example in enumerate(examples)
            for second, sequence in enumerate(example.sequences)
        ]
    )


def mismatched(example: Rendered, other: Rendered) -> Rendered:
    """The answer of another example after this one's prompt, no longer than the longer of the two."""
    (tokens, mask), (other_tokens, other_mask) = example.sequences[0], other.sequences[0]
    prompt, answer = mask.index(True), other_mask.index(True)
    longest = max(len(tokens), len(other_tokens))
    both = [*tokens[:prompt], *other_tokens[answer:]], [*mask[:prompt], *other_mask[answer:]]
    return Rendered(((both[0][:longest], both[1][:longest]),))
