"""The stages of a recipe: one class of settings for each kind, and the tables that only stages have."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from strop.config.tables import (
    EnvironmentSettings,
    EvaluationSettings,
    MixedSettings,
    Name,
    Positive,
    Seconds,
    Settings,
    Share,
)


class CheckpointSettings(Settings):
    """When the state is saved. The end of a stage always is."""

    every: Annotated[int, Field(ge=0)] = 0  # steps; 0: at the end of the stage
    keep: Positive = 2  # newest ones kept in each stage


class ScheduleSettings(Settings):
    """Learning rate over a stage's steps."""

    learning_rate: Annotated[float, Field(gt=0)]
    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    final_share: Share = 0.0  # of the learning rate, at the last step (linear, cosine)


class Named(BaseModel):
    """A function that a recipe names, with its options: `{name = "grpo", divide_by_std = false}`."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def spec(self) -> dict[str, Any]:
        """Name and options as one table."""
        return {"name": self.name, **(self.model_extra or {})}


class CollectSettings(Settings):
    """How attempts are kept in flight and made into batches."""

    groups: Positive = 8  # trained on in one step
    group_size: Positive = 8
    staleness: Annotated[int, Field(ge=0)] = 0  # most weight versions between sampling and training; 0: synchronous
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    allow_truncated_sampling: bool = (
        False  # top_p, top_k and min_p renormalise: the ratio of an unchanged policy isn't 1
    )
    in_flight: Positive = 256  # attempts at once
    dynamic_sampling: bool = False  # groups without variance are replaced by further ones (DAPO)
    max_replacement_rounds: Annotated[int, Field(ge=0)] = 3  # then a smaller batch is trained
    oversample: Annotated[int, Field(ge=0)] = (
        0  # extra members; the group is complete with the first group_size to finish
    )
    retries: Annotated[int, Field(ge=0)] = 2  # of an attempt that the system failed
    attempt_seconds: Seconds = 300.0
    group_seconds: Seconds = 600.0  # then the group is used with the members it has, if two are scored
    stall_seconds: Seconds = 900.0  # a batch that takes longer ends the run, resumable
    max_failed_share: Share = 0.5  # of the last 64 attempts; above it the run stops with a diagnosis
    mask_truncated: bool = False  # attempts that ran into the token limit carry no loss

    @model_validator(mode="after")
    def _truncation_is_meant(self) -> Self:
        if (self.top_p < 1 or self.top_k or self.min_p) and not self.allow_truncated_sampling:
            raise ValueError(
                "top_p, top_k and min_p renormalise the distribution, so the trained ratio no longer starts at 1; "
                "leave them off, or set allow_truncated_sampling = true if it is meant"
            )
        return self


class OverlongSettings(Settings):
    """DAPO's soft overlong penalty (arXiv:2503.14476, eq. 13), on the sampled tokens of an attempt."""

    max_tokens: Positive
    window: Positive


class GateSettings(Settings):
    """What the held-out score after a stage must reach for its model to be promoted to the next one."""

    score_above: Share | None = None  # the lower end of the score's 95% interval
    gain_above: Annotated[float, Field(ge=-1, le=1)] | None = None  # of the gain over the model before, as a share
    otherwise: Literal["stop", "keep"] = "stop"  # end the run, resumable; or go on from the model before the stage

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.score_above is None and self.gain_above is None:
            raise ValueError("a gate needs score_above or gain_above: the lower bound that must be passed")
        return self


class StageSettings(Settings):
    """What every stage has. A table given here replaces the recipe's."""

    name: Name
    steps: Positive
    schedule: ScheduleSettings
    start: Literal["last", "fresh"] = "last"  # from the model that the last stage made, or from the recipe's anew
    environment: EnvironmentSettings | None = None
    evaluation: EvaluationSettings | None = None
    checkpoints: CheckpointSettings = CheckpointSettings()
    gate: GateSettings | None = None

    @property
    def needs_environment(self) -> bool:
        """Whether it can't train without one; it can be scored on one in any case."""
        return True


class DataSettings(Settings):
    """Examples from files. What a row may look like is said in docs/how-to-fine-tune.md."""

    path: str  # a JSONL, JSON or Parquet file, a folder of them, or a folder that the `datasets` library saved
    split: str = ""  # of a folder that has several; "": train, or the only one
    format: Literal[
        "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "pairs", "openai_pairs", "labelled"
    ] = "auto"  # of the rows; auto: told by the keys of the first one
    strings: Literal["chat", "plain"] = "chat"  # a prompt that is a string: a user's message, or text as it stands
    reasoning: Literal["keep", "drop"] = "keep"  # what an assistant thought before it spoke
    max_tokens: Positive = 1024  # of a row
    too_long: Literal["refuse", "cut", "drop"] = "refuse"  # rows beyond it; cut: their ends are left out
    bad_rows: Literal["refuse", "drop"] = "refuse"  # rows with something wrong


