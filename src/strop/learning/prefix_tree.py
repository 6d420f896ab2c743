"""Sequences that begin alike, laid out so that what they share is computed once.

The sequences of a group become a tree of tokens, numbered depth first. A token attends to its ancestors and itself;
since a subtree is a contiguous range of numbers, `key <= query < end[key]` says exactly that. No padding, no ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        roots: (trees,) first node of every tree.
    """

    tokens: Ints
    positions: Ints
    end: Ints
    paths: tuple[Ints, ...]
    roots: Ints


def build_tree(sequences: Sequence[NDArray[np.int32]], groups: Sequence[int]) -> PrefixTree:
    """Lay out sequences; those of one group share common prefixes, those of different groups nothing.

    Args:
        sequences: token ids, at least one each.
        groups: group of each; sequences of a group are neighbours.
    """
    tokens: list[NDArray[np.int32]] = []
    positions: list[Ints] = []
    paths: list[Ints | None] = [None] * len(sequences)
    nodes, roots = 0, []
    ends: list[tuple[Ints, int]] = []  # nodes that are complete once so many nodes are there
    for group in dict.fromkeys(groups):
        members = [number for number, other in enumerate(groups) if other == group]
        # In lexicographic order a sequence shares most with the one before it, and nodes come out depth first.
        members.sort(key=lambda number: sequences[number].astype(">u4").tobytes())
        before, path = sequences[members[0]][:0], np.zeros(0, dtype=np.int64)
        for number in members:
            sequence = sequences[number]
            shared = _common_prefix(before, sequence)
            ends.append((path[shared:], nodes))
            new = np.arange(nodes, nodes + len(sequence) - shared)
            if shared == 0:
                roots.append(nodes)
            tokens.append(sequence[shared:])
            positions.append(np.arange(shared, len(sequence)))
            path = np.concatenate([path[:shared], new])
            paths[number] = path
            nodes, before = nodes + len(new), sequence
        ends.append((path, nodes))
    end = np.zeros(nodes, dtype=np.int64)
    for complete, at in ends:
        end[complete] = at
    return PrefixTree(
        tokens=np.concatenate(tokens).astype(np.int64),
        positions=np.concatenate(positions),
        end=end,
        paths=tuple(path for path in paths if path is not None),
        roots=np.array(roots, dtype=np.int64),
    )


def _common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Number of leading tokens that agree."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
