"""A whole recipe, and what its tables must have to do with each other."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from strop.config.stages import (
    AttemptsSettings,
    DistillSettings,
    PreferenceSettings,
    RewardSettings,
    RLSettings,
    SFTSettings,
    StageSettings,
)
from strop.config.tables import (
    CostSettings,
    DeadlineSettings,
    DebugSettings,
    EnvironmentSettings,
    EvaluationSettings,
    HealthSettings,
    LearnerSettings,
    MixedSettings,
    ModelSettings,
    Name,
    SamplerSettings,
    Settings,
)
from strop.errors import ConfigError

Stage = Annotated[
    SFTSettings | PreferenceSettings | RewardSettings | RLSettings | DistillSettings, Field(discriminator="kind")
]
#: Stages by their kind.
KINDS: dict[str, type[StageSettings]] = {
    "sft": SFTSettings,
    "preference": PreferenceSettings,
    "reward": RewardSettings,
    "rl": RLSettings,
    "distill": DistillSettings,
}


class Recipe(Settings):
    """A whole training run."""

    name: Name
    seed: int = 0
    threads: Annotated[int, Field(ge=0)] = 0  # of torch; 0: all cores
    model: ModelSettings = ModelSettings()
    sampler: SamplerSettings = SamplerSettings()
    learner: LearnerSettings = LearnerSettings()
    environment: EnvironmentSettings | None = None
    evaluation: EvaluationSettings = EvaluationSettings()
    costs: CostSettings = CostSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    health: HealthSettings = HealthSettings()
    debug: DebugSettings = DebugSettings()
    stages: Annotated[list[Stage], Field(min_length=1)]

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        names = [stage.name for stage in self.stages]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two stages are called {doubled[0]!r}; every stage needs a name of its own")
        for stage in self.stages:
            if stage.needs_environment and not self.environments_of(stage):
                raise ValueError(f"stage {stage.name!r} has no environment; add an [environment] table to the recipe")
            for environment in self.environments_of(stage):
                if environment.agent.max_tokens >= self.sampler.max_context:
                    raise ValueError(
                        f"environment.agent.max_tokens = {environment.agent.max_tokens} leaves no room for a prompt in "
                        f"sampler.max_context = {self.sampler.max_context}; raise the one or lower the other"
                    )
                if isinstance(stage, AttemptsSettings) and environment.agent.kind == "program":
                    _check_time(environment.agent.seconds, stage.collect.attempt_seconds)
            if isinstance(stage, RewardSettings) and stage is not self.stages[-1]:
                raise ValueError(
                    f"stage {stage.name!r} makes a reward model, which no stage can go on from; put it last"
                )
            if stage.gate and (not self.evaluation_of(stage).tasks or self.debug.only):
                raise ValueError(f"stage {stage.name!r} has a gate, but nothing is evaluated; set evaluation.tasks")
        return self

    def environment_of(self, stage: StageSettings) -> EnvironmentSettings:
        """The stage's environment, or the recipe's: of several, the first.

        Raises:
            ConfigError: it has none (`environments_of` is empty).
        """
        if isinstance(stage, AttemptsSettings) and stage.environments:
            return stage.environments[0]
        if (found := stage.environment or self.environment) is None:
            raise ConfigError(f"stages.{stage.name}", "it has no environment", "Add an [environment] table")
        return found

    def environments_of(self, stage: StageSettings) -> list[MixedSettings]:
        """The environments of a stage, most often one; none for examples from files that nothing is scored on."""
        if isinstance(stage, AttemptsSettings) and stage.environments:
            return stage.environments
        if stage.environment is None and self.environment is None:
            return []
        return [MixedSettings(**dict(self.environment_of(stage)))]

    def evaluation_of(self, stage: StageSettings) -> EvaluationSettings:
        """The stage's evaluation, or the recipe's. Without an environment, and of a reward model, there is none."""
        asked = stage.evaluation or self.evaluation
        scored = self.environments_of(stage) and not isinstance(stage, RewardSettings)
        return asked if scored else asked.model_copy(update={"tasks": 0})


def _check_time(agent: float, attempt: float) -> None:
    """A program has to be stopped before the system gives its attempt up: the one is scored, the other a failure."""
    if agent >= attempt:
        raise ValueError(
            f"environment.agent.seconds = {agent:g} is not below collect.attempt_seconds = {attempt:g}, after which an "
            "attempt is a failure of the system; raise the one or lower the other"
        )
