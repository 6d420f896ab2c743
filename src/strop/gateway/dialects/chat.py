"""OpenAI chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from strop.gateway.attempts import Answer, RetryMark
from strop.gateway.dialects.fields import Body, answer_schema, check_names, flag, items, number, strings, whole
from strop.gateway.engine import Request, Wishes
from strop.gateway.errors import RequestError, refused
from strop.gateway.messages import plain_message, plain_tool
from strop.gateway.tokens import TokenText

_HONOURED = {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "n", "logprobs", "stream", "stream_options"),
    *(
        "stop",
        "stop_token_ids",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
    ),
    *("response_format", "return_token_ids", "top_logprobs"),
}
_WITHOUT_EFFECT = {
    *("metadata", "store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("reasoning_effort", "verbosity", "cache_salt", "priority", "request_id", "skip_special_tokens"),
}
_OFF = {
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "functions": [],
    "function_call": "none",
    "modalities": ["text"],
    "audio": None,
    "prediction": None,
    "web_search_options": None,
    "chat_template_kwargs": {},
    "ignore_eos": False,
    "echo": False,
}


def read_wishes(body: Body, max_tokens: int | None) -> Wishes:
    """How a client of an OpenAI-style API would like its tokens sampled."""
    top_k = whole(body, "top_k", -1)
    return Wishes(
        max_tokens=max_tokens,
        temperature=number(body, "temperature", 0.0),
        top_p=number(body, "top_p", 0.0, 1.0),
        top_k=None if top_k is None else max(top_k, 0),
        min_p=number(body, "min_p", 0.0, 1.0),
        stop=strings(body, "stop"),
        stop_token_ids=tuple(int(token) for token in items(body, "stop_token_ids")),
        seed=whole(body, "seed", -(2**63)),
    )


def read(body: Body, mark: RetryMark) -> Request:
    """The request that a body makes.

    Raises:
        RequestError: it is malformed, or asks for what can't be done.
    """
    check_names(body, _HONOURED, _WITHOUT_EFFECT, _OFF)
    if whole(body, "top_logprobs", 0, 20):
        raise refused("top_logprobs", "only the log-probability of the sampled token is known; ask for 0")
    limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := whole(body, name, 1)) is not None]
    return Request(
        messages=tuple(plain_message(m, f"messages[{position}]") for position, m in enumerate(items(body, "messages"))),
        tools=tuple(plain_tool(tool, f"tools[{position}]") for position, tool in enumerate(items(body, "tools"))),
        tool_choice=_tool_choice(body.get("tool_choice")),
        parallel_calls=flag(body, "parallel_tool_calls", True),
        wishes=read_wishes(body, min(limits, default=None)),
        n=whole(body, "n", 1, 128) or 1,
        prompt_ids=flag(body, "return_token_ids"),
        mark=mark,
        answer=answer_schema(body.get("response_format"), "response_format"),
    )


def _tool_choice(choice: Any) -> str:
    if choice is None:
        return "auto"
    if choice in ("auto", "none", "required"):
        return str(choice)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = choice.get("function", choice).get("name")
        if isinstance(name, str) and name:
            return name
    raise RequestError(
        f'tool_choice: it is {choice!r}, but must be "auto", "none", "required" or a function', parameter="tool_choice"
    )


def usage(answers: list[Answer]) -> dict[str, Any]:
    """Tokens as chat completions count them."""
    prompt = answers[0].prompt_tokens
    sampled = sum(len(answer.sample.tokens) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": answers[0].sample.cached},
    }


def write(body: Body, answers: list[Answer], identity: str, model: str, text: TokenText) -> dict[str, Any]:
    """The response."""
    written: dict[str, Any] = {
        "id": f"chatcmpl-{identity}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(body, position, answer, text) for position, answer in enumerate(answers)],
        "usage": usage(answers),
        "weight_version": _version(answers[0]),
    }
    if body.get("return_token_ids"):
        written["prompt_token_ids"] = answers[0].prompt
    return written


def _choice(body: Body, position: int, answer: Answer, text: TokenText) -> dict[str, Any]:
    message = {**answer.message, "content": answer.message["content"] or None, "refusal": None}
    if not answer.message.get("tool_calls"):
        message["content"] = answer.message["content"]
    choice = {
        "index": position,
        "message": message,
        "finish_reason": answer.finish,
        "logprobs": {"content": logprobs(answer, text)} if body.get("logprobs") else None,
        "stop_reason": answer.stop_string,
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = answer.sample.tokens
    return choice


def logprobs(answer: Answer, text: TokenText) -> list[dict[str, Any]]:
    """The log-probability of each sampled token."""
    return [
        {"token": piece, "bytes": list(raw), "logprob": logprob, "top_logprobs": []}
        for (piece, raw), logprob in zip(map(text.piece, answer.sample.tokens), answer.sample.logprobs, strict=True)
    ]


class Events:
    """The chunks of a streamed response. See `fields.Events`."""

    def __init__(self, body: Body, identity: str, model: str, text: TokenText) -> None:
        self._body, self._text = body, text
        self._said: dict[int, int] = {}  # characters of each reply's content that were sent
        self._head = {
            "id": f"chatcmpl-{identity}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }

    def started(self, prompt: list[int]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        return self._opened(0, prompt)

    def said(self, reply: int, text: str) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        yield from self._opened(reply)
        self._said[reply] += len(text)
        yield self._chunk(reply, {"content": text})

    def ended(self, answers: list[Answer]) -> Iterator[dict[str, Any]]:
        """See `fields.Events`."""
        for position, answer in enumerate(answers):
            yield from self._opened(position, answer.prompt)
            for delta in _deltas(answer, self._said[position]):
                yield self._chunk(position, delta)
            last: dict[str, Any] = {"index": position, "finish_reason": answer.finish, "delta": {}}
            if self._body.get("logprobs"):
                last["logprobs"] = {"content": logprobs(answer, self._text)}
            if self._body.get("return_token_ids"):
                last["token_ids"] = answer.sample.tokens
            yield {**self._head, "choices": [last]}
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield {**self._head, "choices": [], "usage": usage(answers)}

    def _opened(self, reply: int, prompt: list[int] | None = None) -> Iterator[dict[str, Any]]:
        """The first chunk of a reply, once."""
        if reply in self._said:
            return
        self._said[reply] = 0
        opened = self._chunk(reply, {"role": "assistant", "content": ""})
        if self._body.get("return_token_ids"):
            opened["prompt_token_ids"] = prompt if reply == 0 else None
        yield opened

    def _chunk(self, reply: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "choices": [{"index": reply, "finish_reason": None, "delta": delta}]}


def _deltas(answer: Answer, said: int) -> Iterator[dict[str, Any]]:
    """What was not sent yet."""
    if reasoning := answer.message.get("reasoning_content"):
        yield {"reasoning_content": reasoning}
    if content := answer.message["content"][said:]:
        yield {"content": content}
    for position, call in enumerate(answer.message.get("tool_calls", ())):
        yield {"tool_calls": [{"index": position, **call}]}


def _version(answer: Answer) -> int | None:
    return answer.sample.versions[-1] if answer.sample.versions else None
