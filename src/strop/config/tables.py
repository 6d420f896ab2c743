"""The tables of a recipe that say what is trained, on what, and how the run behaves; strict, typed, unchangeable."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
