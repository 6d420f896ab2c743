"""Teachers of a distillation stage: models that are asked for the log-probability of every token the student sampled.

Which teacher an attempt has is told by its environment. A teacher reads the student's tokens as they are, so both must
have the same tokenizer; that is checked before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import DistillSettings, Recipe, TeacherSettings
from strop.errors import ConfigError, RunError
from strop.learning import Batch, taught
from strop.models.load import check_model, load_model, load_tokenizer, resolve_model
from strop.rollouts import Group
from strop.runs.run import check_checkpoint

if TYPE_CHECKING:
    from strop.models.policy import Policy
    from strop.training.workshop import Workshop


class Teachers:
    """The teachers of a stage, loaded.

    Args:
        stage: with at least one teacher.
        shop: of the run; it has the checkpoints of earlier stages.

    Raises:
        ModelError: a teacher can't be loaded.
        ConfigError: its tokenizer is another one than the student's.
        RunError: it is not the model that it was when the stage began.
    """

    def __init__(self, stage: DistillSettings, shop: Workshop) -> None:
        self.stage, self.shop = stage, shop
        self._policies: list[Policy] = []
        limit = shop.recipe.deadlines.setup_seconds
        with shop.run.ledger.activity("setup"), shop.run.waits.during("loading the teachers", limit):
            self._load()

    def _load(self) -> None:
        import torch

        from strop.models.policy import Policy

        stage, shop, dtype = self.stage, self.shop, self.shop.recipe.model.dtype
        for number, asked in enumerate(stage.teachers):
            source = asked.model or str(checkpoint_of(shop.checkpoints, asked.stage))
            loaded = load_model(source)
            check_tokens(shop.tokenizer, loaded.tokenizer, source, f"stages.{stage.name}.teachers.{number}")
            policy = Policy(loaded.model, dtype=None if dtype == "auto" else getattr(torch, dtype))
            shop.run.same_teacher(stage.name, number, source, policy.content)
            self._policies.append(policy)

    async def __call__(self, batch: Batch, groups: Sequence[Group], temperature: float) -> Batch:
        """The batch with every trained token's log-probability under the teacher of its attempt's environment."""
        called = [environment.called for environment in self.shop.recipe.environments_of(self.stage)]
        names = [group.task.environment if len(called) > 1 else called[0] for group in groups]
        numbers = [teacher_of(self.stage.teachers, name) for name in names]
        return await self.shop.compute(
            "the teachers' log-probabilities", "teacher", self._ask, batch, numbers, temperature
        )

    def _ask(self, batch: Batch, numbers: Sequence[int], temperature: float) -> Batch:
        from strop.learning.outputs import frozen_logprobs

        budget = self.shop.recipe.learner.tokens_per_micro_batch
        asked = {
            number: lambda part, policy=policy: frozen_logprobs(policy, part, temperature, budget)
            for number, policy in enumerate(self._policies)
        }
        return taught(batch, [numbers[group] for group in batch.groups], asked)


def teacher_of(teachers: Sequence[TeacherSettings], environment: str) -> int:
    """Number of the teacher that scores attempts at an environment: the one that names it, else the one that names none.

    Raises:
        ConfigError: there is no such teacher.
    """
    named = [number for number, teacher in enumerate(teachers) if environment in teacher.environments]
    others = [number for number, teacher in enumerate(teachers) if not teacher.environments]
    if not (named or others):
        raise ConfigError("teachers", f"none of them teaches {environment}", "Name it in the environments of one")
    return (named or others)[0]


def check_teachers(recipe: Recipe, stage: DistillSettings, student: Any = None) -> None:
    """Refuse what can't work, before anything starts.

    Args:
        recipe, stage: what is asked.
        student: the student's tokenizer; None, before it is loaded, compares those that are on this machine already.

    Raises:
        ConfigError: a stage that is not before this one, an environment with no teacher or two, or another tokenizer.
    """
    key = f"stages.{stage.name}.teachers"
    before = [other.name for other in recipe.stages[: recipe.stages.index(stage)]]
    called = [environment.called for environment in recipe.environments_of(stage)]
    for number, teacher in enumerate(stage.teachers):
        if teacher.stage and teacher.stage not in before:
            there = f"Stages before it: {', '.join(before) or 'none'}"
            raise ConfigError(f"{key}.{number}.stage", f"{teacher.stage!r} is no stage before {stage.name}", there)
        if unknown := sorted(set(teacher.environments) - set(called)):
            right = f"The stage has: {', '.join(called)}"
            raise ConfigError(f"{key}.{number}.environments", f"there is no environment {unknown[0]!r}", right)
    for environment in called:
        claims = [teacher for teacher in stage.teachers if environment in teacher.environments]
        if len(claims) > 1:
            raise ConfigError(key, f"{len(claims)} teachers name {environment}", "Let one of them score its attempts")
        if stage.teachers:
            teacher_of(stage.teachers, environment)
    if len([teacher for teacher in stage.teachers if not teacher.environments]) > 1:
        raise ConfigError(key, "two teachers name no environments", "Say which environments each of them teaches")
    for number, teacher in enumerate(stage.teachers):
        if not teacher.model or (student is None and not (_is_here(recipe.model.name) and _is_here(teacher.model))):
            continue
        check_model(teacher.model)
        ours = load_tokenizer(resolve_model(recipe.model.name)) if student is None else student
        check_tokens(ours, load_tokenizer(resolve_model(teacher.model)), teacher.model, f"{key}.{number}")


def _is_here(model: str) -> bool:
    """Whether a model's files are on this machine, so that nothing need be fetched to look at them."""
    from strop.models.start import START_MODELS, start_model_folder

    return start_model_folder(model).exists() if model in START_MODELS else Path(model).expanduser().exists()


