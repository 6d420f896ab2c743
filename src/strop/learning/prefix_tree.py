"""Sequences that begin alike, laid out so that what they share is computed once.

The sequences become a forest of tokens, numbered depth first, in which equal prefixes are the same nodes: a group's
prompt, the turns that some of its members share, and a system message that all tasks have in common. A token attends to
its ancestors and itself; since a subtree is a contiguous range of numbers, `key <= query < end[key]` says exactly that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """A forest of tokens, depth first.

    Attributes:
        tokens: (nodes,) ids.
        positions: (nodes,) depth: the token's place in its sequence.
        end: (nodes,) one past the last node of the subtree below each.
        paths: nodes of each sequence, first to last token.
    """

    tokens: Ints
    positions: Ints
    end: Ints
    paths: tuple[Ints, ...]


def build_tree(sequences: Sequence[NDArray[np.int32]]) -> PrefixTree:
    """Lay out sequences (token ids, at least one each) so that common prefixes are shared."""
    tokens: list[NDArray[np.int32]] = []
    positions: list[Ints] = []
    paths: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(sequences)
    before, path, nodes = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64), 0
    ends: list[tuple[Ints, int]] = []  # nodes that are complete once so many nodes are there
    for number in lexicographic(sequences):
        # In this order a sequence shares most with the one before it, and nodes come out depth first.
        sequence = sequences[number]
        shared = _common_prefix(before, sequence)
        new = len(sequence) - shared
        ends.append((path[shared:], nodes))
        tokens.append(sequence[shared:])
        positions.append(np.arange(shared, len(sequence)))
        path = paths[number] = np.concatenate([path[:shared], np.arange(nodes, nodes + new)])
        nodes, before = nodes + new, sequence
    ends.append((path, nodes))
    end = np.zeros(nodes, dtype=np.int64)
    for complete, at in ends:
        end[complete] = at
    return PrefixTree(np.concatenate(tokens).astype(np.int64), np.concatenate(positions), end, tuple(paths))


def tree_size(sequences: Sequence[NDArray[np.int32]]) -> int:
    """Number of nodes that `build_tree` would make."""
    ordered = [sequences[number] for number in lexicographic(sequences)]
    shared = sum(_common_prefix(first, second) for first, second in pairwise(ordered))
    return sum(len(sequence) for sequence in ordered) - shared


def lexicographic(sequences: Sequence[NDArray[np.int32]]) -> list[int]:
    """Numbers of the sequences in the order of their tokens."""
    keys = [sequence.astype(">u4").tobytes() for sequence in sequences]
    return sorted(range(len(sequences)), key=keys.__getitem__)


def _common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Number of leading tokens that agree."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
