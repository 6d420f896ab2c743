"""Which tokens may come next within a grammar of `grammars`: worked out by llguidance (`pip install
"strop[constrained]"`). Drawing one of them is the sampler's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from strop.errors import StropError

_KEPT = 64  # grammars that need not be read again


class Constraints:
    """Makes constraints over one model's tokens; may be used by several threads.

    Args:
        tokenizer: the model's transformers tokenizer, a fast one.

    Raises:
        StropError: llguidance is not installed, or can't read the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ModuleNotFoundError as error:
            raise StropError(
                f'sampling within a schema needs {error.name!r}, which is missing: pip install "strop[constrained]"'
            ) from error
        self._library = llguidance
        self._begun: OrderedDict[str, Any] = OrderedDict()  # matchers that took no token, by grammar
        self._lock = threading.Lock()
        try:
            self._tokens = llguidance.hf.from_tokenizer(tokenizer)
        except ValueError as error:
            raise StropError(f"sampling within a schema can't be done with this model's tokenizer: {error}") from error

    def begin(self, grammar: str) -> Constraint:
        """A constraint at its beginning. Takes a moment for a large grammar.

        Raises:
            StropError: the grammar is wrong: a schema that says what can't be kept, for example.
        """
        with self._lock:
            matcher = self._begun.pop(grammar, None) or self._library.LLMatcher(self._tokens, grammar, log_level=0)
            if matcher.is_error():
                raise StropError(matcher.get_error())
            self._begun[grammar] = matcher
            if len(self._begun) > _KEPT:
                self._begun.popitem(last=False)
            return Constraint(matcher.deep_copy())


class Constraint:
    """What one sequence may go on with. Made by `Constraints`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, vocabulary: int) -> Tensor:
        """(vocabulary,) whether each token may come next; at least one may.

        Args:
            vocabulary: how many tokens the model gives logits for.

        Raises:
            StropError: the grammar became too large to be followed.
        """
        found = torch.zeros(vocabulary, dtype=torch.bool)
        if not self._matcher.is_error():
            known = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
            known = known[:vocabulary]
            found[: len(known)] = known > 0
        if not found.any():
            raise StropError(f"the grammar can't be followed any more: {self._matcher.get_error()}")
        return found

    def take(self, token: int) -> bool:
        """Go on with a token; whether nothing may follow it."""
        self._matcher.consume_token(token)
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())
