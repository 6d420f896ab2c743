"""The sampler protocol: tokens in; sampled tokens, log-probabilities and weight versions out.

Every sampler (embedded, vLLM, a fake one in tests) passes one conformance suite, tests/sampling/sampler_conformance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from strop.rollouts import ExpertChoices, FinishReason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample.

    Attributes:
        max_tokens: most tokens to sample; at least 1.
        temperature: divides the logits before the softmax; 0 is greedy (its log-probabilities are those of
            temperature 1, since greedy has no distribution worth training on).
        top_p, top_k, min_p: truncation of the distribution; 1.0, 0 and 0.0 switch each off. Log-probabilities are
            those of the truncated, renormalised distribution. Refused in training unless it is said to be meant.
        stop_token_ids: sampling ends after one of these; it is part of the sampled tokens.
        stop: strings that end sampling once the decoded text contains one; sampled tokens are kept whole.
        seed: the same seed, prompt, parameters and weights give the same tokens, whatever else is being sampled.
            None draws one.
        adapter: name of the adapter to sample through, of those on the base that the sampler has; "" for the base alone,
            None for the sampler's own default.
        grammar: what the text has to be, from `strop.sampling.grammars.grammar`; None: anything. Log-probabilities
            are those of the distribution over the tokens that it allows. Only a `ConstrainedSampler` takes one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int | None = None
    adapter: str | None = None
    grammar: str | None = None


@dataclass(slots=True)
class Sample:
    """What one call sampled. The three lists have the same length.

    Attributes:
        tokens: sampled token ids, a stop token included.
        logprobs: log-probability of each token under the distribution that it was sampled from.
        versions: weight version that each token was sampled with.
        finish_reason: why it ended.
        cached: number of prompt tokens whose keys and values were reused.
        queued, seconds: time before the first forward pass, and from then to the end.
        experts: what the routers of a mixture-of-experts model chose at the place before each token, prompt and
            sampled, as the rollout records it.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    cached: int = 0
    queued: float = 0.0
    seconds: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)
    experts: ExpertChoices | None = None


@runtime_checkable
class Sampler(Protocol):
    """Samples tokens, from thousands of callers at once.

    Constraints on every implementation:
      * `sample` may be cancelled at any await: its place is free after the step in progress.
      * A request that can't ever fit (prompt longer than `max_context`) raises `BatchError` at once.
      * A deadline that passes raises `AttemptError(FailureKind.TIMEOUT)`; a sampler that broke raises
        `AttemptError(FailureKind.SAMPLER)`. Neither returns a partial sample.
      * At most `queue_limit` requests wait; further callers wait for a place in it (backpressure), never fail.
      * Weights change between two steps, never inside one; sequences in flight go on, and every token carries the
        version that sampled it. Keys and values computed with older weights serve no new request.
    """

    @property
    def version(self) -> int:
        """Version of the weights that the next token is sampled with."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and sampled, that one sequence may have."""
        ...

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        """Sample a continuation of `prompt`.

        Args:
            prompt: token ids, at least one.
            params: how to sample. If prompt and max_tokens exceed `max_context`, sampling ends there with LENGTH.
            deadline: on `time.monotonic()`'s clock; None waits without one (the caller has one of its own).

        Raises:
            BatchError: the prompt is empty or can't fit.
            AttemptError: the deadline passed or the sampler broke.
        """
        ...

    async def close(self) -> None:
        """End sampling; requests in flight raise `AttemptError(FailureKind.SAMPLER)`. May be called twice."""
        ...


@runtime_checkable
class StreamingSampler(Sampler, Protocol):
    """A sampler that tells tokens before the sample is complete. Not every one can, and nothing but streams asks it."""

    async def sample_streaming(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_tokens: Callable[[list[int]], None],
        *,
        deadline: float | None = None,
    ) -> Sample:
        """Sample as `sample` does.

        Args:
            prompt, params, deadline: see `sample`.
            on_tokens: called in the event loop with the tokens sampled since it was called last, each once and in
                order, all of them before this returns. Nothing is told once the call is cancelled.

        Raises:
            BatchError, AttemptError: see `sample`; what was told before is void then.
        """
        ...


@runtime_checkable
class ConstrainedSampler(Sampler, Protocol):
    """A sampler that can sample within a grammar."""

    async def check_grammar(self, grammar: str) -> None:
        """Find out whether `SamplingParams.grammar` may be this.

        Raises:
            StropError: the grammar is wrong, or what it takes is not installed.
        """
        ...
