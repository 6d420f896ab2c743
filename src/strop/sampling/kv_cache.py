"""Keys and values of the sequences that an embedded sampler holds, one row of the cache each, and which tokens they
are of: a new prompt reuses the longest prefix that any row holds. What is computed when is the scheduler's business.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from strop.models.fused import Decoder


class KeyValueCache:
    """Keys and values, by layer: each (rows, kv_heads, context, head_dim) in the compute dtype.

    Zeroed at first: masked positions must be finite. Memory that no sequence has reached is not touched, so what it
    takes grows with use, up to rows × context × `bytes_per_token`.
    """

    def __init__(self, decoder: Decoder, rows: int, context: int) -> None:
        shape = (rows, decoder.kv_heads, context, decoder.head_dim)
        like = decoder.embedding.detach()
        self.keys = [like.new_zeros(shape) for _ in decoder.layers]
        self.values = [like.new_zeros(shape) for _ in decoder.layers]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another row."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length] = layer[source, :, :length]


class Rows:
    """What each row holds: the tokens of its sequence, how far they are computed, and whether it is in use.

    A row is free, in use by a sequence, or parked: its sequence ended, its keys and values wait to be extended by a
    prompt that begins with the same tokens. Free rows are taken before parked ones, those longest unused first.

    Attributes:
        computed: how many tokens of each row have keys and values.
        taken: changes whenever a row begins to hold another sequence.
    """

    def __init__(self, rows: int, context: int) -> None:
        self._tokens = np.full((rows, context + 1), -1, dtype=np.int64)  # the last column never matches
        self._promised = np.zeros(rows, dtype=np.int64)  # tokens that are computed or surely will be
        self._current = np.ones(rows, dtype=bool)  # computed with the present weights
        self._in_use = np.zeros(rows, dtype=bool)
        self._used = np.zeros(rows, dtype=np.int64)
        self._clock = itertools.count(1)
        self.computed = np.zeros(rows, dtype=np.int64)
        self.taken = np.zeros(rows, dtype=np.int64)

    def longest_prefix(self, prompt: np.ndarray) -> tuple[int, int]:
        """The row that holds, or will hold, most of the beginning of `prompt`, and how many tokens of it.

        The last token of a prompt is never taken from a row, since its logits are wanted.
        """
        length = len(prompt) - 1
        same = self._tokens[:, : length + 1] == np.append(prompt[:-1], -2)
        shared = np.minimum(same.argmin(axis=1), self._promised) * self._current
        best = int(shared.argmax())
        return best, int(shared[best])

    def extends(self, source: int, shared: int) -> bool:
        """Whether a prompt that shares `shared` tokens with row `source` goes on from all that this parked row holds."""
        return bool(shared and not self._in_use[source] and shared >= self._promised[source])

    def take(self, prompt: np.ndarray, source: int, shared: int) -> int | None:
        """Take a row for a sequence that shares `shared` tokens with row `source`; None if all are in use.

        Takes `source` itself if it is parked and the prompt extends all that it holds; then nothing needs copying.
        Until `promise` is called, the row offers others no more than that.
        """
        row = source if self.extends(source, shared) else self._free_row()
        if row is None:
            return None
        kept = shared if row == source else 0
        self._tokens[row, : len(prompt)] = prompt
        self._tokens[row, len(prompt) :] = -1
        self._promised[row] = self.computed[row] = kept
        self._in_use[row], self._current[row] = True, True
        self.taken[row] = next(self._clock)
        return row

    def _free_row(self) -> int | None:
        idle = np.flatnonzero(~self._in_use)
        if not len(idle):
            return None
        return int(idle[np.lexsort((idle, self._used[idle] * (self._promised[idle] > 0)))[0]])

    def promise(self, row: int, length: int) -> None:
        """The first `length` tokens of `row` will be computed without waiting for another row."""
        self._promised[row] = length

    def holds(self, row: int, taken: int, length: int) -> bool:
        """Whether `row` still is the one that was taken then, and holds or will hold `length` tokens of use."""
        return bool(self.taken[row] == taken and self._current[row] and self._promised[row] >= length)

    def append(self, row: int, at: int, token: int) -> None:
        """The sequence in `row` got `token` at position `at`."""
        self._tokens[row, at] = token

    def advance(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Each of `rows` has that many more tokens computed."""
        self.computed[rows] += counts
        self._promised[rows] = np.maximum(self._promised[rows], self.computed[rows])

    def park(self, row: int) -> None:
        """The sequence in `row` ended: keep what is computed, if that is with the present weights."""
        self._in_use[row] = False
        self._promised[row] = self.computed[row] if self._current[row] else 0
        self._used[row] = next(self._clock)

    def weights_changed(self) -> None:
        """Nothing computed until now serves a new prompt. Sequences in use go on."""
        self._current &= self.computed == 0
        self._promised[~self._in_use] = 0
