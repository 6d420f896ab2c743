"""However fast text becomes tokens, they are the tokenizer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from strop.sampling.encoding import text_functions

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
#: Ordinary text, and what splits strangely: contractions, digits, white space, scripts, joined signs, controls.
texts = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [
                "I'll ",
                "DON'T",
                "  ",
                "\n\n\n",
                "\r\n",
                " 1024",
                "٣४",
                "日本語",
                "👩‍👧‍👦",
                "\x00\x1c",
                "<|im_end|>",
                "naïve",
            ]
        ),
    ),
    max_size=8,
).map("".join)


def trained(pre_tokenizer: Any, normalizer: Any = None) -> Any:
    """A tokenizer with merges, made from the documentation."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    backend.train([str(page) for page in PAGES], trainer)
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
TOKENIZERS = {
    "digits apart, as the start model": trained(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), PLAIN])
    ),
    "bytes": trained(PLAIN),
    "normalised": trained(PLAIN, normalizers.NFC()),
    "lower case, a space in front": trained(pre_tokenizers.ByteLevel(add_prefix_space=True), normalizers.Lowercase()),
}


@pytest.mark.parametrize("name", list(TOKENIZERS))
def test_tokens_are_the_tokenizers_own(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    encode, decode = text_functions(tokenizer)

    @settings(max_examples=400, deadline=None)
    @given(texts)
    @example("\n".join(page.read_text() for page in PAGES[:3]))
    def agrees(text: str) -> None:
        ids = encode(text)
        assert ids == tokenizer.encode(text, add_special_tokens=False)
        assert decode(ids) == tokenizer.decode(ids)

    agrees()
