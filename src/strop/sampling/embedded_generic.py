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

from strop.models.carried import check_carried
from strop.models.experts import Routing
from strop.models.lora import base_of
from strop.models.passes import Pass, running
from strop.models.policy import Policy
from strop.sampling.embedded_sequence import Sequence

#: Prompts whose caches are kept for further members of their group.
PROMPTS_KEPT = 4


class GenericEngine:
    """One sequence at a time. See `strop.sampling.embedded_sequence.Engine`.

    Args:
        policy: a transformers causal LM. What its routers choose is recorded with every sequence.
        slots: most sequences at once.

    Raises:
        ModelError: the model breaks what a sampler or learner relies on; see `strop.models.carried`.
    """

    def __init__(self, policy: Policy, slots: int) -> None:
        check_carried(policy)
        self.policy, self.model, self.slots = policy, policy.model, slots
        self.active: list[Sequence] = []
        self.prefilled = 0
        arguments = inspect.signature(base_of(policy.model).forward).parameters
        self._cache_name = "cache" if "cache" in arguments else "past_key_values"  # its name from transformers 5.40 on
        self._narrow = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self._caches: dict[Sequence, Any] = {}
        self._prompts: OrderedDict[tuple[str, bytes], tuple[Any, Tensor, Tensor | None]] = OrderedDict()

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
        out, experts = self._forward(sequence.adapter, torch.tensor([sequence.tokens[-1:]]), self._caches[sequence])
        if experts is not None:
            sequence.experts.append(experts)
        return out.logits[0, -1]  # type: ignore[no-any-return]

    def _prefill(self, sequence: Sequence) -> Tensor:
        key = (sequence.adapter, sequence.prompt.tobytes())
        if key in self._prompts:
            self._prompts.move_to_end(key)
            sequence.cached = len(sequence.prompt)
        else:
            out, experts = self._forward(sequence.adapter, torch.from_numpy(sequence.prompt)[None], None)
            self._prompts[key] = (out[self._cache_name], out.logits[0, -1], experts)
            self.prefilled += len(sequence.prompt)
            if len(self._prompts) > PROMPTS_KEPT:
                self._prompts.popitem(last=False)
        cache, logits, experts = self._prompts[key]
        self._caches[sequence] = copy.deepcopy(cache)
        if experts is not None:
            sequence.experts.append(experts)
        return logits

    def _forward(self, adapter: str, tokens: Tensor, cache: Any) -> tuple[Any, Tensor | None]:
        """The model's output, and (tokens, layers, per_token) what its routers chose."""
        routing = Routing() if self.policy.experts else None
        past = {self._cache_name: cache}
        with running(Pass(adapter=adapter, routing=routing)):
            out = self.model(tokens.to(self.policy.device), use_cache=True, **self._narrow, **past)
        return out, routing.all_chosen() if routing else None