class ValidationSettings(Settings):
    """Examples that are never trained on; their loss says when to stop."""

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the rows, drawn by their content
    path: str = ""  # or a file of their own, of the same format
    every: Positive = 10  # steps between measurements; the stage's last step always is
    patience: Annotated[int, Field(ge=0)] = 0  # measurements without a new best that end the stage early; 0: never

    @model_validator(mode="after")
    def _from_one_place(self) -> Self:
        if bool(self.share) == bool(self.path):
            raise ValueError("validation examples are a share of the rows or a file of their own: give share or path")
        return self


class StoredPairsSettings(Settings):
    """Pairs made of a run's scored attempts: the best and the worst of each group."""

    run: str  # its directory
    stage: str
    margin: Annotated[float, Field(ge=0)] = 0.0  # rewards that are no further apart make no pair
    by_group: Positive = 1  # pairs of a group: the best with the worst, the second best with the second worst …


class ExamplesSettings(StageSettings):
    """What stages have that train on given examples."""

    batch_size: Positive = 8  # examples in one step: conversations, pairs, or judged answers
    data: DataSettings | None = None
    validation: ValidationSettings | None = None


class SFTSettings(ExamplesSettings):
    """Supervised fine-tuning on an environment's demonstrations, or on data from files."""

    kind: Literal["sft"]
    demonstrations: Positive = 1024  # distinct ones, drawn once; without `data`

    @property
    def needs_environment(self) -> bool:
        """See `StageSettings`."""
        return self.data is None


class _PairSettings(ExamplesSettings):
    """What stages have that train on pairs."""

    attempts: StoredPairsSettings | None = None

    @model_validator(mode="after")
    def _has_examples(self) -> Self:
        if (self.data is None) == (self.attempts is None):
            raise ValueError("pairs come from files or from a run's attempts: give one of data and attempts")
        return self

    @property
    def needs_environment(self) -> bool:
        """See `StageSettings`."""
        return False


class PreferenceSettings(_PairSettings):
    """Learning from answers that are preferred over others: DPO and its family."""

    kind: Literal["preference"]
    loss: list[Named] = [Named(name="dpo")]


class RewardSettings(_PairSettings):
    """A reward model from pairs (Bradley-Terry). The policy stays as it is, and the stage is its recipe's last."""

    kind: Literal["reward"]
    loss: list[Named] = [Named(name="bradley_terry")]


class AttemptsSettings(StageSettings):
    """What stages have that train on attempts of the model."""

    environments: list[MixedSettings] = []  # several in one stage; replaces `environment`
    collect: CollectSettings = CollectSettings()
    advantage: Named = Named(name="grpo")
    loss: list[Named] = [Named(name="ppo_clip")]  # components; each may have a weight
    overlong: OverlongSettings | None = None

    @model_validator(mode="after")
    def _environments_differ(self) -> Self:
        if self.environments and self.environment:
            raise ValueError("environment and environments were both given; list them all under environments")
        names = [environment.called for environment in self.environments]
        if doubled := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two environments are called {doubled[0]!r}; give each a label of its own")
        return self


class RLSettings(AttemptsSettings):
    """Reinforcement learning on scored attempts."""

    kind: Literal["rl"]

    @model_validator(mode="after")
    def _groups_compare(self) -> Self:
        if self.collect.group_size < 2:
            raise ValueError(
                "collect.group_size = 1 leaves nothing to compare an attempt with; it should be at least 2"
            )
        return self


class TeacherSettings(Settings):
    """A model whose log-probabilities the student learns from."""

    model: str = ""  # a start model's name, a local folder, or a hub name
    stage: str = ""  # or the model that this earlier stage of the run made
    environments: list[str] = []  # whose attempts it scores, by what they are called; []: those no other one names

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if bool(self.model) == bool(self.stage):
            raise ValueError("a teacher is named by model or by stage: give one of the two")
        return self


class StoredSettings(Settings):
    """Attempts that are on disk already: of a run's stage, the best of each group."""

    run: str = ""  # its directory; "": this run
    stage: str
    best: Positive = 1  # attempts of each group, the highest rewards first
    reward_above: float | None = None  # only attempts that were rewarded with more


class DistillSettings(AttemptsSettings):
    """Learning from teachers on the student's own attempts, or from stored attempts."""

    kind: Literal["distill"]
    teachers: list[TeacherSettings] = []
    stored: StoredSettings | None = None  # nothing is sampled: these are trained on
    loss: list[Named] = [Named(name="reverse_kl")]  # cross_entropy where there is no teacher

    @model_validator(mode="before")
    @classmethod
    def _loss_without_a_teacher(cls, table: Any) -> Any:
        if isinstance(table, dict) and "loss" not in table and not table.get("teachers"):
            return {**table, "loss": [{"name": "cross_entropy"}]}
        return table

    @model_validator(mode="after")
    def _has_something_to_learn_from(self) -> Self:
        if not self.teachers and self.stored is None:
            raise ValueError("there is nothing to learn from; name teachers, or the stored attempts to train on")
        return self
