"""One request on its way through the embedded sampler, and the engine that computes logits for many of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from strop.rollouts import ExpertChoices, FinishReason
from strop.sampling.constraints import Constraint
from strop.sampling.sampler import Sample, SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and what it has got so far. Belongs to the engine's thread, but for `future` and `cancelled`.

    Attributes:
        prompt: (n,) token ids.
        params: how to sample; the seed is set.
        future: where the sample goes, in its own event loop.
        asked: when `sample` was called, on `time.monotonic()`'s clock; `started`, when its first step began.
        cancelled: set by the caller's side; the engine drops it before its next step.
        queued: whether it still takes up a place in the queue.
        resumes: whether it goes on from what a row held when it came; None: not looked at yet.
        row: the engine's place for it.
        source, shared: the row (and when that was taken) whose first `shared` tokens it will copy once computed.
        cached: prompt tokens that needed no computing.
        constraint: which tokens may come next; None: any.
        adapter: name of the adapter it is sampled through; "" for the base alone.
        experts: what routers chose at the places computed so far, in order: (places, layers, per_token) each.
        on_tokens: told every token in the event loop as it is sampled; None: nobody asks.
    """

    prompt: np.ndarray
    params: SamplingParams
    future: asyncio.Future[Sample]
    asked: float
    limit: int
    started: float = 0.0
    cancelled: bool = False
    queued: bool = True
    resumes: bool | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    row: int = -1
    source: tuple[int, int] | None = None
    shared: int = 0
    cached: int = 0
    adapter: str = ""
    experts: list[Tensor] = field(default_factory=list)
    constraint: Constraint | None = None
    on_tokens: Callable[[list[int]], None] | None = None

    @property
    def length(self) -> int:
        """Tokens so far, prompt and sampled."""
        return len(self.prompt) + len(self.tokens)

    def sample(self, reason: FinishReason, now: float) -> Sample:
        """The finished sample."""
        return Sample(
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=reason,
            cached=self.cached,
            queued=self.started - self.asked,
            seconds=now - self.started,
            experts=self._choices(),
        )

    def _choices(self) -> ExpertChoices | None:
        """What was chosen at the place before each token; nothing led to the first."""
        if not self.experts:
            return None
        chosen = torch.cat(self.experts).to("cpu", torch.int16)  # (places, layers, per_token)
        chosen = torch.cat([torch.full_like(chosen[:1], -1), chosen])
        _, layers, per_token = chosen.shape
        return ExpertChoices(layers, per_token, chosen.numpy().astype("<i2").tobytes())


class Engine(Protocol):
    """Computes logits for the sequences that it has admitted. Called by one thread, under the policy's lock.

    Attributes:
        prefilled: prompt tokens computed since the start.
    """

    prefilled: int

    def resumes(self, sequence: Sequence) -> bool:
        """Whether the prompt extends all that an ended sequence left: a conversation's next turn."""
        ...

    def admit(self, sequence: Sequence) -> bool:
        """Find a place for a sequence; False if there is none at present."""
        ...

    def step(self) -> tuple[list[Sequence], Tensor | None]:
        """Compute a step: the sequences that now get a token, and their logits (sequences, vocab)."""
        ...

    def append(self, sequence: Sequence, token: int) -> None:
        """`sequence` got `token` and goes on."""
        ...

    def release(self, sequence: Sequence) -> None:
        """`sequence` ended. Its place is free."""
        ...

    def weights_changed(self) -> None:
        """The weights are other ones than in the step before. Also called before the first step."""
        ...
