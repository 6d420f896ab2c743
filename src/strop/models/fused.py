"""A plain description of a Llama-family decoder whose projections are fused, sharing storage with the HF module.

`fuse` lays q, k, v (and gate, up) of every layer into one contiguous tensor and makes the module's parameters views
of it: one copy of the weights, fewer and larger matrix products, and the module's own forward, `state_dict` and
`load_state_dict` work on as before. How the decoder is run is not here: samplers and learners each have their pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strop.models.lora import adapters_of, base_of

#: transformers classes whose decoder layers have the layout that `DecoderLayer` describes.
FUSED_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
FUSED_MODELS = tuple(f + task for f in FUSED_FAMILIES for task in ("ForCausalLM", "ForSequenceClassification"))
#: rotary embeddings whose frequencies depend on nothing but the configuration.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of weights, stored once.

    Attributes:
        name: unique within the model; the parameter's own name where it stands for one parameter.
        tensor: what kernels read. A leaf that can carry a gradient.
        parts: name in the HF module and number of rows (first dimension) of each parameter that is a view of it.
    """

    name: str
    tensor: Tensor
    parts: tuple[tuple[str, int], ...]

    def split(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Views of `tensor` (of this weight's shape: a master copy, a gradient, a moment) by HF parameter name."""
        if len(self.parts) == 1:
            yield self.parts[0][0], tensor
            return
        start = 0
        for name, rows in self.parts:
            yield name, tensor[start : start + rows]
            start += rows


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's update of one projection: scale · x aᵀ bᵀ, added to some columns of what a fused matrix gives.

    Attributes:
        a: (rank, in).
        b: (out, rank).
        scale: alpha / rank, or what else peft scales by.
        start: the first of its columns.
    """

    a: Tensor
    b: Tensor
    scale: float
    start: int

    @property
    def columns(self) -> slice:
        """The columns it is added to."""
        return slice(self.start, self.start + self.b.shape[0])


#: A layer's updates by the name of the `DecoderLayer` matrix that they belong to.
LayerUpdates = Mapping[str, tuple[LowRank, ...]]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer; None where the model has none. Matrices are (out, in), as `torch.nn.functional.linear`
    takes them.

    Attributes:
        input_norm, post_norm: RMSNorm weights before attention and before the MLP.
        qkv, qkv_bias: rows of q (heads × head_dim), then k, then v (kv_heads × head_dim each).
        q_norm, k_norm: RMSNorm weights over head_dim, applied before the rotary embedding (Qwen3).
        out, out_bias: attention's output projection.
        gate_up, gate_up_bias: rows of gate (intermediate), then up.
        down, down_bias: the MLP's output projection; its input is silu(gate) · up.
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated SiLU MLP.

    Attributes:
        hidden, intermediate, heads, kv_heads, head_dim, vocab: sizes.
        norm_eps: epsilon inside every RMSNorm.
        attention_scale: multiplies q·k.
        inverse_frequencies: (head_dim / 2,) fp32; the angle of position p is p times it, halves rotated as HF does
            (first half with second half).
        rope_scale: multiplies cos and sin (1 except for yarn).
        embedding: (vocab, hidden).
        head: (vocab, hidden), the same tensor as `embedding` where the two are tied; (1, hidden) of a reward model.
        layers: from first to last.
        final_norm: RMSNorm weight before the head.
        adapters: by adapter, its updates of every layer.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    attention_scale: float
    inverse_frequencies: Tensor
    rope_scale: float
    embedding: Tensor
    head: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    adapters: Mapping[str, tuple[LayerUpdates, ...]] = field(default_factory=dict)

    def updates(self, adapter: str) -> tuple[LayerUpdates, ...]:
        """An adapter's updates of every layer; "" is the base alone, with none."""
        return self.adapters[adapter] if adapter else ({},) * len(self.layers)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of `positions`, each (*positions.shape, head_dim), in the compute dtype, as HF computes them."""
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), dim=-1)
        dtype = self.embedding.dtype
        return (angles.cos() * self.rope_scale).to(dtype), (angles.sin() * self.rope_scale).to(dtype)


def fusable(model: Any) -> bool:
    """Whether `model` is a decoder that `fuse` understands: family, activation, static rotary, full attention."""
    adapted, model = bool(adapters_of(model)), base_of(model)
    if type(model).__name__ not in FUSED_MODELS or not type(model).__module__.startswith("transformers."):
        return False
    config = model.config
    parameters = dict(model.named_parameters())
    projections = [module for name, module in model.named_modules() if name.endswith("_proj")]
    plain = all(type(module) is nn.Linear or (adapted and _plainly_adapted(module)) for module in projections)
    plain = plain and isinstance(_output_layer(model), nn.Linear) and isinstance(model.model.embed_tokens, nn.Embedding)
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    one_dtype = len({parameter.dtype for parameter in parameters.values()}) == 1
    return plain and one_dtype and not windowed and rope in STATIC_ROPE and config.hidden_act == "silu"


def _output_layer(model: Any) -> Any:
    return model.lm_head if hasattr(model, "lm_head") else model.score


def _plainly_adapted(module: Any) -> bool:
    """Whether a projection carries nothing but low-rank updates of its own: no DoRA, no biases, nothing merged."""
    if type(getattr(module, "base_layer", None)) is not nn.Linear or not hasattr(module, "lora_A"):
        return False
    return not (module.merged or module.lora_variant or any(module.lora_bias.values()))


class _Fuser:
    """Takes parameters of a model into tensors of a `Decoder`; what was taken becomes views of these.

    Attributes:
        weights: what was taken so far.
    """

    def __init__(self, model: Any) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.weights: list[Weight] = []

    def take(self, *owners: Any, attribute: str = "weight") -> Tensor | None:
        """The parameter `attribute` of the owners as one tensor of which theirs become views; None if they lack it."""
        owners = tuple(getattr(owner, "base_layer", owner) for owner in owners)
        parameters = [parameter for owner in owners if (parameter := getattr(owner, attribute, None)) is not None]
        if not parameters:
            return None
        parts = tuple((self._names[id(parameter)], parameter.shape[0]) for parameter in parameters)
        trained = any(parameter.requires_grad for parameter in parameters)
        tensor = parameters[0].data if len(parameters) == 1 else torch.cat([p.data for p in parameters])
        weight = Weight(_common_name([name for name, _ in parts]), tensor.requires_grad_(trained), parts)
        for parameter, (_, view) in zip(parameters, weight.split(tensor.detach()), strict=True):
            parameter.data = view
        self.weights.append(weight)
        return tensor

    def need(self, *owners: Any) -> Tensor:
        """Like `take`, of weights that are there."""
        tensor = self.take(*owners)
        if tensor is None:
            raise TypeError(f"{owners} have no weight")
        return tensor

    def layer(self, block: Any) -> DecoderLayer:
        """One block of the model."""
        attention, mlp = block.self_attn, block.mlp
        qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
        gate_up = (mlp.gate_proj, mlp.up_proj)
        return DecoderLayer(
            input_norm=self.need(block.input_layernorm),
            qkv=self.need(*qkv),
            qkv_bias=self.take(*qkv, attribute="bias"),
            q_norm=self.need(attention.q_norm) if hasattr(attention, "q_norm") else None,
            k_norm=self.need(attention.k_norm) if hasattr(attention, "k_norm") else None,
            out=self.need(attention.o_proj),
            out_bias=self.take(attention.o_proj, attribute="bias"),
            post_norm=self.need(block.post_attention_layernorm),
            gate_up=self.need(*gate_up),
            gate_up_bias=self.take(*gate_up, attribute="bias"),
            down=self.need(mlp.down_proj),
            down_bias=self.take(mlp.down_proj, attribute="bias"),
        )

    def adapter(self, name: str, block: Any) -> LayerUpdates:
        """What the adapter `name` adds to a block's matrices."""
        attention, mlp = block.self_attn, block.mlp
        every = {
            "qkv": self._updates(name, attention.q_proj, attention.k_proj, attention.v_proj),
            "out": self._updates(name, attention.o_proj),
            "gate_up": self._updates(name, mlp.gate_proj, mlp.up_proj),
            "down": self._updates(name, mlp.down_proj),
        }
        return {matrix: found for matrix, found in every.items() if found}

    def _updates(self, name: str, *owners: Any) -> tuple[LowRank, ...]:
        """The updates that adapter `name` has for the owners, whose outputs lie side by side."""
        found, start = [], 0
        for owner in owners:
            if name in getattr(owner, "lora_A", ()):
                a, b = self.need(owner.lora_A[name]), self.need(owner.lora_B[name])
                found.append(LowRank(a, b, float(owner.scaling[name]), start))
            start += getattr(owner, "base_layer", owner).weight.shape[0]
        return tuple(found)


def fuse(model: Any) -> tuple[Decoder, list[Weight]]:
    """Fuse `model`'s projections in place.

    Args:
        model: one for which `fusable` is true. Its parameters become views of the fused tensors; don't move or cast
            it afterwards (that would break the sharing, see `Policy.publish`).

    Returns:
        The description, and every weight once, in the order of the module's parameters.
    """
    fuser, adapters = _Fuser(model), adapters_of(model)
    model = base_of(model)
    config, body = model.config, model.model
    embedding = fuser.need(body.embed_tokens)
    layers = tuple(fuser.layer(block) for block in body.layers)
    final_norm = fuser.need(body.norm)
    output = _output_layer(model)
    tied = output.weight is body.embed_tokens.weight
    decoder = Decoder(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=body.layers[0].self_attn.head_dim,
        vocab=embedding.shape[0],
        norm_eps=config.rms_norm_eps,
        attention_scale=body.layers[0].self_attn.scaling,
        inverse_frequencies=body.rotary_emb.inv_freq.float(),
        rope_scale=body.rotary_emb.attention_scaling,
        embedding=embedding,
        head=embedding if tied else fuser.need(output),
        layers=layers,
        final_norm=final_norm,
        adapters={name: tuple(fuser.adapter(name, block) for block in body.layers) for name in adapters},
    )
    return decoder, fuser.weights


def _common_name(names: list[str]) -> str:
    """`a.q_proj.weight`, `a.k_proj.weight` → `a.q_proj+k_proj.weight`."""
    if len(names) == 1:
        return names[0]
    pieces = [name.replace(".base_layer.", ".").split(".") for name in names]
    return ".".join([*pieces[0][:-2], "+".join(piece[-2] for piece in pieces), pieces[0][-1]])
