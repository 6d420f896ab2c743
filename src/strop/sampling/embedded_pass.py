"""The forward pass of a fused decoder over rows of a key-value cache, for decoding and prefill at once. No gradients.

Batch invariance: what a token's logits are depends, bit for bit, on the tokens before it and the weights alone, not on
what is computed beside it, in which row, or in how many pieces. Every kernel here computes a row of its result from a
row of its input by one order of operations: linear layers through oneDNN with packed weights; what lies between them
token by token in C, or, where that isn't built, through PyTorch, with attention over a fixed grid of keys, where hidden
keys add exact zeros. Few rows would go through other kernels, so that they are filled up; in fp32, values are summed
block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from strop import kernels
from strop.models.fused import Decoder, DecoderLayer, LayerUpdates
from strop.sampling.kv_cache import KeyValueCache

#: Keys are computed in whole blocks of this many: a multiple of every vector width.
KEY_BLOCK = 64
#: Fewest rows of a matrix product for which every number of rows goes through one kernel.
FEWEST_ROWS = 4
#: Sequences whose key blocks number less than this share of the longest's are computed apart from it.
LIKE_LENGTH = 0.75
#: Fewest sequences that are worth computing apart.
FEWEST_APART = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence, to be computed in one step.

    Attributes:
        row: of the cache.
        start: position of the first.
        tokens: at least one.
        wanted: whether the last token's logits are wanted.
        adapter: whose updates are added; "" for none.
    """

    row: int
    start: int
    tokens: Sequence[int]
    wanted: bool
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class _Together:
    """Queries that are computed together: one token each of several rows, or several tokens of one row.

    Attributes:
        queries: where they lie among the step's tokens.
        rows: the rows of the cache, a slice where they are adjacent.
        count: number of rows.
        keys: how many keys, whole blocks.
        bias: (rows, 1, tokens, keys) fp32, 0 where a query sees a key and -inf elsewhere.
    """

    queries: slice
    rows: slice | Tensor
    count: int
    keys: int
    bias: Tensor


