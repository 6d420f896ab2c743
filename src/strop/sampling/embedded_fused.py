"""The engine for decoders that `strop.models.fused` describes: rows, prefixes, and what is computed in which step."""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

from torch import Tensor

from strop.models.fused import Decoder
from strop.sampling.embedded_pass import FusedPass, Piece, whole_blocks
from strop.sampling.embedded_sequence import Sequence
from strop.sampling.kv_cache import KeyValueCache, Rows

#: Prompt tokens computed in a step while others decode, and while none does: enough rows for fast matrix products,
#: few enough that decoding isn't held up for long.
PREFILL_BESIDE_DECODING = 256
PREFILL_ALONE = 1024


class FusedEngine:
    """Batched, with shared prefixes. See `strop.sampling.embedded_sequence.Engine`.

    Args:
        decoder: the model.
        slots: most sequences at once.
        parked: further rows, for sequences that may go on later.
        context: most tokens of a sequence.
        packed: see `FusedPass`.
    """

    def __init__(self, decoder: Decoder, slots: int, parked: int, context: int, packed: bool) -> None:
        self.adapters = {name: number for number, name in enumerate(("", *decoder.adapters))}
        self.cache = KeyValueCache(decoder, slots + parked, whole_blocks(context))
        self.rows = Rows(slots + parked, context)
        self.run = FusedPass(decoder, self.cache, packed)
        self.slots = slots
        self.active: list[Sequence] = []
        self.prefilled = 0

    def weights_changed(self) -> None:
        """Packs the new weights; what was computed with older ones serves no new request."""
        self.rows.weights_changed()
        self.run.pack()

    def resumes(self, sequence: Sequence) -> bool:
        """Whether a parked row would be taken over whole."""
        return self.rows.extends(*self.rows.longest_prefix(self._known_as(sequence)))

    def admit(self, sequence: Sequence) -> bool:
        """Take a row, and what of the prompt another row has or will have."""
        if len(self.active) >= self.slots:
            return False
        prompt = self._known_as(sequence)
        source, shared = self.rows.longest_prefix(prompt)
        taken = int(self.rows.taken[source])
        row = self.rows.take(prompt, source, shared)
        if row is None:
            return False
        sequence.row = row
        sequence.cached = int(self.rows.computed[row])
        if shared > sequence.cached:
            sequence.source, sequence.shared = (source, taken), shared
        self._copy_prefix(sequence)
        self.active.append(sequence)
        return True

    def step(self) -> tuple[list[Sequence], Tensor | None]:
        """One token for every sequence whose prompt is computed, and a stretch of those that are not."""
        for sequence in self.active:
            if sequence.source:
                self._copy_prefix(sequence)
        computed = self.rows.computed
        decoding = [s for s in self.active if computed[s.row] == s.length - 1 and s.tokens]
        filling = [s for s in self.active if not s.tokens and not s.source]
        pieces, prefill = self._pieces(filling, PREFILL_BESIDE_DECODING if decoding else PREFILL_ALONE)
        if not decoding and not pieces:
            return [], None
        steps = [Piece(s.row, s.length - 1, s.tokens[-1:], wanted=True, adapter=s.adapter) for s in decoding]
        logits = self.run(steps, pieces)
        everyone = [*steps, *pieces]
        self.rows.advance([piece.row for piece in everyone], [len(piece.tokens) for piece in everyone])
        self.prefilled += sum(len(piece.tokens) for piece in pieces)
        return [*decoding, *(s for s, piece in zip(prefill, pieces, strict=True) if piece.wanted)], logits

    def append(self, sequence: Sequence, token: int) -> None:
        """Note the token, which a later prompt may go on from."""
        self.rows.append(sequence.row, sequence.length - 1, self._known_as(sequence, token))

    def release(self, sequence: Sequence) -> None:
        """Park the row."""
        self.active.remove(sequence)
        self.rows.park(sequence.row)

    def _known_as(self, sequence: Sequence, token: int | None = None) -> Any:
        """The prompt, or one token, as rows know it: keys and values through one adapter are no other's."""
        shift = self.adapters[sequence.adapter] << 32  # beyond any token's id
        return sequence.prompt + shift if token is None else token + shift

    def _copy_prefix(self, sequence: Sequence) -> None:
        """Copy the shared prefix once its row has it; if that row was lost, look for another, or do without."""
        if sequence.source and not self.rows.holds(*sequence.source, sequence.shared):
            source, sequence.shared = self.rows.longest_prefix(self._known_as(sequence))
            sequence.source = (source, int(self.rows.taken[source])) if sequence.shared else None
        if sequence.source:
            source, _ = sequence.source
            if self.rows.computed[source] < sequence.shared:
                return
            self.cache.copy(source, sequence.row, sequence.shared)
            self.rows.advance([sequence.row], [sequence.shared])
            sequence.cached, sequence.source = sequence.shared, None
        self.rows.promise(sequence.row, len(sequence.prompt))

    def _pieces(self, filling: Several[Sequence], budget: int) -> tuple[list[Piece], list[Sequence]]:
        """Stretches of prompts, oldest first, `budget` tokens in all."""
        pieces: list[Piece] = []
        sequences: list[Sequence] = []
        for sequence in filling:
            start = int(self.rows.computed[sequence.row])
            stop = min(len(sequence.prompt), start + budget)
            tokens, wanted = sequence.prompt[start:stop].tolist(), stop == len(sequence.prompt)
            pieces.append(Piece(sequence.row, start, tokens, wanted, sequence.adapter))
            sequences.append(sequence)
            budget -= stop - start
            if not budget:
                break
        return pieces, sequences
