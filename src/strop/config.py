"""Every setting, once: strict typed models, read from TOML, overridden by `--set a.b=c`.

A recipe is a chain of stages, each of which starts from the model that the last one made. Nothing here imports
torch. What a setting names (an environment, a loss) is resolved by the room that owns it, before work starts.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from strop.errors import ConfigError

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
#: A run's and a stage's name become file names.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)]


class Settings(BaseModel):
    """Base of every table: unknown keys are errors, types are strict, values don't change afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LoraSettings(Settings):
    """Train a low-rank adapter instead of all weights (Hu et al. 2021, arXiv:2106.09685)."""

    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    targets: list[str] | Literal["all-linear"] = "all-linear"


class ExpertSettings(Settings):
    """How a mixture-of-experts model is trained; refused for any other model."""

    router: Literal["trained", "frozen"] = "trained"
    balance: Annotated[float, Field(ge=0)] = 0.0  # weight of the sequence-wise balance loss (arXiv:2412.19437, eq. 17)
    replay: bool = True  # the learner uses the experts that the sampler's routers chose

    @model_validator(mode="after")
    def _frozen_has_no_loss(self) -> Self:
        if self.router == "frozen" and self.balance:
            raise ValueError('balance trains the router; leave it at 0, or set router = "trained"')
        return self


class ModelSettings(Settings):
    """Which model is trained."""

    name: str = "smollm2"  # a start model's name, a local folder, or a hub name
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute; auto: bfloat16 where the CPU or GPU has it
    lora: LoraSettings | None = None
    experts: ExpertSettings | None = None  # None: the defaults, where the model has experts


class SamplerSettings(Settings):
    """Where tokens are sampled."""

    kind: Literal["embedded"] = "embedded"
    slots: Positive = 64  # sequences decoded at once
    max_context: Positive = 1024  # tokens of a whole conversation
    queue_limit: Positive = 4096  # waiting requests; further callers wait for a place


class LearnerSettings(Settings):
    """How a batch becomes an update."""

    kind: Literal["embedded"] = "embedded"
    tokens_per_micro_batch: Positive = 4096
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: Annotated[tuple[float, float], Field(strict=False)] = (0.9, 0.999)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    activation_checkpointing: bool = False  # keep only layers' inputs for the backward pass: slower, far less memory
    moments: Literal["float32", "8bit"] = "float32"  # how AdamW keeps its moments; 8bit needs strop[low-memory]


class AgentSettings(Settings):
    """How the model acts on a task."""

    kind: Literal["single_reply", "tool_loop", "program", "own_harness"] = "single_reply"
    max_tokens: Positive = 128  # sampled tokens of one reply
    max_turns: Positive = 8  # replies of one attempt (tool_loop)
    command: str = ""  # a line for /bin/sh that starts an outside agent; {prompt}: the task's last message (program)
    where: Literal["sandbox", "host"] = "sandbox"  # host: on this machine, unprotected (program)
    seconds: Seconds = 240.0  # then the program is stopped and scored as it is (program)
    variables: dict[str, str] = {}  # of the program's environment (program)
    files: list[str] = []  # in its working directory, that go to the scorer (program)
    token_budget: Positive | None = None  # most sampled tokens of one attempt (program, own_harness)
    dropped_reasoning: Literal["fork", "keep"] = "fork"  # what a reply that comes back without it means
    allow_constrained_sampling: bool = (
        False  # a schema that the agent asks for changes the distribution: the ratio of an unchanged policy isn't 1
    )

    @model_validator(mode="after")
    def _settings_belong_to_the_kind(self) -> Self:
        outside = {"token_budget", "dropped_reasoning", "allow_constrained_sampling"}
        own = {
            "single_reply": set[str](),
            "tool_loop": {"max_turns"},
            "program": {"command", "where", "seconds", "variables", "files", *outside},
            "own_harness": outside,
        }
        for name, field in type(self).model_fields.items():
            kinds = [kind for kind, names in own.items() if name in names]
            if kinds and self.kind not in kinds and getattr(self, name) != field.get_default():
                raise ValueError(f"{name} is a setting of {' and '.join(kinds)}, but kind is {self.kind!r}")
        if self.kind == "program" and not self.command.strip():
            raise ValueError('kind = "program" needs a command, the line that starts the agent')
        return self


class CriterionSettings(Settings):
    """One line of a judge's rubric."""

    name: Name
    text: str  # what full marks are given for
    weight: Annotated[float, Field(gt=0)] = 1.0


