"""A sampler by what a user names: a model of this machine, or one that a server samples from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from strop.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that samples.

    Attributes:
        url: of its OpenAI-compatible API: "http://host:8000/v1".
        model: the model's name there; None: as it is called here.
        key: opens it.
    """

    url: str
    model: str | None = None
    key: str | None = None


async def open_sampler(
    model: str, *, slots: int, max_context: int, endpoint: Endpoint | None = None
) -> tuple[Sampler, Any, str]:
    """A sampler for evaluation and serving.

    Args:
        model: a start model, a folder, or a hub name.
        slots: sequences decoded, or asked for, at once.
        max_context: tokens of a sequence.
        endpoint: where tokens are sampled, if not here: `model` gives the tokenizer alone then.

    Returns:
        the sampler, the tokenizer, and the folder or hub name that the model came from.

    Raises:
        StropError: the model can't be loaded, or the server can't be sampled from.
    """
    from strop.models.load import load_model, load_tokenizer, resolve_model

    if endpoint is not None:
        from strop.sampling.remote import RemoteSampler

        source = resolve_model(model)
        tokenizer = load_tokenizer(source)
        remote = await RemoteSampler.open(
            endpoint.url,
            endpoint.model or model,
            tokenizer,
            key=endpoint.key,
            max_context=max_context,
            in_flight=slots,
            text_is_enough=True,
        )
        return remote, tokenizer, source
    from strop.models.policy import Policy
    from strop.sampling.embedded import EmbeddedSampler

    loaded = await asyncio.to_thread(load_model, model)
    sampler = EmbeddedSampler(Policy(loaded.model), loaded.tokenizer, slots=slots, max_context=max_context)
    return sampler, loaded.tokenizer, loaded.source
