"""What tests of several rooms share: a small ChatML tokenizer like the start model's, and a sampler that plays a script."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from strop.errors import BatchError
from strop.rollouts import FinishReason
from strop.sampling.sampler import Sample, SamplingParams

#: SmolLM2-Instruct's own chat template: no tools, a default system message, no generation tags.
CHATML_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """A byte-level tokenizer with the start model's template and its trap: pad, eos and end-of-turn are one token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    markers = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*markers, *letters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=CHATML_TEMPLATE,
    )


class ScriptedSampler:
    """Says what a script says, token by token; records what it was asked.

    The script maps the number of the request and its prompt to a text; a text without the end-of-turn marker ends
    with LENGTH, as a cut-off reply does.
    """

    def __init__(self, tokenizer: Any, script: Sequence[str] | Callable[[int, list[int]], str]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.version, self.max_context = 0, 8192

    async def sample(self, prompt: Sequence[int], params: SamplingParams, *, deadline: float | None = None) -> Sample:
        if not prompt or len(prompt) >= self.max_context:
            raise BatchError(f"a prompt of {len(prompt)} tokens doesn't fit")
        number = len(self.prompts)
        self.prompts.append(list(prompt))
        self.params.append(params)
        await asyncio.sleep(0)
        text = self.script(number, list(prompt)) if callable(self.script) else self.script[number]
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        room = min(params.max_tokens, self.max_context - len(prompt))
        cut = len(tokens) > room or tokens[-1] not in params.stop_token_ids
        tokens = tokens[:room]
        return Sample(
            tokens=tokens,
            logprobs=[-0.5] * len(tokens),
            versions=[self.version] * len(tokens),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
        )

    async def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def scripted_sampler(chat_tokenizer: Any) -> Callable[..., ScriptedSampler]:
    """Makes a `ScriptedSampler` on the small tokenizer."""
    return lambda script: ScriptedSampler(chat_tokenizer, script)
