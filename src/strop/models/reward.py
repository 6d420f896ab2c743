"""Reward models: a causal language model's body under a value head, as transformers' sequence classification has it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from strop.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


def reward_model(model: Any, tokenizer: Any, values: Mapping[str, Tensor], seed: int) -> Any:
    """A reward model with a policy's weights.

    Args:
        model: the policy's transformers model.
        tokenizer: its tokenizer; its padding token becomes the model's, see `set_padding`.
        values: the policy's weights by parameter name, fp32.
        seed: of the head, which is drawn as transformers draws new layers: normal, deviation `initializer_range`.

    Returns:
        The fp32 model, on the CPU: one label, whose logit is the reward.

    Raises:
        ModelError: transformers has no sequence classification model of this family.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels, config.pad_token_id, config.use_cache = 1, set_padding(tokenizer), False
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = AutoModelForSequenceClassification.from_config(config)
        except ValueError as error:
            raise ModelError(f"{type(model).__name__} can't be made a reward model: {error}") from error
    named = dict(made.named_parameters())
    if lacking := sorted(name for name in named if name not in values and not name.startswith("score")):
        raise ModelError(f"a reward model of {type(model).__name__} has weights that the policy lacks: {lacking[:3]} …")
    with torch.no_grad():
        for name, parameter in named.items():
            if name in values:
                parameter.copy_(values[name])
    return made.eval()


def set_padding(tokenizer: Any) -> int:
    """Give the tokenizer a padding token that never ends a conversation, and return its id.

    transformers reads the value at the last token that isn't padding, told by its id: with a padding token that ends
    turns as well (the start model's) it would read before the end of the turn.

    Raises:
        ModelError: every special token is needed.
    """
    ends = {tokenizer.eos_token_id}
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in ends:
        return int(tokenizer.pad_token_id)
    in_chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], return_dict=False)
    free = [number for number in sorted(tokenizer.added_tokens_decoder) if number not in {*ends, *in_chat}]
    if not free:
        raise ModelError("the tokenizer has no special token left to pad with; add one to it before training")
    tokenizer.pad_token = str(tokenizer.added_tokens_decoder[free[0]])
    return int(free[0])
