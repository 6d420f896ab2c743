"""A training batch: every token with what a loss needs, flat over tokens, as plain NumPy.

What is in a batch has nothing of an algorithm any more: advantages, masks and further per-token values are numbers.
How rollouts become one is in `packing`; how one is split and run, in `microbatches` and `learner`.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.errors import BatchError


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens, one after another.

    Attributes:
        tokens: (tokens,) int32 ids.
        mask: (tokens,) bool, whether the token is trained. The first token of a sequence can't be: nothing predicts it.
        advantages: (tokens,) float32; 0 where not trained.
        sampler_logprobs: (tokens,) float32, as recorded when sampled; 0 where not trained.
        versions: (tokens,) int32 weight version that sampled the token; -1 where none did.
        lengths: (sequences,) int64 number of tokens of each.
        groups: (sequences,) int64 number of the group each belongs to; sequences of a group are neighbours.
        rollouts: id of the rollout each sequence is a branch of.
        extras: further per-token values by name, (tokens, …) float32: "reference_logprobs", "proximal_logprobs" …
        experts: (tokens, layers, per_token) int16, which experts the sampler's routers chose at the place that led to
            each token; -1 where that is not known. None: nowhere.

    Raises:
        BatchError: lengths don't fit together, or a first token is trained.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    sampler_logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    lengths: NDArray[np.int64]
    groups: NDArray[np.int64]
    rollouts: tuple[str, ...]
    extras: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        per_token = {name: getattr(self, name) for name in _PER_TOKEN} | dict(self.extras)
        if self.experts is not None:
            per_token["experts"] = self.experts
        wrong = {name: len(array) for name, array in per_token.items() if len(array) != self.lengths.sum()}
        if wrong:
            raise BatchError(
                f"the sequences have {self.lengths.sum()} tokens in all, but there are values for {wrong}."
            )
        if not len(self.lengths) == len(self.groups) == len(self.rollouts):
            raise BatchError(
                f"{len(self.lengths)} lengths, {len(self.groups)} groups and {len(self.rollouts)} rollout ids: every "
                "sequence needs one of each."
            )
        if (self.lengths < 1).any():
            raise BatchError("a sequence has no tokens.")
        if self.mask[self.starts].any():
            raise BatchError("the first token of a sequence is marked as trained, but nothing predicts it: mask it.")

    @property
    def starts(self) -> NDArray[np.int64]:
        """(sequences,) place of each sequence's first token."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def sequence(self) -> NDArray[np.int64]:
        """(tokens,) number of the sequence each token belongs to."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def trained_counts(self) -> NDArray[np.int64]:
        """(sequences,) number of trained tokens."""
        return np.bincount(self.sequence[self.mask], minlength=len(self.lengths)).astype(np.int64)

    @property
    def teaches(self) -> bool:
        """Whether any trained token has an advantage: without one, a policy loss has no gradient at all."""
        return bool((self.advantages[self.mask] != 0).any())

    def span(self, number: int) -> slice:
        """Where sequence `number` lies."""
        start = int(self.starts[number])
        return slice(start, start + int(self.lengths[number]))

    def with_extras(self, **extras: NDArray[np.float32]) -> Batch:
        """The same batch carrying further per-token values."""
        return replace(self, extras={**self.extras, **extras})

    def masked(self, mask: NDArray[np.bool_]) -> Batch:
        """The same tokens, of which only those in `mask`, (tokens,), are trained."""
        return replace(self, mask=self.mask & mask)

    def save(self, path: Path) -> None:
        """Write to a NumPy `.npz` file, exactly and without pickling."""
        arrays: dict[str, Any] = {name: getattr(self, name) for name in (*_PER_TOKEN, "lengths", "groups")}
        arrays |= {f"extras.{name}": array for name, array in self.extras.items()}
        if self.experts is not None:
            arrays["experts"] = self.experts
        with path.open("wb") as file:
            np.savez(file, rollouts=np.frombuffer(json.dumps(self.rollouts).encode(), dtype=np.uint8), **arrays)

    @classmethod
    def load(cls, path: Path) -> Batch:
        """Read what `save` wrote.

        Raises:
            BatchError: the file is missing or damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            rollouts = tuple(json.loads(arrays.pop("rollouts").tobytes()))
            extras = {n.removeprefix("extras."): arrays.pop(n) for n in list(arrays) if n.startswith("extras.")}
            return cls(**arrays, rollouts=rollouts, extras=extras)
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise BatchError(f"{path}: the stored batch can't be read ({error}).") from error


_PER_TOKEN = ("tokens", "mask", "advantages", "sampler_logprobs", "versions")
