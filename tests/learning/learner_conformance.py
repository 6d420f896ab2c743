"""What every learner must do. A test module of an implementation calls these with a way to make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny

from strop.errors import BatchError
from strop.learning import Batch, Component, Learner, Loss, make_loss

MakeLearner = Callable[[], Learner]
LOSS = make_loss([{"name": "ppo_clip"}])


@dataclass(frozen=True, kw_only=True)
class Imitation(Component):
    """A component that needs what no batch here carries."""

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"teacher_logprobs"})


def train(learner: Learner, steps: range, rate: float = 1e-2) -> None:
    for step in steps:
        learner.forward_backward(tiny.batch(seed=step), LOSS)
        learner.step(rate)


def check_learning(make: MakeLearner) -> None:
    """A step along a positive advantage makes the tokens likelier, and raises the version by one."""
    learner, batch = make(), tiny.batch()
    praised = Batch(**{**vars(batch), "advantages": batch.mask.astype(np.float32)})
    before, version = learner.logprobs(praised), learner.version
    metrics = learner.forward_backward(praised, make_loss([{"name": "reinforce"}]))
    metrics |= learner.step(1e-3)
    assert learner.logprobs(praised).sum() > before.sum()
    assert learner.version == version + 1 == metrics["version"]
    assert metrics["grad_norm"] > 0
    assert {"loss", "entropy", "mismatch_kl", "mismatch_max", "tokens_trained", "learning_rate"} <= metrics.keys()


def check_determinism(make: MakeLearner) -> None:
    """The same batches give the same weights, bit for bit."""
    first, second = make(), make()
    for learner in (first, second):
        train(learner, range(3))
    np.testing.assert_array_equal(first.logprobs(tiny.batch()), second.logprobs(tiny.batch()))


def check_resume(make: MakeLearner, folder: Path) -> None:
    """Stopped after every step and resumed elsewhere: the same weights and moments as without a stop."""
    steady = make()
    train(steady, range(4))
    for stop in range(1, 4):
        before, after = make(), make()
        train(before, range(stop))
        place = folder / str(stop)
        place.mkdir()
        before.save(place)
        train(after, range(7, 8))  # it was elsewhere meanwhile
        after.load(place, version=max(before.version, after.version + 1))
        train(after, range(stop, 4))
        np.testing.assert_array_equal(after.logprobs(tiny.batch()), steady.logprobs(tiny.batch()))


def check_refusals(make: MakeLearner) -> None:
    """Nothing to do is said, bad batches are refused, and neither changes anything."""
    learner, batch = make(), tiny.batch()
    before = learner.logprobs(batch)
    flat = Batch(**{**vars(batch), "advantages": np.zeros_like(batch.advantages)})
    assert learner.forward_backward(flat, LOSS)["skipped"] == 1
    assert learner.step(1e-2)["skipped"] == 1
    with pytest.raises(BatchError, match="teacher_logprobs"):
        learner.forward_backward(batch, Loss((("imitation", 1.0, Imitation()),)))
    assert learner.step(1e-2)["skipped"] == 1
    np.testing.assert_array_equal(learner.logprobs(batch), before)
    assert learner.version == 0
