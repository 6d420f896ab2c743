"""What may differ from one forward pass of a module to the next while several threads run it: the adapter it goes
through, what its routers choose, whether layers are computed again for the backward pass. A module is prepared once
(`strop.models.lora`, `strop.models.experts`) and then asks here what holds for the pass of its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from strop.models.experts import Routing


@dataclass(frozen=True, slots=True)
class Pass:
    """Settings of one pass.

    Attributes:
        adapter: the adapter's name; "" for the base alone, None for the one that peft has switched on.
        routing: records or replays what the routers choose; None leaves them alone.
        recompute: keep only the layers' inputs for the backward pass (Chen et al. 2016, arXiv:1604.06174).
        gradient_of: the fp32 buffer in which the gradient of an expert's matrices is summed up, None for a frozen one;
            without it, autograd gives them gradients as it gives them to any other.
        headless: the model gives its last hidden states in the place of logits.
    """

    adapter: str | None = None
    routing: Routing | None = None
    recompute: bool = False
    gradient_of: Callable[[Tensor], Tensor | None] | None = None
    headless: bool = False


_PLAIN = Pass()
_thread = threading.local()


def current() -> Pass:
    """Settings of this thread's pass."""
    return getattr(_thread, "current", _PLAIN)


@contextmanager
def running(settings: Pass) -> Iterator[None]:
    """Passes of this thread have these settings inside."""
    before = current()
    _thread.current = settings
    try:
        yield
    finally:
        _thread.current = before


def ask(module: nn.Module, how: type) -> None:
    """Have a module ask the pass: `how` is a class that stands before its own. A copy of the module asks as well."""
    if not isinstance(module, how):
        kind: Any = type(module)
        module.__class__ = _asking(how, kind)


@cache
def _asking(how: type, kind: type) -> type:
    return type(kind.__name__, (how, kind), {"__module__": kind.__module__})


def recompute_layers(model: nn.Module) -> int:
    """Prepare a transformers model's layers for passes that recompute; gives how many there are."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        ask(layer, Recomputed)
    return len(layers)


class Recomputed:
    """A layer that is computed again for the backward pass, if the pass says so."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """As the layer's own."""
        from torch.utils.checkpoint import checkpoint

        forward, settings = super().forward, current()  # type: ignore[misc]
        if not settings.recompute:
            return forward(*arguments, **options)
        # Autograd may compute the layer again in a thread of its own.
        contexts = lambda: (nullcontext(), running(settings))  # noqa: E731
        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **options)


class LeftOut:
    """An output layer that headless passes leave out."""

    def forward(self, hidden: Tensor) -> Tensor:
        """As the layer's own."""
        return hidden if current().headless else super().forward(hidden)  # type: ignore[misc]
