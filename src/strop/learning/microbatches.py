"""Splitting a batch by a token budget, and laying out each part for one forward and backward pass.

Only what can matter is computed: a sequence ends with the last token that predicts a trained one, common prefixes
are computed once, and each distinct (prefix, next token) is scored once, however many sequences share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from strop.errors import BatchError
from strop.learning.batch import Batch
from strop.learning.prefix_tree import Ints, PrefixTree, build_tree, lexicographic, tree_size


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        sequences: numbers, in the batch, of the sequences it holds.
        tree: their tokens, each cut off after the last predicting one.
        trained: (trained,) places, in the batch, of its trained tokens, sequence by sequence.
        sequence: (trained,) which of `sequences` each belongs to, counted from 0.
        pair: (trained,) which pair gives its log-probability.
        rows: (rows,) ascending nodes that predict something.
        pair_rows: (pairs,) ascending, index into `rows`.
        pair_tokens: (pairs,) the predicted token.
    """

    sequences: Ints
    tree: PrefixTree
    trained: Ints
    sequence: Ints
    pair: Ints
    rows: Ints
    pair_rows: Ints
    pair_tokens: Ints


def split_batch(
    batch: Batch, budget: int, chosen: Ints, *, shared: bool = True, whole_groups: bool = False
) -> list[MicroBatch]:
    """Split a batch into parts of at most `budget` computed tokens.

    Args:
        batch: what to split.
        budget: most tokens of a part: after sharing prefixes, or else after padding to one length.
        chosen: numbers of the sequences that are to be computed, ascending; those without trained tokens are skipped.
        shared: whether prefixes are shared.
        whole_groups: whether a group must not be split (its sequences are compared with each other in the loss).

    Raises:
        BatchError: a sequence (or a group that must stay whole) is larger than the budget.
    """
    counts = batch.trained_counts
    cut = {int(number): _predicting(batch, int(number)) for number in chosen if counts[number]}
    size = partial(_shared_size, cut) if shared else partial(_padded_size, cut)
    parts: list[list[int]] = []
    for group in dict.fromkeys(int(batch.groups[number]) for number in cut):
        members = [number for number in cut if batch.groups[number] == group]
        if parts and size([*parts[-1], *members]) <= budget:
            parts[-1] += members
        elif (whole := size(members)) <= budget:
            parts.append(members)
        elif whole_groups:
            raise _too_long(f"group {group} has {whole} tokens", whole, budget)
        else:
            parts += _split_group(batch, cut, members, size, budget)
    return [_lay_out(batch, cut, sorted(part)) for part in parts]


def smallest_budget(batch: Batch, chosen: Ints, *, shared: bool = True, whole_groups: bool = False) -> int:
    """The smallest budget that `split_batch` would take; arguments as there."""
    counts = batch.trained_counts
    cut = {int(number): _predicting(batch, int(number)) for number in chosen if counts[number]}
    size = partial(_shared_size, cut) if shared else partial(_padded_size, cut)
    together: dict[int, list[int]] = {}
    for number in cut:
        together.setdefault(int(batch.groups[number]) if whole_groups else number, []).append(number)
    return max((size(members) for members in together.values()), default=1)


def _shared_size(cut: dict[int, NDArray[np.int32]], members: list[int]) -> int:
    """Number of tokens once common prefixes are shared."""
    return tree_size([cut[number] for number in members])


def _padded_size(cut: dict[int, NDArray[np.int32]], members: list[int]) -> int:
    """Number of tokens once all have the length of the longest."""
    return len(members) * max(len(cut[number]) for number in members)


def _predicting(batch: Batch, number: int) -> NDArray[np.int32]:
    """A sequence's tokens up to the last one that predicts a trained token."""
    span = batch.span(number)
    last = np.flatnonzero(batch.mask[span])[-1]
    return batch.tokens[span][:last]


def _split_group(
    batch: Batch, cut: dict[int, NDArray[np.int32]], members: list[int], size: Callable[[list[int]], int], budget: int
) -> list[list[int]]:
    """Fill parts one after another, in lexicographic order, so that neighbours share much."""
    parts: list[list[int]] = []
    for number in (members[place] for place in lexicographic([cut[number] for number in members])):
        if len(cut[number]) > budget:
            raise _too_long(
                f"an attempt ({batch.rollouts[number]}) has {len(cut[number])} tokens", len(cut[number]), budget
            )
        if parts and size([*parts[-1], number]) <= budget:
            parts[-1].append(number)
        else:
            parts.append([number])
    return parts


def _too_long(what: str, size: int, budget: int) -> BatchError:
    return BatchError(
        f"{what}, more than learner.tokens_per_micro_batch = {budget}. Set learner.tokens_per_micro_batch to at least "
        f"{size}, or make attempts shorter (agent.max_tokens, agent.max_turns, sampler.max_context)."
    )


def _lay_out(batch: Batch, cut: dict[int, NDArray[np.int32]], sequences: list[int]) -> MicroBatch:
    tree = build_tree([cut[number] for number in sequences])
    trained, sequence, nodes = [], [], []
    for local, number in enumerate(sequences):
        span = batch.span(number)
        places = np.flatnonzero(batch.mask[span])
        trained.append(places + span.start)
        sequence.append(np.full(len(places), local))
        nodes.append(tree.paths[local][places - 1])  # the node before a token predicts it
    places, node = np.concatenate(trained), np.concatenate(nodes)
    token = batch.tokens[places].astype(np.int64)
    pairs, pair = np.unique(np.stack([node, token]), axis=1, return_inverse=True)
    rows, pair_rows = np.unique(pairs[0], return_inverse=True)
    return MicroBatch(
        sequences=np.array(sequences),
        tree=tree,
        trained=places,
        sequence=np.concatenate(sequence),
        pair=pair.reshape(-1),
        rows=rows,
        pair_rows=pair_rows.reshape(-1),
        pair_tokens=pairs[1],
    )
