"""Reward models from pairs: the policy of the stage's beginning with a value head in place of the head over tokens.

The loop is that of `training.given`. The reward of a conversation is the value at its last token; the model is saved as
plain transformers' `AutoModelForSequenceClassification` loads it. The policy itself stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.config import RewardSettings
from strop.data import Rendered
from strop.errors import ConfigError
from strop.learning import Batch, Loss, make_loss, pack_judged

if TYPE_CHECKING:
    from strop.training.workshop import Workshop


class RewardUpdate:
    """Pairs of whole conversations.

    Args:
        stage: the recipe's.
        unread: a token that nothing reads, see `reward_batch`.
    """

    def __init__(self, stage: RewardSettings, unread: int) -> None:
        self.loss, self._unread = reward_loss(stage), unread

    async def batch(self, examples: Sequence[Rendered]) -> Batch:
        """See `training.given.Update`."""
        return reward_batch(examples, self._unread)


def reward_loss(stage: RewardSettings) -> Loss:
    """The stage's loss.

    Raises:
        ConfigError: it isn't one of rewards.
    """
    key = f"stages.{stage.name}.loss"
    loss = make_loss([part.spec for part in stage.loss], key)
    if loss.reads != {"values"}:
        raise ConfigError(key, "it is not one of rewards", "Name bradley_terry")
    return loss


def reward_batch(examples: Sequence[Rendered], unread: int) -> Batch:
    """Pairs whose only trained token is one that follows the end: what comes before it is where the value is read."""
    return pack_judged(
        [
            (([*tokens, unread], [False] * len(tokens) + [True]), sign, number)
            for number, example in enumerate(examples)
            for (tokens, _), sign in zip(example.sequences, (1.0, -1.0), strict=True)
        ]
    )


def become_reward_model(shop: Workshop, stage: RewardSettings) -> None:
    """Give the workshop a learner of a reward model that begins with the policy's weights as they are."""
    from strop.learning import EmbeddedLearner
    from strop.models.policy import Policy
    from strop.models.reward import reward_model

    policy = shop.learner
    assert isinstance(policy, EmbeddedLearner)
    made = reward_model(
        policy.policy.model, shop.tokenizer, policy.masters.named_values(), shop.seed(stage.name, "head")
    )
    masters = {name: parameter.detach().clone() for name, parameter in made.named_parameters()}
    settings = shop.recipe.learner
    shop.learner = EmbeddedLearner(
        Policy(made, dtype=policy.policy.dtype),
        shop.tokenizer,
        masters=masters,
        tokens_per_micro_batch=settings.tokens_per_micro_batch,
        weight_decay=settings.weight_decay,
        betas=settings.betas,
        epsilon=settings.epsilon,
        max_grad_norm=settings.max_grad_norm,
    )
