"""The engine for any other transformers causal LM: its own forward and its own cache, one sequence at a time.

Slower than `embedded_fused` by as much as batching gains, and just as reproducible: a prompt is always computed whole,
in one forward pass, then token by token, so that nothing depends on what else is sampled. Only members of a group,
whose prompts are the same, share a prefill; a later turn computes its history again.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from strop.sampling.embedded_sequence import Sequence

#: Prompts whose caches are kept for further members of their group.
PROMPTS_KEPT = 4


class GenericEngine:
    """One sequence at a time. See `strop.sampling.embedded_sequence.Engine`.

    Args:
        model: a transformers causal LM.
        slots: most sequences at once.
    """

    def __init__(self, model: Any, slots: int) -> None:
        self.model, self.slots = model, slots
        self.device = next(model.parameters()).device
        self.active: list[Sequence] = []
        self.prefilled = 0
        arguments = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # its name from transformers 5.40 on
        self._caches: dict[Sequence, Any] = {}
        self._prompts: OrderedDict[bytes, tuple[Any, Tensor]] = OrderedDict()

    def weights_changed(self) -> None:
        """Prompts computed with older weights serve no new request."""
        self._prompts.clear()

    def resumes(self, sequence: Sequence) -> bool:
        """Never: a later turn computes its history again."""
        return False

    def admit(self, sequence: Sequence) -> bool:
        """Take a place."""
        if len(self.active) >= self.slots:
            return False
        self.active.append(sequence)
        return True

    @torch.inference_mode()
    def step(self) -> tuple[list[Sequence], Tensor | None]:
        """One token for every sequence."""
        if not self.active:
            return [], None
        logits = [self._decode(s) if s in self._caches else self._prefill(s) for s in self.active]
        return list(self.active), torch.stack(logits)

    def append(self, sequence: Sequence, token: int) -> None:
        """Nothing to do: the token is computed in the next step."""

    def release(self, sequence: Sequence) -> None:
        """Drop its cache."""
        self.active.remove(sequence)
        self._caches.pop(sequence, None)

    def _decode(self, sequence: Sequence) -> Tensor:
        out = self._forward(torch.tensor([sequence.tokens[-1:]]), self._caches[sequence])
        return out.logits[0, -1]  # type: ignore[no-any-return]

    def _prefill(self, sequence: Sequence) -> Tensor:
        key = sequence.prompt.tobytes()
        if key in self._prompts:
            self._prompts.move_to_end(key)
            sequence.cached = len(sequence.prompt)
        else:
            out = self._forward(torch.from_numpy(sequence.prompt)[None], None)
            self._prompts[key] = (out[self._cache_name], out.logits[0, -1])
            self.prefilled += len(sequence.prompt)
            if len(self._prompts) > PROMPTS_KEPT:
                self._prompts.popitem(last=False)
        cache, logits = self._prompts[key]
        self._caches[sequence] = copy.deepcopy(cache)
        return logits

    def _forward(self, tokens: Tensor, cache: Any) -> Any:
        past = {self._cache_name: cache}
        return self.model(tokens.to(self.device), use_cache=True, logits_to_keep=1, **past)
