"""Completions of text and of token ids: OpenAI's `POST /v1/completions`, and the token-in, token-out
`POST /inference/v1/generate` that trainers use.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from strop.gateway.attempts import Answer, RetryMark
from strop.gateway.dialects.chat import read_wishes, usage
from strop.gateway.dialects.fields import Body, answer_schema, check_names, flag, whole
from strop.gateway.engine import Request
from strop.gateway.errors import RequestError, refused
from strop.gateway.tokens import TokenText

_HONOURED = {
    *("model", "prompt", "n", "logprobs", "stream", "stream_options", "stop", "stop_token_ids", "seed", "max_tokens"),
    *("temperature", "top_p", "top_k", "min_p", "return_token_ids", "response_format", "best_of", "add_special_tokens"),
}
_WITHOUT_EFFECT = {"user", "metadata", "cache_salt", "priority", "request_id", "skip_special_tokens"}
_OFF = {
    "echo": False,
    "suffix": "",
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "ignore_eos": False,
}
_DEFAULT_TOKENS = 16  # OpenAI's default for this endpoint


def read(body: Body, mark: RetryMark, text: TokenText) -> Request:
    """The request that a body makes. Raises RequestError if it is malformed, or asks for what can't be done."""
    check_names(body, _HONOURED, _WITHOUT_EFFECT, _OFF)
    if (whole(body, "logprobs", 0, 20) or 0) > 1:
        raise refused("logprobs", "only the log-probability of the sampled token is known; ask for 0 or 1")
    if body.get("best_of") not in (None, 1, body.get("n", 1)):
        raise refused("best_of", "replies aren't ranked here; ask for n")
    return Request(
        prompt=_prompt(body.get("prompt"), flag(body, "add_special_tokens", True), text),
        wishes=read_wishes(body, whole(body, "max_tokens", 1) or _DEFAULT_TOKENS),
        n=whole(body, "n", 1, 128) or 1,
        prompt_ids=flag(body, "return_token_ids"),
        mark=mark,
        answer=answer_schema(body.get("response_format"), "response_format"),
    )


def _prompt(prompt: Any, special: bool, text: TokenText) -> tuple[int, ...]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = text.encode(prompt, special=special)
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and token >= 0 for token in prompt):
        raise RequestError(
            "prompt: expected one text that isn't empty, or one list of token ids; send a request for each prompt",
            parameter="prompt",
        )
    return tuple(prompt)


def write(body: Body, answers: list[Answer], identity: str, model: str, text: TokenText) -> dict[str, Any]:
    """The response."""
    return {
        **_head(identity, model),
        "choices": [_choice(body, number, answer, text) for number, answer in enumerate(answers)],
        "usage": usage(answers),
    }


def _head(identity: str, model: str) -> dict[str, Any]:
    return {"id": f"cmpl-{identity}", "object": "text_completion", "created": int(time.time()), "model": model}


def _choice(body: Body, number: int, answer: Answer, text: TokenText) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": number,
        "text": answer.message["content"],
        "finish_reason": answer.finish,
        "logprobs": None,
        "stop_reason": answer.stop_string,
    }
    if body.get("logprobs") is not None:
        pieces = [text.piece(token)[0] for token in answer.sample.tokens]
        ends = [0]
        for piece in pieces:
            ends.append(ends[-1] + len(piece))
        choice["logprobs"] = {
            "tokens": pieces,
            "token_logprobs": answer.sample.logprobs,
            "top_logprobs": [{piece: value} for piece, value in zip(pieces, answer.sample.logprobs, strict=True)],
            "text_offset": ends[:-1],
        }
    if body.get("return_token_ids"):
        choice |= {
            "token_ids": answer.sample.tokens,
            "prompt_token_ids": answer.prompt,
            "weight_versions": answer.sample.versions,
        }
    return choice


class Events:
    """The chunks of a streamed response. See `fields.Events`."""

    def __init__(self, body: Body, identity: str, model: str, text: TokenText) -> None:
        self._body, self._identity, self._model, self._text = body, identity, model, text
        self._said: Counter[int] = Counter()  # characters of each reply that were sent

    def started(self, prompt: list[int]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        return iter(())

    def said(self, reply: int, text: str) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        self._said[reply] += len(text)
        choice = {"index": reply, "text": text, "finish_reason": None, "logprobs": None}
        yield {**_head(self._identity, self._model), "choices": [choice]}

    def ended(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        response = write(self._body, answers, self._identity, self._model, self._text)
        counted = response.pop("usage")
        for choice in response["choices"]:
            yield {**response, "choices": [{**choice, "text": choice["text"][self._said[choice["index"]] :]}]}
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield {**response, "choices": [], "usage": counted}


_GENERATE = {"model", "token_ids", "sampling_params", "stream"}
_SAMPLING = {
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "seed", "n", "logprobs"),
    *("return_token_ids",),
}


def read_generate(body: Body, mark: RetryMark, text: TokenText) -> Request:
    """The request of a token-in, token-out client."""
    check_names(body, _GENERATE, _WITHOUT_EFFECT, {"features": None})
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise RequestError("sampling_params: expected an object", parameter="sampling_params")
    check_names(sampling, _SAMPLING, {*_WITHOUT_EFFECT, "spaces_between_special_tokens"}, _OFF)
    return Request(
        prompt=_prompt(body.get("token_ids"), False, text),
        wishes=read_wishes(sampling, whole(sampling, "max_tokens", 1)),
        n=whole(sampling, "n", 1, 128) or 1,
        mark=mark,
    )


def write_generate(body: Body, answers: list[Answer], identity: str, model: str, text: TokenText) -> dict[str, Any]:
    """The response to a token-in, token-out client."""
    return {
        "request_id": identity,
        "model": model,
        "choices": [
            {
                "index": number,
                "token_ids": answer.sample.tokens,
                "finish_reason": answer.finish,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                        for token, logprob in zip(answer.sample.tokens, answer.sample.logprobs, strict=True)
                    ]
                },
            }
            for number, answer in enumerate(answers)
        ],
        "usage": usage(answers),
    }
