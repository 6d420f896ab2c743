"""Text to token ids and back, by the fastest way that gives the tokenizer's own ids. Messages are `rendering`'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

#: Words, numbers, contractions, runs of white space, scripts, signs of several code points, controls.
_PROBE = "It's 1024  words,\r\n\n\tdon't YOU'LL! {\"a\": [1.5, null]} naïve – “日本語” हिन्दी 👩‍👧 x²\u00a0\u3000\x00 <|im_end|> "

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


def text_functions(tokenizer: Any) -> tuple[Encode, Decode]:
    """Encode and decode, special tokens included in both directions and none added.

    transformers' wrappers take ten times as long as the tokenizer inside them, and `fastokens`, where it is installed
    and gives the same ids for a text that holds every kind of character, a sixth of that again.

    Args:
        tokenizer: a transformers tokenizer, or whatever satisfies `renderers.base.Tokenizer`.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return (
            lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            lambda ids: str(tokenizer.decode(list(ids))),
        )

    def encode(text: str) -> list[int]:
        # Leaves out where each token stood in the text: the same ids in about two thirds of the time.
        return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    return (
        _faster(backend, encode) or encode,
        lambda ids: str(backend.decode(list(ids), skip_special_tokens=False)),
    )


def _faster(backend: Any, encode: Encode) -> Encode | None:
    """`encode` by another library, if that is there and agrees."""
    try:
        from fastokens import Tokenizer

        other = Tokenizer.from_json_str(backend.to_str())
        agrees = other.encode(_PROBE, add_special_tokens=False).ids == encode(_PROBE)
    except Exception:  # not installed, or a kind of tokenizer that it does not know
        return None
    return (lambda text: list(other.encode(text, add_special_tokens=False).ids)) if agrees else None
