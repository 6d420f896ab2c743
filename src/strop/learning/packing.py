"""Rollouts and demonstrations to batches. Trained tokens are the sampled tokens; nothing is tokenized here.

A rollout gives one sequence for each branch of its graph. A call that several branches share is trained in the first
of them only, so no token counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from strop.errors import BatchError
from strop.learning.advantages import Advantage, Rewards
from strop.learning.batch import Batch
from strop.rollouts import ExpertChoices, Group, Rollout


class _Rows:
    """Collects sequences of (token, mask, advantage, log-probability, version)."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.mask: list[bool] = []
        self.advantages: list[float] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.lengths: list[int] = []
        self.groups: list[int] = []
        self.rollouts: list[str] = []
        self.experts: dict[int, ExpertChoices] = {}  # by the place of the first token that they lead to

    def chosen(self, experts: ExpertChoices | None) -> None:
        """Which experts led to the tokens that follow."""
        if experts is not None:
            self.experts[len(self.tokens)] = experts

    def given(self, tokens: Sequence[int]) -> None:
        """Tokens that are read and not trained."""
        self._add(tokens, False, 0.0, [0.0] * len(tokens), [-1] * len(tokens))

    def sampled(
        self, tokens: Sequence[int], advantage: float, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        """Tokens that are trained."""
        self._add(tokens, True, advantage, logprobs, versions)

    def _add(
        self, tokens: Sequence[int], mask: bool, advantage: float, logprobs: Sequence[float], versions: Sequence[int]
    ) -> None:
        self.tokens += tokens
        self.mask += [mask] * len(tokens)
        self.advantages += [advantage] * len(tokens)
        self.logprobs += logprobs
        self.versions += versions

    def end(self, group: int, rollout: str) -> None:
        """The sequence is complete."""
        self.lengths.append(len(self.tokens) - sum(self.lengths))
        self.groups.append(group)
        self.rollouts.append(rollout)

    def batch(self) -> Batch:
        return Batch(
            tokens=np.array(self.tokens, dtype=np.int32),
            mask=np.array(self.mask, dtype=bool),
            advantages=np.array(self.advantages, dtype=np.float32),
            sampler_logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            lengths=np.array(self.lengths, dtype=np.int64),
            groups=np.array(self.groups, dtype=np.int64),
            rollouts=tuple(self.rollouts),
            experts=self._experts(),
        )

    def _experts(self) -> NDArray[np.int16] | None:
        if not self.experts:
            return None
        one = next(iter(self.experts.values()))
        found = np.full((len(self.tokens), one.layers, one.per_token), -1, dtype=np.int16)
        for start, choices in self.experts.items():
            ids = np.frombuffer(choices.ids, dtype="<i2").reshape(-1, one.layers, one.per_token)
            found[start : start + len(ids)] = ids
        return found


def pack(
    groups: Sequence[Group],
    advantage: Advantage,
    *,
    rewards: Callable[[Group], Rewards] = lambda group: group.rewards,
    mask_truncated: bool = False,
) -> Batch:
    """Make a batch of scored groups.

    Args:
        groups: their failed members are left out, of the baseline too.
        advantage: rewards to advantages; every sampled token of a rollout gets the rollout's.
        rewards: reward of each member where it is not the plain one (a length penalty); None for one that failed.
        mask_truncated: leave out rollouts that ran into the token limit. They still count in their group's baseline:
            how hard a task is does not depend on what is trained.

    Returns:
        The batch; it may be empty of sequences when nothing was scored.

    Raises:
        BatchError: a sampled token has no token before it.
    """
    rows = _Rows()
    for number, (group, values) in enumerate(zip(groups, advantage([rewards(group) for group in groups]), strict=True)):
        for rollout, value in zip(group.rollouts, values, strict=True):
            if rollout.reward is not None and not (mask_truncated and rollout.truncated):
                _add_rollout(rows, number, rollout, float(value))
    return rows.batch()


def _add_rollout(rows: _Rows, group: int, rollout: Rollout, advantage: float) -> None:
    trained: set[int] = set()
    for leaf in rollout.leaves():
        branch = rollout.branch(leaf)
        if not any(rollout.calls[index].tokens for index in branch if index not in trained):
            continue
        for index in branch:
            call = rollout.calls[index]
            rows.chosen(call.experts)
            rows.given(call.prompt)
            if index in trained:
                rows.given(call.tokens)
            else:
                rows.sampled(call.tokens, advantage, call.logprobs, call.versions)
        trained.update(branch)
        rows.end(group, rollout.id)


#: Token ids, and for each whether it is to be learnt.
Example = tuple[Sequence[int], Sequence[bool]]


def pack_demonstrations(examples: Sequence[Example]) -> Batch:
    """Make a batch for supervised learning.

    Args:
        examples: tokens and mask (true where the token is to be learnt) of each.

    Returns:
        A batch whose advantages are 1 and whose sampler log-probabilities are 0 at the trained tokens.

    Raises:
        BatchError: no example, lengths that differ, a mask without any true (it would train on nothing while the loss
            looks fine), or a first token that is to be learnt.
    """
    return _pack_examples([(example, 1.0, number) for number, example in enumerate(examples)])


def pack_judged(examples: Sequence[tuple[Example, float, int]]) -> Batch:
    """Make a batch for preference losses.

    Args:
        examples: tokens and mask; 1 for chosen or desirable, -1 for rejected or undesirable, which becomes the
            advantage of the trained tokens; number of the group (the pair).

    Raises:
        BatchError: as `pack_demonstrations`.
    """
    return _pack_examples(examples)


def _pack_examples(examples: Sequence[tuple[Example, float, int]]) -> Batch:
    if not examples:
        raise BatchError("there are no demonstrations to pack.")
    rows = _Rows()
    for number, ((tokens, mask), advantage, group) in enumerate(examples):
        if len(tokens) != len(mask):
            raise BatchError(f"demonstration {number} has {len(tokens)} tokens and a mask of {len(mask)}.")
        if not any(mask):
            raise BatchError(
                f"demonstration {number} ({len(tokens)} tokens) has a mask without any token to learn. It must mark the "
                "assistant's tokens, end of turn included; check how the conversation was rendered."
            )
        for learnt, run in groupby(zip(tokens, mask, strict=True), key=lambda pair: bool(pair[1])):
            part = [token for token, _ in run]
            if learnt:
                rows.sampled(part, advantage, [0.0] * len(part), [-1] * len(part))
            else:
                rows.given(part)
        rows.end(group, f"demonstration-{number}")
    return rows.batch()
