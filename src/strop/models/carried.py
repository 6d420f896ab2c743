"""A trial of a model that only its own forward can run: what sampler and learner rely on is tried out on a few tokens
before anything starts, and a model that breaks it is refused instead of being run wrong in silence.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from strop.errors import ModelError
from strop.models.lora import base_of
from strop.models.policy import Policy

#: Tokens of a trial, and how many of them come one by one after the others.
TOKENS, DECODED = 12, 4
#: Mean difference of log-probabilities that rounding explains, in nats.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


@torch.no_grad()
def check_carried(policy: Policy) -> None:
    """Try a policy out: causal attention, a cache that gives what the whole sequence gives, and padding on the right
    that changes nothing. A policy with a description of its own needs no trial, and a reward model samples nothing.

    Raises:
        ModelError: says what the model does not do.
    """
    if policy.decoder is not None or policy.gives_values:
        return
    model: Any = policy.model
    name = type(base_of(model)).__name__
    arguments = inspect.signature(base_of(model).forward).parameters
    if not {"cache", "past_key_values"} & set(arguments) or "use_cache" not in arguments:
        raise ModelError(f"{name} can't be carried: its forward takes no cache, so that it can't be sampled from")
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, TOKENS + 1, device=policy.device)[None] * 7 % vocabulary
    try:
        whole = _logprobs(model(input_ids=tokens, use_cache=False))
        trials = {"its cache": _decoded(model, tokens), "padding on the right": _padded(model, tokens)}
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, NotImplementedError) as error:
        raise ModelError(f"{name} can't be carried: {type(error).__name__} in its forward ({error})") from error
    bound = ROUNDING.get(policy.dtype, 0.1)
    for what, found in trials.items():
        difference = float((found - whole).abs().mean())
        if not difference <= bound:
            raise ModelError(
                f"{name} can't be carried: with {what} its log-probabilities differ from those of the whole sequence by "
                f"{difference:.3g} nats on average, where rounding explains {bound:g}"
            )


def _decoded(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities with a cache: the first tokens together, the others one by one."""
    given = "cache" if "cache" in inspect.signature(base_of(model).forward).parameters else "past_key_values"
    out = model(input_ids=tokens[:, :-DECODED], use_cache=True)
    found = [_logprobs(out)]
    for place in range(TOKENS - DECODED, TOKENS):
        out = model(input_ids=tokens[:, place : place + 1], use_cache=True, **{given: out[given]})
        found.append(_logprobs(out))
    return torch.cat(found, dim=1)


def _padded(model: Any, tokens: Tensor) -> Tensor:
    """Log-probabilities beside a longer sequence."""
    longer = torch.cat([tokens, tokens[:, :DECODED]], dim=1)
    attended = torch.ones((2, longer.shape[1]), dtype=torch.bool, device=tokens.device)
    attended[0, TOKENS:] = False
    out = model(input_ids=longer.repeat(2, 1), attention_mask=attended, use_cache=False)
    return _logprobs(out)[:1, :TOKENS]


def _logprobs(out: Any) -> Tensor:
    return out.logits.float().log_softmax(-1)  # type: ignore[no-any-return]