class JudgeSettings(Settings):
    """A model behind an OpenAI-compatible endpoint that scores attempts: by a rubric, or against a reference reply."""

    url: str  # up to and with /v1
    model: str
    key_variable: str = ""  # environment variable that holds the API key; "": none is sent
    rubric: list[CriterionSettings] = []
    reference: str = ""  # key of the task's data that holds a reply to compare with (pairwise); "": the rubric decides
    instructions: str = ""  # further words to the judge
    weight: Annotated[float, Field(gt=0, le=1)] = 1.0  # in the reward; the rest is the environment's own score
    solved_at: Share = 0.5  # judge's score that counts as solved, where the environment's own has no weight
    max_tokens: Positive = 512  # of one judgement
    temperature: Annotated[float, Field(ge=0)] = 0.0
    seconds: Seconds = 60.0  # for one call
    tries: Positive = 3  # of a call that fails or can't be read; then the attempt has failed, it is never scored 0
    in_flight: Positive = 16  # calls at once
    usd_per_million_prompt: Annotated[float, Field(ge=0)] = 0.0
    usd_per_million_completion: Annotated[float, Field(ge=0)] = 0.0
    budget_usd: Annotated[float, Field(gt=0)] | None = None  # of the whole run; a call that could pass it ends the run
    cache: str = ""  # file that keeps judgements; "": judgements.sqlite in the run's directory

    @model_validator(mode="after")
    def _has_a_measure(self) -> Self:
        if bool(self.rubric) == bool(self.reference):
            raise ValueError("a judge needs either a rubric or the key of a reference, and not both")
        if self.budget_usd is not None and not (self.usd_per_million_prompt or self.usd_per_million_completion):
            raise ValueError("budget_usd needs a price: give usd_per_million_prompt and usd_per_million_completion")
        return self


class SandboxSettings(Settings):
    """Where model-written code runs; an option of environments that run any. See docs/how-to-sandboxes-elsewhere.md."""

    #: This machine: auto, namespaces, rootless, bubblewrap. Elsewhere: http, docker, podman, kubernetes, e2b, daytona,
    #: modal, prime.
    kind: str = "auto"
    least: Literal["namespaces", "rootless", "bubblewrap"] = "rootless"  # the weakest tier that auto may take
    allow_weak: bool = False  # sandboxes although control groups are missing: limits of single processes alone
    limits: dict[str, int | float] = {}  # fields of strop.sandboxes.Limits
    options: dict[str, Any] = {}  # of the kind


class EnvironmentSettings(Settings):
    """What is attempted."""

    name: str  # a built-in one, "package.module:Class", or "path/to/file.py:Class"
    options: dict[str, Any] = {}
    agent: AgentSettings = AgentSettings()
    judge: JudgeSettings | None = None


class CurriculumSettings(Settings):
    """Which tasks come up more often: those that are solved about half the time. See `strop.training.tasks`."""

    label: str  # tasks are told apart by this label of theirs
    least_share: Share = 0.2  # of the draws that are spread evenly over the label's values, whatever was measured
    memory: Share = 0.8  # what an earlier attempt counts for after each further step
    pool: Positive = 1024  # only the first so many training tasks are drawn from


class MixedSettings(EnvironmentSettings):
    """One of several environments in a stage."""

    label: Name | Literal[""] = ""  # what it is called in metrics; "": its name
    weight: Annotated[float, Field(gt=0)] = 1.0  # its share of the groups, beside the others' weights
    curriculum: CurriculumSettings | None = None

    @property
    def called(self) -> str:
        """What it is called in metrics and records."""
        return self.label or self.name.rpartition(":")[2]


class EvaluationSettings(Settings):
    """Scoring on held-out tasks."""

    tasks: Annotated[int, Field(ge=0)] = 200  # the first so many of the split; 0: no evaluation
    split: str = "test"
    attempts: Positive = 1  # of each task
    temperature: Annotated[float, Field(ge=0)] = 0.0
    every: Annotated[int, Field(ge=0)] = 0  # steps between evaluations inside a stage; 0: between stages only


class CostSettings(Settings):
    """What this machine costs."""

    machine: str = "auto"  # a key of the price file; auto: this machine's vCPUs
    usd_per_hour: Annotated[float, Field(ge=0)] | None = None  # of the whole machine; beats `machine`
    target_points: float | None = None  # for "dollars until the gain's lower bound passed it"


class DeadlineSettings(Settings):
    """How long the run may wait for one thing before it ends, resumable. Attempts' deadlines are in `collect`."""

    setup_seconds: Seconds = 3600.0  # loading the model, which may have to be fetched
    learner_seconds: Seconds = 3600.0  # one forward and backward pass over a batch, or one optimizer step
    evaluation_seconds: Seconds = 3600.0  # one evaluation
    evaluation_attempt_seconds: Seconds = 600.0  # one attempt of it; longer is a failure of the system
    checkpoint_seconds: Seconds = 900.0  # writing one checkpoint


class HealthSettings(Settings):
    """When a run is warned of as sick; what each signal means is said by `strop.training.health`.

    Signals that look for a trend compare the last `window` steps with the stage's first ones.
    """

    window: Positive = 3  # steps that a signal must last, or is averaged over
    mismatch_kl: Annotated[float, Field(gt=0)] = 0.05  # nats a token between sampler and learner
    without_variance: Share = 0.9  # of groups
    truncated: Share = 0.9  # of attempts
    malformed: Share = 0.5  # of tool calls
    failed: Share = 0.25  # of attempts, for reasons of the system
    entropy_left: Share = 0.1  # of the entropy of the stage's first steps
    length_factor: Annotated[float, Field(gt=1)] = 3.0  # times the length of the stage's first steps
    gradient_factor: Annotated[float, Field(gt=1)] = 10.0  # times the median of the steps before
    held_out_drop: Annotated[float, Field(gt=0)] = 0.05  # of the held-out score, while training reward rises as much
    stop: list[str] = []  # signals that end the run (resumable) instead of warning


