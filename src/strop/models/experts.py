"""Mixture-of-experts blocks of transformers models: what their routers choose is recorded or replayed, and the chosen
experts are computed in groups, tokens sorted by expert. A block has a router that gives (logits, weights, chosen) and
experts that take (hidden, chosen, weights); one that is built otherwise is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable
from torch.overrides import TorchFunctionMode

from strop.errors import ModelError
from strop.models.gates import gate, gate_slopes
from strop.models.passes import ask, current

#: Under this name transformers finds `grouped_experts`.
IMPLEMENTATION = "strop"


#: Where configurations say how many experts there are.
_SIZES = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The sparse layers of a model.

    Attributes:
        layers: how many there are.
        experts: of each.
        per_token: how many of them compute a token.
        routers: their modules, first to last.
    """

    layers: int
    experts: int
    per_token: int
    routers: tuple[nn.Module, ...]

    def parameters(self) -> list[Tensor]:
        """The routers' weights."""
        return [parameter for router in self.routers for parameter in router.parameters()]


@dataclass(slots=True, eq=False)
class Routing:
    """What the routers choose in one pass.

    Attributes:
        given: (tokens, layers, per_token) experts to use; -1 where the router shall choose by itself. None: everywhere.
        keep_scores: whether each router's probabilities are kept, with their gradient.
        chosen: by layer, (tokens, per_token) experts that were used.
        scores: by layer, (tokens, experts) fp32 probabilities before the choice.
        differing: by layer, (tokens,) bool, whether the router would have chosen other ones than it was given.
    """

    given: Tensor | None = None
    keep_scores: bool = False
    chosen: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, Tensor] = field(default_factory=dict)
    differing: dict[int, Tensor] = field(default_factory=dict)

    def all_chosen(self) -> Tensor:
        """(tokens, layers, per_token)."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], dim=1)


def find_experts(model: nn.Module) -> ExpertLayout | None:
    """The sparse layers of a transformers model; None if it has none.

    Raises:
        ModelError: a block has no router of the kind that can be recorded and replayed, or blocks differ in size.
    """
    routers: list[nn.Module] = []
    sizes: set[tuple[int, int]] = set()
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module):
            continue
        found: list[Any] = [child for child in block.children() if child is not experts and _is_router(child)]
        if len(found) != 1 or not hasattr(experts, "is_transposed"):
            raise ModelError(
                f"the model's {name} is a {type(block).__name__}, whose experts can't be carried: a block needs one "
                "router with num_experts and top_k, and experts stored as (experts, …) tensors, as in Qwen3-MoE, gpt-oss, "
                "DeepSeek-V3 or Nemotron-H"
            )
        routers.append(found[0])
        sizes.add((int(found[0].num_experts), int(found[0].top_k)))
    if not routers:
        sizes_asked = {name: getattr(getattr(model, "config", None), name, 0) for name in _SIZES}
        if any(isinstance(size, int) and size > 1 for size in sizes_asked.values()):
            raise ModelError(
                f"{type(model).__name__} has experts in its configuration, but no blocks of the kind that can be carried: "
                "a router that chooses by one topk, and experts stored as (experts, …) tensors"
            )
        return None
    if len(sizes) > 1:
        raise ModelError(f"the model's sparse layers differ in (experts, experts per token): {sorted(sizes)}")
    ((experts_each, per_token),) = sizes
    return ExpertLayout(len(routers), experts_each, per_token, tuple(routers))


def _is_router(module: nn.Module) -> bool:
    return isinstance(getattr(module, "top_k", None), int) and isinstance(getattr(module, "num_experts", None), int)


def prepare_experts(model: nn.Module) -> ExpertLayout | None:
    """Find a model's sparse layers; have its routers ask the pass, and its experts computed by `grouped_experts`.

    Raises:
        ModelError: as in `find_experts`, or a router does not follow what it is given.
    """
    layout = find_experts(model)
    if layout is None:
        return None
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, grouped_experts)
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            module.config._experts_implementation = IMPLEMENTATION  # type: ignore[union-attr]
    router: Any
    for number, router in enumerate(layout.routers):
        router.layer = number
        ask(router, Asked)
        _check_follows(router)
    return layout


class Asked:
    """A router that records or replays its choice, if the pass says so.

    Attributes:
        layer: its number among the sparse layers.
    """

    layer: Any

    def forward(self, hidden: Tensor) -> Any:
        """(logits, weights, chosen), as the router's own."""
        forward, routing = super().forward, current().routing  # type: ignore[misc]
        if routing is None:
            return forward(hidden)
        forced = None
        if routing.given is None:
            logits, weights, chosen = forward(hidden)
        else:
            with _Forced(self, routing.given[:, self.layer]) as forced:
                logits, weights, chosen = forward(hidden)
        # A layer that is computed again for its backward pass comes here twice, and must do the same both times.
        routing.chosen.setdefault(self.layer, chosen.detach())
        if routing.keep_scores:
            routing.scores.setdefault(self.layer, _scores(self, logits))
        if forced is not None and forced.own is not None:
            same = (forced.own.sort(-1).values == chosen.sort(-1).values).all(-1)
            routing.differing.setdefault(self.layer, ~same)
        return logits, weights, chosen


