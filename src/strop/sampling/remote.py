"""A sampler over an OpenAI-compatible server, for evaluation: its weights are its own, so nothing here updates them.

Where the server takes and gives token ids (vLLM, SGLang's and strop's own `/v1/completions`), tokens are what it sampled.
Any other is given text, and its text is encoded again: good for scores, and refused where tokens have to be true.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Self

import httpx

from strop.errors import AttemptError, BatchError, StropError
from strop.rollouts import FailureKind, FinishReason
from strop.sampling.encoding import text_functions
from strop.sampling.sampler import Sample, SamplingParams

_SECONDS = 600.0  # of a request without a deadline
_TRIES = 6  # of a request that the server turns away for now
_BUSY = {429, 502, 503}


class RemoteSampler:
    """Samples from a server. See `strop.sampling.sampler.Sampler`; made by `open`.

    Attributes:
        exact: whether tokens and log-probabilities are the server's own.
    """

    version = 0

    def __init__(
        self, client: httpx.AsyncClient, model: str, tokenizer: Any, *, max_context: int, in_flight: int, exact: bool
    ) -> None:
        self._client, self._model, self._max_context, self.exact = client, model, max_context, exact
        self._encode, self._decode = text_functions(tokenizer)
        self._places = asyncio.Semaphore(in_flight)
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        model: str,
        tokenizer: Any,
        *,
        key: str | None = None,
        max_context: int = 4096,
        in_flight: int = 256,
        text_is_enough: bool = False,
    ) -> Self:
        """Ask a server what it can do.

        Args:
            url: of its API: "http://host:8000/v1".
            model: the model's name there.
            tokenizer: the model's transformers tokenizer.
            key: sent as bearer token.
            max_context: most tokens of a sequence.
            in_flight: most requests at once; further callers wait.
            text_is_enough: take a server that gives no token ids. Its log-probabilities are unknown (NaN).

        Raises:
            StropError: it can't be reached, refuses, or gives no token ids where they are needed.
        """
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
        client = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=_SECONDS, limits=limits)
        sampler = cls(client, model, tokenizer, max_context=max_context, in_flight=in_flight, exact=True)
        probe = sampler._encode("Hello")
        try:
            choice = await sampler._asked_for(sampler._body(probe, SamplingParams(max_tokens=1)))
        except AttemptError as refusal:  # ids are nothing to this server: perhaps text is
            choice, reason = {}, refusal.reason
        else:
            reason = "it gives no token ids"
        if _tokens_of(choice) is not None:
            return sampler
        if not text_is_enough:
            await client.aclose()
            raise StropError(
                f"{url} can't be sampled from token by token ({reason}). What it says could be scored, and never "
                "trained on."
            )
        sampler.exact = False
        try:
            await sampler._asked_for(sampler._body(probe, SamplingParams(max_tokens=1)))
        except AttemptError as refusal:
            await client.aclose()
            raise StropError(f"{url} can't be sampled from: {refusal.reason}.") from refusal
        return sampler

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and sampled, that one sequence may have."""
        return self._max_context

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        """See `strop.sampling.sampler.Sampler.sample`."""
        if not len(prompt) or len(prompt) >= self._max_context:
            raise BatchError(
                f"a prompt of {len(prompt)} tokens can't be sampled from: it must have at least 1, and fewer than "
                f"max_context = {self._max_context}"
            )
        asked = time.monotonic()
        try:
            async with asyncio.timeout(_SECONDS if deadline is None else max(0.0, deadline - asked)), self._places:
                started = time.monotonic()
                choice = await self._asked_for(self._body(prompt, params))
        except TimeoutError:
            reason = f"its deadline passed {time.monotonic() - asked:.1f} s after it was asked for"
            raise AttemptError(FailureKind.TIMEOUT, reason) from None
        stopped = choice.get("finish_reason") != "length"
        found = _tokens_of(choice) if self.exact else self._text_of(choice, params, stopped)
        if found is None:
            raise AttemptError(
                FailureKind.SAMPLER, "the server gave no token ids, though it did when it was asked first"
            )
        tokens, logprobs = found
        return Sample(
            tokens,
            logprobs,
            [self.version] * len(tokens),
            FinishReason.STOP if stopped else FinishReason.LENGTH,
            queued=started - asked,
            seconds=time.monotonic() - started,
        )

    async def close(self) -> None:
        """See `strop.sampling.sampler.Sampler.close`."""
        self._closed = True
        await self._client.aclose()

    def _body(self, prompt: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        """The request. What asks for nothing is left out: not every server knows it."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(prompt) if self.exact else self._decode(prompt),
            "max_tokens": min(params.max_tokens, self._max_context - len(prompt)),
            "temperature": params.temperature,
        }
        stop = list(params.stop)
        if self.exact:
            body |= {"return_token_ids": True, "logprobs": 1, "skip_special_tokens": False}
            body |= {"stop_token_ids": list(params.stop_token_ids)} if params.stop_token_ids else {}
        else:
            stop += [self._decode([token]) for token in params.stop_token_ids]
        optional = {"top_p": (params.top_p, 1.0), "top_k": (params.top_k, 0), "min_p": (params.min_p, 0.0)}
        body |= {name: value for name, (value, off) in optional.items() if value != off}
        body |= {"seed": params.seed % 2**31} if params.seed is not None else {}
        return body | ({"stop": stop[:4]} if stop else {})  # OpenAI's API takes four

    async def _asked_for(self, body: dict[str, Any]) -> dict[str, Any]:
        """The choice that the server gives. Raises AttemptError if it gives none."""
        if self._closed:
            raise AttemptError(FailureKind.SAMPLER, "the sampler was closed")
        said = ""
        for number in range(_TRIES):
            try:
                response = await self._client.post("/completions", json=body)
            except httpx.HTTPError as error:
                raise AttemptError(FailureKind.SAMPLER, f"{type(error).__name__}: {error}") from error
            if response.is_success:
                return _choice(response)
            said = f"it answered {response.status_code}: {response.text[:300]}"
            if response.status_code not in _BUSY:
                break
            await asyncio.sleep(min(2.0**number, 30.0))
        raise AttemptError(FailureKind.SAMPLER, said)

    def _text_of(self, choice: dict[str, Any], params: SamplingParams, stopped: bool) -> tuple[list[int], list[float]]:
        """A text as tokens that it may have been, the end of the turn included."""
        tokens = self._encode(str(choice.get("text") or ""))
        if stopped and params.stop_token_ids:
            tokens.append(params.stop_token_ids[0])
        return tokens, [float("nan")] * len(tokens)


def _choice(response: httpx.Response) -> dict[str, Any]:
    try:
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice
    except (ValueError, LookupError, TypeError) as error:
        raise AttemptError(FailureKind.SAMPLER, f"its answer is no completion: {response.text[:300]}") from error


def _tokens_of(choice: dict[str, Any]) -> tuple[list[int], list[float]] | None:
    """Sampled ids and their log-probabilities, if they are there, one of each."""
    tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
    if not tokens or not logprobs or len(tokens) != len(logprobs):
        return None
    return [int(token) for token in tokens], [float(logprob) for logprob in logprobs]