class FusedPass:
    """Runs a decoder over a cache.

    Args:
        decoder: its weights, read at every step unless packed.
        cache: where keys and values are; its context is whole blocks.
        packed: keep a second copy of the matrices in oneDNN's own layout: a fifth faster at 64 rows, twice the memory;
            `pack` must follow every change of the weights. fp32 always packs, for batch invariance.
        native: what lies between matrix products in C, where it is built and takes this decoder's sizes.
    """

    def __init__(self, decoder: Decoder, cache: KeyValueCache, packed: bool = True, native: bool = True) -> None:
        self.decoder, self.cache = decoder, cache
        self.dtype, device = decoder.embedding.dtype, decoder.embedding.device
        on_cpu = device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.packed = on_cpu and (packed or self.dtype == torch.float32)
        context = cache.keys[0].shape[2]
        fits = kernels.supports(decoder.heads, decoder.kv_heads, decoder.head_dim, context)
        self.native = native and fits and device.type == "cpu" and self.dtype in (torch.bfloat16, torch.float32)
        cos, sin = decoder.rotary(torch.arange(context, device=device))
        half = decoder.head_dim // 2
        self._cos, self._sin = cos[:, None, :half].contiguous(), sin[:, None, :half].contiguous()
        self._matrices: dict[int, Tensor] = {}

    @torch.inference_mode()
    def pack(self) -> None:
        """Pack the weights as they are now (0.15 s for 135 million on one core)."""
        if not self.packed:
            return
        matrices = [m for layer in self.decoder.layers for m in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        every = (layer for layers in self.decoder.adapters.values() for layer in layers)
        parts = [part for layer in every for updates in layer.values() for part in updates]
        for matrix in (*matrices, self.decoder.head, *(p.a for p in parts), *(p.b for p in parts)):
            self._matrices[id(matrix)] = torch.ops.mkldnn._reorder_linear_weight(matrix.detach())

    @torch.inference_mode()
    def __call__(self, decoding: Sequence[Piece], prefill: Sequence[Piece]) -> Tensor:
        """Compute a step: keys and values of every token, and logits of the wanted last tokens.

        Args:
            decoding: pieces of one token, of different rows.
            prefill: pieces of any length, of other rows.

        Returns:
            (wanted, vocab) in the compute dtype, in the order of `decoding`, then `prefill`.
        """
        groups = [list(range(len(decoding)))] if self.native else _groups(decoding)
        order = [number for group in groups for number in group]
        pieces = [*(decoding[number] for number in order), *prefill]
        device = self._cos.device
        tokens = torch.tensor([token for piece in pieces for token in piece.tokens], device=device)
        counts = torch.tensor([len(piece.tokens) for piece in pieces], device=device)
        rows = torch.tensor([piece.row for piece in pieces], device=device).repeat_interleave(counts)
        places = [piece.start + number for piece in pieces for number in range(len(piece.tokens))]
        positions = torch.tensor(places, device=device)
        together = [] if self.native else [*self._decoding(decoding, groups), *self._prefill(prefill, len(decoding))]
        hidden = self._layers(tokens, rows, positions, together, self._through(pieces, counts))
        wanted = sorted(range(len(order)), key=order.__getitem__)
        wanted += [number for number in range(len(order), len(pieces)) if pieces[number].wanted]
        last = counts.cumsum(0) - 1
        return self._linear(self._norm(hidden[last[wanted]], self.decoder.final_norm), self.decoder.head, None)

    # -- the layers -------------------------------------------------------------------------------------------------

    def _through(self, pieces: Sequence[Piece], counts: Tensor) -> list[tuple[str, slice | Tensor]]:
        """The adapters of a step, and which of its tokens go through each."""
        names = dict.fromkeys(piece.adapter for piece in pieces if piece.adapter)
        if len(names) == 1 and all(piece.adapter for piece in pieces):
            return [(name, slice(None)) for name in names]
        found: list[tuple[str, slice | Tensor]] = []
        for name in names:
            mine = torch.tensor([piece.adapter == name for piece in pieces], device=counts.device)
            found.append((name, mine.repeat_interleave(counts).nonzero()[:, 0]))
        return found

    def _layers(
        self,
        tokens: Tensor,
        rows: Tensor,
        positions: Tensor,
        together: list[_Together],
        through: list[tuple[str, slice | Tensor]],
    ) -> Tensor:
        decoder, added = self.decoder, None
        x = decoder.embedding[tokens]  # (tokens, hidden)
        mixed = x.new_empty((len(tokens), decoder.heads, decoder.head_dim))
        for number, (layer, keys, values) in enumerate(
            zip(decoder.layers, self.cache.keys, self.cache.values, strict=True)
        ):
            updates = [(decoder.adapters[name][number], mine) for name, mine in through]
            qkv = self._projected(self._norm(x, layer.input_norm, added), "qkv", layer, updates)
            q = self._place(qkv, layer, rows, positions, keys, values)
            if self.native:
                kernels.cached_attention(q, keys, values, rows, positions, decoder.attention_scale, mixed)
            for group in together:
                self._attend(q[group.queries], keys, values, group, mixed[group.queries])
            added = self._projected(mixed.flatten(1), "out", layer, updates)
            gate_up = self._projected(self._norm(x, layer.post_norm, added), "gate_up", layer, updates)
            added = self._projected(self._gated(gate_up), "down", layer, updates)
        return x if added is None else x.add_(added)

    def _norm(self, x: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
        """The norm of `x`, after `added` is added to it in place."""
        if self.native:
            return kernels.residual_norm(x, added, weight, self.decoder.norm_eps)
        if added is not None:
            x += added
        return functional.rms_norm(x, (x.shape[-1],), weight, self.decoder.norm_eps)

    def _projected(
        self, x: Tensor, matrix: str, layer: DecoderLayer, updates: list[tuple[LayerUpdates, slice | Tensor]]
    ) -> Tensor:
        """A matrix of the layer, with the updates of each token's adapter."""
        y = self._linear(x, getattr(layer, matrix), getattr(layer, f"{matrix}_bias"))
        for update, mine in updates:
            for part in update.get(matrix, ()):
                low = self._linear(self._linear(x[mine], part.a, None), part.b, None) * part.scale
                if isinstance(mine, slice):
                    y[:, part.columns] += low
                else:
                    y[mine, part.columns] += low
        return y

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = len(x)
        if rows < FEWEST_ROWS:
            x = functional.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        if self.packed:
            y = torch.ops.mkldnn._linear_pointwise(x, self._matrices[id(weight)], bias, "none", [], "")
        else:
            y = functional.linear(x, weight, bias)
        return y[:rows]  # type: ignore[no-any-return]

    def _gated(self, gate_up: Tensor) -> Tensor:
        if self.native:
            return kernels.gated(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def _place(
        self, qkv: Tensor, layer: DecoderLayer, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Rotate queries and keys by their positions, and put keys and values into the cache.

        Returns:
            The queries: (tokens, heads, head_dim).
        """
        decoder, norms = self.decoder, (layer.q_norm, layer.k_norm)
        if self.native:
            return kernels.place(qkv, norms, decoder.norm_eps, self._cos, self._sin, rows, positions, keys, values)
        heads, kept = qkv.view(len(qkv), -1, decoder.head_dim), decoder.heads + decoder.kv_heads
        q, k, values[rows, :, positions] = heads[:, : decoder.heads], heads[:, decoder.heads : kept], heads[:, kept:]
        q, k = (x if norm is None else self._norm(x, norm) for x, norm in zip((q, k), norms, strict=True))
        keys[rows, :, positions] = self._rotated(k, positions)
        return self._rotated(q, positions)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Heads with their positions: (tokens, heads, head_dim)."""
        cos, sin = self._cos[positions], self._sin[positions]
        first, second = x.chunk(2, dim=-1)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        half = self.decoder.head_dim // 2
        torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin)
        return out

    # -- attention --------------------------------------------------------------------------------------------------

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, group: _Together, out: Tensor) -> None:
        """softmax(q kᵀ · scale) v for one group of queries (tokens, heads, head_dim), into `out`.

        Query heads that share keys are rows of one matrix product.
        """
        kv_heads, width = self.decoder.kv_heads, self.decoder.head_dim
        k, v = (x[:, :, : group.keys][group.rows] for x in (keys, values))  # (rows, kv_heads, keys, head_dim)
        tokens = len(q) // group.count
        # (rows, kv_heads, heads of a group × tokens, head_dim)
        q = (
            q.view(group.count, tokens, kv_heads, -1, width)
            .permute(0, 2, 3, 1, 4)
            .reshape(group.count, kv_heads, -1, width)
        )
        queries = q.shape[2]
        if self.dtype == torch.float32 and queries % FEWEST_ROWS:
            q = functional.pad(q, (0, 0, 0, -queries % FEWEST_ROWS))
        scores = self._scores(q, k)
        shape = scores.shape
        if tokens == 1:
            scores += group.bias
        else:
            scores[:, :, :queries].view(*shape[:2], -1, tokens, group.keys).add_(group.bias[:, :, None])
        mixed = self._mix(scores.softmax(-1).to(self.dtype), v)[:, :, :queries]
        mixed = mixed.reshape(group.count, kv_heads, -1, tokens, width).permute(0, 3, 1, 2, 4)
        out.view(mixed.shape).copy_(mixed)

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """q kᵀ · scale in fp32: (rows, kv_heads, queries, keys)."""
        if self.dtype == torch.float32:
            return (q @ k.mT).mul_(self.decoder.attention_scale)
        scores = (k @ q.mT).mT.to(torch.float32, memory_format=torch.contiguous_format)
        return scores.mul_(self.decoder.attention_scale)

    def _mix(self, weights: Tensor, v: Tensor) -> Tensor:
        """weights · v: (rows, kv_heads, queries, head_dim)."""
        if self.dtype != torch.float32:
            return weights @ v
        mixed = weights[..., :KEY_BLOCK] @ v[:, :, :KEY_BLOCK]
        for start in range(KEY_BLOCK, v.shape[2], KEY_BLOCK):
            block = slice(start, start + KEY_BLOCK)
            mixed += weights[..., block] @ v[:, :, block]
        return mixed

    def _decoding(self, pieces: Sequence[Piece], groups: list[list[int]]) -> list[_Together]:
        """Pieces of one token each, group by group."""
        together: list[_Together] = []
        first = 0
        for group in groups:
            rows = [pieces[number].row for number in group]
            adjacent = rows[-1] - rows[0] + 1 == len(rows)
            starts = torch.tensor([pieces[number].start for number in group])
            keys = whole_blocks(int(starts.max()) + 1)
            together.append(
                _Together(
                    queries=slice(first, first + len(group)),
                    rows=slice(rows[0], rows[-1] + 1) if adjacent else torch.tensor(rows, device=self._cos.device),
                    count=len(group),
                    keys=keys,
                    bias=self._bias(keys, starts[:, None])[:, None],
                )
            )
            first += len(group)
        return together

    def _prefill(self, pieces: Sequence[Piece], first: int) -> list[_Together]:
        """Each piece by itself. `first`: where they begin among the step's tokens."""
        together: list[_Together] = []
        for piece in pieces:
            last = piece.start + len(piece.tokens)
            queries = slice(first, first + len(piece.tokens))
            bias = self._bias(whole_blocks(last), torch.arange(piece.start, last))[None, None]
            together.append(_Together(queries, slice(piece.row, piece.row + 1), 1, whole_blocks(last), bias))
            first = queries.stop
        return together

    def _bias(self, keys: int, positions: Tensor) -> Tensor:
        """(*positions.shape, keys): 0 up to each position, -inf after it."""
        hidden = torch.arange(keys) > positions[..., None]
        return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).to(self._cos.device)


def _groups(pieces: Sequence[Piece]) -> list[list[int]]:
    """Numbers of the pieces whose sequences are of like length, each group by ascending row."""
    groups: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(pieces)), key=lambda number: -pieces[number].start):
        keys = whole_blocks(pieces[number].start + 1)
        if not groups or (keys < LIKE_LENGTH * longest and len(groups[-1]) >= FEWEST_APART):
            groups.append([])
            longest = keys
        groups[-1].append(number)
    return [sorted(group, key=lambda number: pieces[number].row) for group in groups]


def whole_blocks(length: int) -> int:
    """`length` keys, rounded up to whole blocks."""
    return -(-length // KEY_BLOCK) * KEY_BLOCK
