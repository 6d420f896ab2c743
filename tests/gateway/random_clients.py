"""Three clients that keep a history in their API's own form, and a sampler of random tokens, for the property test."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strop.gateway import Attempt, Engine
from strop.gateway.attempts import RetryMark
from strop.gateway.dialects import anthropic, chat, responses
from strop.rollouts import FinishReason
from strop.sampling.sampler import Sample, SamplingParams

END = "<|im_end|>"


def ambiguous_tokenizer() -> Any:
    """A tokenizer in which the same text has many encodings, as real ones do: re-encoding it would be noticed."""
    markers = ["<|endoftext|>", "<|im_start|>", END]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [
        ("t", "h"),
        ("th", "e"),
        ("a", "n"),
        ("an", "d"),
        ("Ġ", "t"),
        ("o", "o"),
        ("1", "2"),
        ('"', ":"),
        ("{", '"'),
    ]
    merged = [first + second for first, second in pairs]
    vocabulary = {text: number for number, text in enumerate([*markers, *letters, *merged])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END, unk_token="<|endoftext|>")


class RandomSampler:
    """Says random things in random encodings. Every token it ever samples has a log-probability of its own."""

    version, max_context = 0, 100_000

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.seen: list[tuple[list[int], list[int], list[float]]] = []
        self._drawn = 0

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        for _ in range(self.rng.randrange(3)):  # replies come back in any order
            await asyncio.sleep(0)
        tokens = [token for part in self._say() for token in part]
        finish = FinishReason.STOP if self.rng.random() < 0.9 else FinishReason.LENGTH
        if finish is FinishReason.STOP:
            tokens.append(self.tokenizer.convert_tokens_to_ids(END))
        logprobs = [-(self._drawn + number) * 1e-6 for number in range(len(tokens))]
        self._drawn += len(tokens)
        self.seen.append((list(prompt), tokens, logprobs))
        return Sample(list(tokens), list(logprobs), [self.version] * len(tokens), finish)

    def _say(self) -> list[list[int]]:
        rng = self.rng
        said = []
        for _ in range(rng.randrange(4)):
            kind = rng.randrange(6)
            if kind == 0:
                said.append(
                    [rng.randrange(3, len(self.tokenizer)) for _ in range(rng.randrange(6))]
                )  # any bytes at all
            elif kind == 1:
                value = rng.choice(["pear", "", "Ünïcødé", 12, None, [1, {"b": 1, "a": 2}], "a</tool_call>b"])
                written = json.dumps(
                    {"item": value, "b": 1}, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5
                )
                said.append(self._encode(f'<tool_call>{{"name":  "lookup", "arguments": {written}}}</tool_call>'))
            elif kind == 2:
                said.append(self._encode(rng.choice(["<tool_call>{nope</tool_call>", "<tool_call>", "</tool_call>"])))
            else:
                said.append(
                    self._encode(rng.choice([" the and ", "12 too", "\n\n", "  ", "日本 🎈 naïve", "Observation:"]))
                )
        return said

    def _encode(self, text: str) -> list[int]:
        """One of the text's encodings: cut anywhere, each piece encoded for itself."""
        ids: list[int] = []
        while text:
            at = self.rng.randrange(1, 4)
            ids += self.tokenizer.encode(text[:at], add_special_tokens=False)
            text = text[at:]
        return ids

    async def close(self) -> None:
        return None


class Client:
    """A history in one API's form. Whatever it sends passes through JSON, as it would over a wire."""

    parameters: ClassVar[dict[str, Any]] = {"type": "object", "properties": {"item": {}}}

    def __init__(self, engine: Engine, attempt: Attempt, api: str, system: str, tools: bool) -> None:
        self.engine, self.attempt, self.api = engine, attempt, api.removesuffix(" anew")
        self.anew = api.endswith(" anew")  # it strips what it gets and writes arguments in its own way
        self.system, self.tools = system, tools
        self.said: list[Any] = []
        self.open_calls: list[str] = []

    def body(self, n: int = 1) -> dict[str, Any]:
        """The request, history and all."""
        function = {"name": "lookup", "description": "Look up.", "parameters": self.parameters}
        if self.api == "chat":
            messages = [{"role": "system", "content": self.system}, *self.said] if self.system else self.said
            body: dict[str, Any] = {"messages": messages, "n": n}
            tools: list[dict[str, Any]] = [{"type": "function", "function": function}]
        elif self.api == "responses":
            body, tools = {"input": self.said, "instructions": self.system or None}, [{"type": "function", **function}]
        else:
            body = {"messages": self.said, "system": self.system or None, "max_tokens": 5000}
            tools = [{"name": "lookup", "description": "Look up.", "input_schema": self.parameters}]
        if self.tools:
            body["tools"] = tools
        loaded: dict[str, Any] = json.loads(json.dumps(body))
        return loaded

    async def ask(self, mark: RetryMark = RetryMark(), n: int = 1) -> list[int]:  # noqa: B008
        """Ask for a reply and add the first one to the history; the numbers of the sampled calls that it may be."""
        body = self.body(n)
        if self.api == "chat":
            request = chat.read(body, mark)
        elif self.api == "responses":
            request = responses.read(body, mark, {})
        else:
            request = anthropic.read(body, mark)
        answers = await self.engine.answer(request, self.attempt)
        writer: Any = {"chat": chat, "responses": responses, "anthropic": anthropic}[self.api]
        written = json.loads(json.dumps(writer.write(body, answers, "id", "tiny", self.engine.text)))
        if self.api == "chat":
            message = written["choices"][0]["message"]
            self.said.append(_anew(message) if self.anew else message)
            self.open_calls = [call["id"] for call in message.get("tool_calls", ())]
        elif self.api == "responses":
            self.said += written["output"]
            self.open_calls = [item["call_id"] for item in written["output"] if item["type"] == "function_call"]
        else:
            self.said.append({"role": "assistant", "content": written["content"]})
            self.open_calls = [block["id"] for block in written["content"] if block["type"] == "tool_use"]
        return [self._index(answer) for answer in answers]

    def _index(self, answer: Any) -> int:
        calls = self.attempt.rollout.calls
        return next(index for index, call in enumerate(calls) if call.tokens is answer.sample.tokens)

    def say(self, text: str) -> None:
        """Answer its calls, if it made some, and say something if it made none."""
        calls, self.open_calls = self.open_calls, []
        if self.api == "chat":
            self.said += [{"role": "tool", "tool_call_id": call, "content": text} for call in calls]
            if not calls:
                self.said.append({"role": "user", "content": [{"type": "text", "text": text}] if text else text})
        elif self.api == "responses":
            self.said += [{"type": "function_call_output", "call_id": call, "output": text} for call in calls]
            if not calls:
                self.said.append({"role": "user", "content": text})
        else:
            results = [{"type": "tool_result", "tool_use_id": call, "content": text} for call in calls]
            self.said.append({"role": "user", "content": results or text})


def _anew(message: dict[str, Any]) -> dict[str, Any]:
    calls = json.loads(json.dumps(message.get("tool_calls", [])))
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), separators=(",", ":"))
    return {"role": "assistant", "content": (message["content"] or "").strip(), "tool_calls": calls}
