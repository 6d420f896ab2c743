"""Rollouts to batches and batches to parts: the sampled tokens are trained, once each, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models as tiny
from hypothesis import given
from hypothesis import strategies as st

from strop.errors import BatchError
from strop.learning import Batch, make_advantage, pack, pack_demonstrations
from strop.learning.microbatches import split_batch
from strop.learning.prefix_tree import build_tree, tree_size
from strop.rollouts import Failed, FailureKind, FinishReason, Group, ModelCall, Rollout, Scored, Task

CENTRED = make_advantage({"name": "grpo", "divide_by_std": False})
IM_END = 2  # pad, eos and end-of-turn of the start model are this one token


def call(parent, prompt, tokens, finish=FinishReason.STOP, version=3) -> ModelCall:
    return ModelCall(parent, prompt, tokens, [-0.1 * t for t in tokens], [version] * len(tokens), finish)


def rollout(member, calls, ending) -> Rollout:
    return Rollout(f"g-{member}", "t", "e", member, seed=member, calls=calls, ending=ending)


def group(*rollouts) -> Group:
    return Group("g", Task("t", "e", ()), list(rollouts))


def rows(batch: Batch) -> list[tuple[list[int], list[bool]]]:
    return [
        (batch.tokens[batch.span(n)].tolist(), batch.mask[batch.span(n)].tolist()) for n in range(len(batch.lengths))
    ]


def test_turns_become_one_row_and_tool_tokens_carry_nothing():
    calls = [call(None, [10, 11], [12, IM_END]), call(0, [20, 21, 22], [13, IM_END], version=4)]
    batch = pack(
        [group(rollout(0, calls, Scored(1.0)), rollout(1, [call(None, [10, 11], [14])], Scored(0.0)))], CENTRED
    )
    assert rows(batch)[0] == (
        [10, 11, 12, 2, 20, 21, 22, 13, 2],
        [False, False, True, True, False, False, False, True, True],
    )
    np.testing.assert_allclose(batch.advantages[batch.span(0)], [0, 0, 0.5, 0.5, 0, 0, 0, 0.5, 0.5])
    np.testing.assert_allclose(
        batch.sampler_logprobs[batch.span(0)], [0, 0, -1.2, -0.2, 0, 0, 0, -1.3, -0.2], rtol=1e-6
    )
    assert batch.versions[batch.span(0)].tolist() == [-1, -1, 3, 3, -1, -1, -1, 4, 4]
    assert batch.rollouts == ("g-0", "g-1")


def test_the_end_of_turn_is_trained_though_it_is_the_padding_token_too():
    """Masks come from where a token came from, never from its id."""
    batch = pack([group(rollout(0, [call(None, [IM_END, IM_END], [5, IM_END])], Scored(1.0)))], CENTRED)
    assert rows(batch) == [([2, 2, 5, 2], [False, False, True, True])]
    part = split_batch(batch, 100, np.array([0]))[0]
    assert part.tree.tokens.tolist() == [2, 2, 5]  # markers in the prompt keep their place
    assert part.pair_tokens.tolist() == [5, 2]


def test_a_shared_call_is_trained_in_one_branch_only():
    calls = [call(None, [10], [11]), call(0, [20], [21]), call(0, [30], [31]), call(None, [40], [41])]
    batch = pack([group(rollout(0, calls, Scored(1.0)))], CENTRED)
    assert rows(batch) == [
        ([10, 11, 20, 21], [False, True, False, True]),
        ([10, 11, 30, 31], [False, False, False, True]),
        ([40, 41], [False, True]),
    ]


def test_failed_members_are_left_out_and_out_of_the_baseline():
    members = [
        rollout(0, [call(None, [1], [5])], Scored(1.0)),
        rollout(1, [call(None, [1], [6])], Failed(FailureKind.SANDBOX, "died")),
        rollout(2, [call(None, [1], [7])], Scored(0.0)),
    ]
    batch = pack([group(*members)], CENTRED)
    assert batch.rollouts == ("g-0", "g-2")
    np.testing.assert_allclose(batch.advantages[batch.mask], [0.5, -0.5])


def test_truncated_rollouts_can_be_left_out_and_still_count_in_the_baseline():
    cut = rollout(1, [call(None, [1], [6, 6], FinishReason.LENGTH)], Scored(0.0))
    batch = pack([group(rollout(0, [call(None, [1], [5])], Scored(1.0)), cut)], CENTRED, mask_truncated=True)
    assert rows(batch) == [([1, 5], [False, True])]
    np.testing.assert_allclose(batch.advantages[batch.mask], [0.5])
    nothing = pack([group(cut)], CENTRED, mask_truncated=True)
    assert len(nothing.lengths) == 0
    assert not nothing.teaches


def test_other_rewards_can_be_trained_on():
    members = [rollout(m, [call(None, [1], [5])], Scored(1.0)) for m in range(2)]
    batch = pack([group(*members)], CENTRED, rewards=lambda g: [0.0, 4.0])
    np.testing.assert_allclose(batch.advantages[batch.mask], [-2, 2])


def test_a_group_of_equals_teaches_nothing():
    members = [rollout(m, [call(None, [1], [5])], Scored(0.7)) for m in range(3)]
    assert not pack([group(*members)], CENTRED).teaches


def test_demonstrations():
    batch = pack_demonstrations([([1, 2, 3], [False, True, False]), ([4, 5], [False, True])])
    assert rows(batch) == [([1, 2, 3], [False, True, False]), ([4, 5], [False, True])]
    assert batch.advantages[batch.mask].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("examples", "says"),
    [
        ([], "no demonstrations"),
        ([([1, 2], [False, True]), ([1, 2, 3], [False] * 3)], "demonstration 1 .* without any token to learn"),
        ([([1, 2], [True])], "a mask of 1"),
        ([([1, 2], [True, True])], "first token"),
    ],
)
def test_bad_demonstrations_are_refused(examples, says):
    with pytest.raises(BatchError, match=says):
        pack_demonstrations(examples)


def test_a_batch_survives_storage_exactly(tmp_path):
    batch = tiny.batch(turns=2).with_extras(
        reference_logprobs=np.linspace(-3, 0, len(tiny.batch(turns=2).tokens), dtype=np.float32)
    )
    batch.save(tmp_path / "batch.npz")
    again = Batch.load(tmp_path / "batch.npz")
    for name in ("tokens", "mask", "advantages", "sampler_logprobs", "versions", "lengths", "groups"):
        found, expected = getattr(again, name), getattr(batch, name)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    assert again.rollouts == batch.rollouts
    np.testing.assert_array_equal(again.extras["reference_logprobs"], batch.extras["reference_logprobs"])


def test_a_damaged_batch_says_so(tmp_path):
    tiny.batch().save(tmp_path / "batch.npz")
    (tmp_path / "batch.npz").write_bytes((tmp_path / "batch.npz").read_bytes()[:-100])
    with pytest.raises(BatchError, match=r"batch\.npz"):
        Batch.load(tmp_path / "batch.npz")


def test_values_for_too_few_tokens_are_refused():
    with pytest.raises(BatchError, match="extra"):
        tiny.batch().with_extras(extra=np.zeros(3, np.float32))


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=10)


@given(sequences)
def test_a_prefix_tree_keeps_every_sequence_and_shares_every_prefix(rows):
    arrays = [np.array(row, dtype=np.int32) for row in rows]
    tree = build_tree(arrays)
    for row, path in zip(rows, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == row
        assert tree.positions[path].tolist() == list(range(len(row)))
        # A node sees exactly the nodes on its own path: key <= query < end[key].
        for depth, node in enumerate(path):
            seen = np.flatnonzero((np.arange(len(tree.tokens)) <= node) & (node < tree.end))
            assert seen.tolist() == path[: depth + 1].tolist()
    distinct = {tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)}
    assert len(tree.tokens) == len(distinct) == tree_size(arrays)


@given(st.integers(0, 1000), st.integers(50, 200), st.booleans())
def test_a_split_keeps_to_its_budget_and_loses_no_token(seed, budget, shared):
    batch = tiny.batch(seed=seed, turns=2)
    parts = split_batch(batch, budget, np.arange(len(batch.lengths)), shared=shared)
    trained = np.concatenate([part.trained for part in parts])
    np.testing.assert_array_equal(np.sort(trained), np.flatnonzero(batch.mask))
    for part in parts:
        padded = len(part.sequences) * max(len(path) for path in part.tree.paths)
        assert (len(part.tree.tokens) if shared else padded) <= budget
        np.testing.assert_array_equal(part.pair_tokens[part.pair], batch.tokens[part.trained])


def test_what_all_tasks_begin_with_is_computed_once():
    """Whatever their groups: a system message, and tools."""
    system = list(range(3, 43))
    batch = pack_demonstrations([([*system, 50 + n, 60 + n], [False] * 41 + [True]) for n in range(5)])
    assert len(set(batch.groups.tolist())) == 5
    (part,) = split_batch(batch, 45, np.arange(5))
    assert len(part.tree.tokens) == 40 + 5


def test_a_sequence_over_the_budget_says_what_to_change():
    batch = tiny.batch(prompt=50)
    with pytest.raises(BatchError, match=r"tokens_per_micro_batch = 40\. Set .* to at least \d+") as caught:
        split_batch(batch, 40, np.arange(len(batch.lengths)))
    assert "0-" in str(caught.value)


def test_a_group_that_must_stay_whole_is_not_split():
    batch = tiny.batch()
    chosen = np.arange(len(batch.lengths))
    with pytest.raises(BatchError, match="group 0"):
        split_batch(batch, 30, chosen, whole_groups=True)
    for part in split_batch(batch, 100, chosen, whole_groups=True):
        for number in batch.groups[part.sequences]:
            assert set(np.flatnonzero(batch.groups == number)) <= set(part.sequences)