class DebugSettings(Settings):
    """One half of the loop alone. Neither half evaluates."""

    only: Literal["", "rollouts", "training"] = ""  # collect batches without training, or train without sampling
    batches: str = ""  # the run whose stored batches are trained on (only = "training")

    @model_validator(mode="after")
    def _training_has_batches(self) -> Self:
        if (self.only == "training") != bool(self.batches):
            raise ValueError('batches names the run to train on, with only = "training" and with nothing else')
        return self


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


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        path: a TOML file.
        overrides: "a.b=c" each; c is TOML, or else a plain string. A stage is named: "stages.rl.steps=3".

    Raises:
        ConfigError: names the key, what is wrong and what would be right.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            str(path), "there is no such file", "Name a recipe, for example recipes/quickstart.toml"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"it can't be read ({error})", "Name a readable TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"it is not valid TOML: {error}", "Mend that line") from None
    for override in overrides:
        _override(table, override)
    return parse_recipe(table)


def parse_recipe(table: Mapping[str, Any]) -> Recipe:
    """A recipe from a parsed TOML table; errors as in `load_recipe`."""
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise _explain(error, table) from None


def parse_data(table: Mapping[str, Any]) -> DataSettings:
    """A stage's data table by itself; errors as in `load_recipe`."""
    try:
        return DataSettings.model_validate(table)
    except ValidationError as error:
        raise _explain(error, table, DataSettings) from None


def parse_sandboxes(table: Mapping[str, Any]) -> SandboxSettings:
    """An environment's `sandboxes` table; errors as in `load_recipe`."""
    try:
        return SandboxSettings.model_validate(table)
    except ValidationError as error:
        raise _explain(error, table, SandboxSettings) from None


def _override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}", "it has no '='", "Write --set a.b=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    parts = key.strip().split(".")
    at: Any = table
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if isinstance(at, list):
            named = [i for i, entry in enumerate(at) if isinstance(entry, dict) and entry.get("name") == part]
            if not named:
                names = ", ".join(str(entry.get("name")) for entry in at if isinstance(entry, dict))
                raise ConfigError(
                    f"--set {key}", f"there is no {parts[number - 1]} entry named {part!r}", f"There are: {names}"
                )
            if last:
                raise ConfigError(f"--set {key}", "it names a whole stage", f"Name one of its keys: {key}.steps=…")
            at = at[named[0]]
        elif not isinstance(at, dict):
            raise ConfigError(
                f"--set {key}", f"{'.'.join(parts[:number])} is a value, not a table", "Name a key that is"
            )
        elif last:
            at[part] = value
        else:
            at = at.setdefault(part, {})


def _explain(error: ValidationError, table: Mapping[str, Any], root: type[Settings] | None = None) -> ConfigError:
    """The first problem in words a user can act on (the others follow once it is mended)."""
    problem = error.errors()[0]
    location = [part for part in problem["loc"] if part not in KINDS]
    key = _dotted(location, table)
    kind, given = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        known = _known_keys(problem["loc"][:-1], root or Recipe)
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(sorted(known))}"
        return ConfigError(key, "there is no such key", hint)
    if kind == "missing":
        return ConfigError(key, "it is missing", "Add it")
    if kind == "union_tag_not_found":
        return ConfigError(f"{key}.kind", "it is missing", f"Say one of: {', '.join(map(repr, KINDS))}")
    if kind == "union_tag_invalid":
        tag = given.get("kind") if isinstance(given, Mapping) else given
        return ConfigError(
            f"{key}.kind", f"there is no stage kind {tag!r}", f"There are: {', '.join(map(repr, KINDS))}"
        )
    if kind == "value_error":
        return ConfigError(key or "recipe", str(problem["ctx"]["error"]), "")
    message = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return ConfigError(key, f"{given!r} is not right", f"It should be {message}")


def _dotted(location: Iterable[str | int], table: Mapping[str, Any]) -> str:
    """Key as a user writes it: stages by their names."""
    parts: list[str] = []
    at: Any = table
    for part in location:
        try:
            at = at[part]
        except (KeyError, IndexError, TypeError):
            at = None
        if isinstance(part, int):
            name = at.get("name") if isinstance(at, Mapping) else None
            parts.append(str(name if name is not None else part))
        else:
            parts.append(part)
    return ".".join(parts)


def _known_keys(location: Sequence[str | int], root: type[Settings]) -> list[str]:
    """Keys of the table at `location` of a recipe (or of another table)."""
    model: Any = root
    for part in location:
        if isinstance(part, int):
            continue
        if part in KINDS:
            model = KINDS[part]
        elif isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    """The settings class inside an annotation such as `EvaluationSettings | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _model_in(inner)) is not None:
            return found
    return None