def _scores(router: Any, logits: Tensor) -> Tensor:
    """(tokens, experts) probabilities: softmax, or for sigmoid routers (DeepSeek-V3) their share of the sum."""
    logits = logits.float().reshape(-1, logits.shape[-1])
    if not hasattr(router, "e_score_correction_bias"):
        return logits.softmax(-1)
    scores = logits.sigmoid()
    return scores / scores.sum(-1, keepdim=True)


class _Forced(TorchFunctionMode):
    """Makes a router's choice among all of its experts for it; its weights follow from that as from its own.

    Every router ends in one `topk` over (tokens, experts); choices among groups of experts have other shapes.
    """

    def __init__(self, router: Any, given: Tensor) -> None:
        super().__init__()
        self.shape = (len(given), router.num_experts)
        self.given = given
        self.own: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].shape != self.shape:
            return result
        if result[1].shape != self.given.shape:
            return result
        self.own = result[1]
        chosen = torch.where(self.given < 0, self.own, self.given)
        return args[0].gather(-1, chosen), chosen


@torch.no_grad()
def _check_follows(router: Any) -> None:
    """Try a router out: given another choice than its own, it must give that choice and weights that fit it."""
    weight = next(router.parameters())
    experts, per_token = int(router.num_experts), int(router.top_k)
    hidden = torch.linspace(-1, 1, 2 * weight.shape[-1], device=weight.device).to(weight.dtype).view(2, -1)
    own = router(hidden)[2]
    given = torch.stack([(own[row] + 1) % experts for row in range(2)])
    with _Forced(router, given):
        _, weights, chosen = router(hidden)
    if not torch.equal(chosen, given) or weights.shape != (2, per_token):
        raise ModelError(
            f"the router {type(router).__name__} can't be carried: it does not choose its experts by one topk over all of "
            "them, so a choice could neither be recorded nor replayed"
        )


# -- computing the chosen experts ---------------------------------------------------------------------------------------


def grouped_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What the chosen experts make of each token, in as many matrix products as there are experts with tokens.

    Args:
        module: transformers' experts: `gate_up_proj` (or `up_proj`) and `down_proj` over (experts, …).
        hidden: (tokens, hidden).
        chosen, weights: (tokens, per_token).

    Returns:
        (tokens, hidden).
    """
    order = chosen.reshape(-1).argsort(stable=True)
    counts = torch.bincount(chosen.reshape(-1), minlength=module.num_experts).tolist()

    def matrix(x: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias", None) if module.has_bias else None
        return grouped_linear(x, getattr(module, name), bias, counts, module.is_transposed)

    rows: Tensor = _Dispatch.apply(hidden, order, weights.shape[-1])  # type: ignore[no-untyped-call]
    inner = matrix(rows, "gate_up_proj" if module.has_gate else "up_proj")
    inner = _activated(module, inner)
    out = matrix(inner, "down_proj")
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    return _Combine.apply(out, weights, order)  # type: ignore[no-any-return, no-untyped-call]


def _activated(module: Any, inner: Tensor) -> Tensor:
    if not module.has_gate:
        return module.act_fn(inner)  # type: ignore[no-any-return]
    from transformers.integrations.moe import _default_apply_gate

    plain = type(module)._apply_gate is _default_apply_gate and isinstance(module.act_fn, nn.SiLU)
    return gated(inner) if plain else module._apply_gate(inner)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of (rows, 2 · width), gate first: (rows, width)."""
    return _Gated.apply(gate_up)  # type: ignore[no-any-return, no-untyped-call]


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counts: Sequence[int], transposed: bool = False
) -> Tensor:
    """Each expert's linear layer on its rows.

    Args:
        x: (rows, in), sorted by expert.
        weight: (experts, out, in), or (experts, in, out) if `transposed`.
        bias: (experts, out).
        counts: rows of each expert.
    """
    gradient_of = current().gradient_of
    gradient = gradient_of(weight) if gradient_of else None
    out: Tensor = _GroupedLinear.apply(x, weight, counts, transposed, gradient)  # type: ignore[no-untyped-call]
    if bias is not None:
        rows = torch.arange(len(counts), device=x.device).repeat_interleave(torch.tensor(counts, device=x.device))
        out = out + bias[rows]
    return out


