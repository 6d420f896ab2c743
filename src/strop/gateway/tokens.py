"""What single tokens and streams of them say: text, and the exact bytes of each token, which need not be whole
characters. Messages are the renderer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any


class TokenText:
    """Between token ids and text.

    Args:
        tokenizer: the model's transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._special = frozenset(getattr(tokenizer, "added_tokens_decoder", {}))
        self.piece = lru_cache(maxsize=65536)(self._piece)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Tokens of a text; `special` adds those that the tokenizer puts around every text."""
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        return list(self._backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Text of tokens."""
        if self._backend is None:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=not keep_special))
        return str(self._backend.decode(list(ids), skip_special_tokens=not keep_special))

    def _piece(self, token: int) -> tuple[str, bytes]:
        """One token as text, with a replacement sign for bytes that are no whole character, and as bytes."""
        if token not in self._special and self._backend is not None:
            letters = self._backend.id_to_token(token)
            if letters is not None and all(letter in _BYTES for letter in letters) and self._is_byte_level:
                raw = bytes(_BYTES[letter] for letter in letters)
                return raw.decode("utf-8", "replace"), raw
        text = self.decode([token], keep_special=True)
        return text, text.encode()

    @property
    def _is_byte_level(self) -> bool:
        decoder = getattr(self._backend, "decoder", None)
        return type(decoder).__name__ == "ByteLevel"


def _byte_letters() -> dict[str, int]:
    """The letter that stands for each byte in byte-level vocabularies (GPT-2's bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return letters | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _byte_letters()
