"""Judges: models behind an OpenAI-compatible endpoint that score attempts, by a rubric or against a reference."""

from strop.environments.judging.endpoint import Endpoint, key_of
from strop.environments.judging.environment import Judged
from strop.environments.judging.judge import Judge, Judgement
from strop.environments.judging.purse import Cache, Purse

__all__ = ["Cache", "Endpoint", "Judge", "Judged", "Judgement", "Purse", "key_of"]