class _Dispatch(Function):
    """Rows sorted by expert: each token as often as it has experts. Arguments: x (tokens, …), order, per_token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, per_token: int) -> Tensor:
        """(tokens · per_token, …)."""
        ctx.save_for_backward(order)
        ctx.shape = (len(x), per_token, *x.shape[1:])
        return x.index_select(0, order // per_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Each token's sum over its experts, in fp32."""
        (order,) = ctx.saved_tensors
        inverse = _inverse(order).view(ctx.shape[:2])
        total = upstream.index_select(0, inverse[:, 0]).float()
        for number in range(1, ctx.shape[1]):
            total += upstream.index_select(0, inverse[:, number])
        return total.to(upstream.dtype), None, None


class _Combine(Function):
    """Σ weight · row over each token's experts. Arguments: rows sorted by expert, weights (tokens, per_token), order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        """(tokens, hidden); summed in fp32."""
        ctx.save_for_backward(rows, weights, order)
        inverse = _inverse(order).view(weights.shape)
        total = torch.zeros((len(weights), rows.shape[1]), dtype=torch.float32, device=rows.device)
        for number in range(weights.shape[1]):
            total.addcmul_(rows.index_select(0, inverse[:, number]), weights[:, number, None])
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """A row's gradient is its token's, weighted; a weight's, the product of row and upstream."""
        rows, weights, order = ctx.saved_tensors
        per_token = weights.shape[1]
        spread = upstream.index_select(0, order // per_token)
        d_weights = torch.empty_like(order, dtype=torch.float32)
        d_weights[order] = (spread * rows).sum(-1, dtype=torch.float32)
        d_rows = spread.mul_(weights.reshape(-1)[order][:, None])
        return d_rows, d_weights.view(weights.shape).to(weights.dtype), None


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _GroupedLinear(Function):
    """See `grouped_linear`. With an fp32 `gradient` buffer, the weight's gradient is added there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int], transposed: bool, gradient: Tensor | None
    ) -> Tensor:
        """(rows, out)."""
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.transposed, ctx.gradient = counts, transposed, gradient
        out = x.new_empty((len(x), weight.shape[2 if transposed else 1]))
        for expert, rows in _stretches(counts):
            matrix = weight[expert] if transposed else weight[expert].T
            torch.mm(x[rows], matrix, out=out[rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """dx = dy W; dW += dyᵀ x, expert by expert."""
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        d_weight = torch.zeros_like(weight) if wanted and ctx.gradient is None else None
        d_x = torch.empty_like(x)
        for expert, rows in _stretches(ctx.counts):
            matrix = weight[expert].T if ctx.transposed else weight[expert]
            torch.mm(upstream[rows], matrix, out=d_x[rows])
            left, right = (x, upstream) if ctx.transposed else (upstream, x)
            if d_weight is not None:
                torch.mm(left[rows].T, right[rows], out=d_weight[expert])
            elif wanted:
                ctx.gradient[expert].add_(left[rows].T @ right[rows])
        return d_x, d_weight, None, None, None


def _stretches(counts: Sequence[int]) -> list[tuple[int, slice]]:
    """Experts with rows, and where those are."""
    found, start = [], 0
    for expert, count in enumerate(counts):
        if count:
            found.append((expert, slice(start, start + count)))
        start += count
    return found


class _Gated(Function):
    """silu(gate) · up, of which only gate and up are kept."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        """(rows, 2 · width) to (rows, width)."""
        ctx.save_for_backward(gate_up)
        return gate(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        """Computes silu again."""
        return gate_slopes(ctx.saved_tensors[0], upstream)[0]
