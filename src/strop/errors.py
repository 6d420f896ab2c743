"""The errors that strop raises on purpose: each names the thing, says what is wrong and what would be right.

Bad input ends in a `StropError` before work starts. A failure of the system during an attempt ends in an
`AttemptError`, which carries the kind that the rollout records; see `strop.rollouts.FailureKind`.
"""

from __future__ import annotations

from strop.rollouts import FailureKind


class StropError(Exception):
    """Base of every error that is meant for the user to read: one paragraph, no traceback needed."""


class ConfigError(StropError):
    """A setting is wrong. Names the key, what is wrong, and what would be right."""

    def __init__(self, key: str, wrong: str, right: str) -> None:
        self.key, self.wrong, self.right = key, wrong, right
        super().__init__(f"{key}: {wrong}. {right}" if right else f"{key}: {wrong}.")


class ModelError(StropError):
    """A model can't be found, loaded or saved."""


class WeightsError(StropError):
    """An update of the weights was dropped, empty, stale or broken off."""


class DataError(StropError):
    """A data file can't be read, or its rows can't be trained on. Names the file, and the first rows with their fields."""


class EnvironmentProblem(StropError):
    """An environment can't be loaded, or breaks its protocol."""


class RunError(StropError):
    """A run directory can't be used: locked, damaged, read-only, or of another recipe."""


class BatchError(StropError):
    """A training batch can't be trained on: empty, too long, or inconsistent."""


class EvaluationError(StropError):
    """An evaluation can't be read, estimated from, or compared."""


class GateError(StropError):
    """A stage's model was not promoted, and its gate ends the run then. The run is resumable."""


class BudgetError(StropError):
    """What a run may spend is spent. The run is resumable."""


class StallError(StropError):
    """A wait passed its deadline. Says what was waited for, since when; the run is resumable."""


class AttemptError(Exception):
    """A failure of the system during one attempt, never of the agent: retried, then left out of its group.

    Args:
        kind: where it failed.
        reason: one sentence for the reader of the run.
    """

    def __init__(self, kind: FailureKind, reason: str) -> None:
        self.kind, self.reason = kind, reason
        super().__init__(f"{kind.value}: {reason}")
