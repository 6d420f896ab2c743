"""Scoring a model on environments. What scores mean (intervals, pass@k, comparisons) is in `strop.statistics`."""

from strop.evaluation.evaluate import attempt_all, evaluation_of

__all__ = ["attempt_all", "evaluation_of"]