def check_tokens(student: Any, teacher: Any, source: str, key: str) -> None:
    """Refuse a teacher whose token ids mean other text than the student's.

    Args:
        student, teacher: tokenizers.
        source: what the teacher is called.
        key: the recipe's.

    Raises:
        ConfigError: says how they differ.
    """
    ours, theirs = student.get_vocab(), teacher.get_vocab()
    right = (
        "A teacher scores the student's tokens as they are: use one with the student's tokenizer, or train on its "
        "attempts instead (stored)"
    )
    if ours != theirs:
        different = sorted((ours.items() - theirs.items()) | (theirs.items() - ours.items()), key=lambda pair: pair[1])
        token, number = different[0]
        wrong = f"{source} has another vocabulary: {len(theirs)} tokens for {len(ours)}, and {token!r} ({number}) in one only"
        raise ConfigError(key, wrong, right)
    if _splitting(student) != _splitting(teacher):
        raise ConfigError(key, f"{source} has the same vocabulary, but splits text into tokens differently", right)


def _splitting(tokenizer: Any) -> Any:
    """What decides how text becomes tokens, apart from the vocabulary; None where a tokenizer doesn't say."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    told = json.loads(backend.to_str())
    return [told.get("normalizer"), told.get("pre_tokenizer"), (told.get("model") or {}).get("merges")]


def checkpoint_of(checkpoints: Path, stage: str) -> Path:
    """The last checkpoint of a stage that is over.

    Raises:
        RunError: there is none, or it is damaged.
    """
    found = sorted(path for path in checkpoints.glob(f"{stage}-[0-9]*") if path.name.rpartition("-")[0] == stage)
    if not found:
        raise RunError(f"{checkpoints} has no checkpoint of stage {stage}, which is to teach. Restore it from a copy.")
    if problems := list(check_checkpoint(found[-1])):
        raise RunError(f"checkpoint {found[-1].name}, which is to teach, is damaged: {'; '.join(problems)}.")
    return found[-1]
