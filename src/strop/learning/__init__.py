"""Learning: advantages, losses, packing and the learner. The door imports no torch until the learner is asked for."""

from typing import TYPE_CHECKING, Any

from strop.learning.advantages import ADVANTAGES, Advantage, apart, make_advantage
from strop.learning.batch import Batch
from strop.learning.corrections import CORRECTIONS
from strop.learning.distillation import ReverseKL, taught
from strop.learning.filters import has_variance, overlong_penalty
from strop.learning.learner import Learner, Metrics
from strop.learning.losses import LOSSES, Component, Loss, Tokens, make_loss
from strop.learning.packing import pack, pack_demonstrations, pack_judged
from strop.learning.preferences import PairLoss
from strop.learning.schedules import Schedule

if TYPE_CHECKING:
    from strop.learning.embedded import EmbeddedLearner

__all__ = [
    "ADVANTAGES",
    "CORRECTIONS",
    "LOSSES",
    "Advantage",
    "Batch",
    "Component",
    "EmbeddedLearner",
    "Learner",
    "Loss",
    "Metrics",
    "PairLoss",
    "ReverseKL",
    "Schedule",
    "Tokens",
    "apart",
    "has_variance",
    "make_advantage",
    "make_loss",
    "overlong_penalty",
    "pack",
    "pack_demonstrations",
    "pack_judged",
    "taught",
]


def __getattr__(name: str) -> Any:
    if name == "EmbeddedLearner":
        from strop.learning.embedded import EmbeddedLearner

        return EmbeddedLearner
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
