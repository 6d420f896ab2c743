"""The nouns that flow between rooms: Task, Rollout, Group, and how an attempt ends.

Plain data, free of torch. What is sampled is recorded here token by token and never re-tokenized: a rollout is a
graph of model calls, each of which either extends the tokens of an earlier call or opens a new root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

#: A chat message as the OpenAI API writes it: role, content, tool_calls, tool_call_id, name.
Message = dict[str, Any]
#: A tool as the OpenAI API writes it: {"type": "function", "function": {name, description, parameters}}.
ToolSpec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. Plain data with a stable id: the same id is the same problem in every run.

    Attributes:
        id: stable and unique within its environment.
        environment: name of the environment that made it and scores it.
        messages: what the agent reads first.
        tools: what the agent may call.
        data: what the scorer needs (JSON values). The agent never sees it.
        labels: what results are broken down by, for example {"difficulty": "2 steps"}.
    """

    id: str
    environment: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


class FailureKind(StrEnum):
    """Where the system failed. An agent that fails its task is not here: the environment scores it."""

    SANDBOX = "sandbox"  # the place where commands run died or could not be made
    TOOL = "tool"  # a tool broke in a way that the environment did not mean
    SAMPLER = "sampler"  # the sampler was lost, refused, or broke
    SCORER = "scorer"  # the scorer raised, timed out or left no result
    TIMEOUT = "timeout"  # a deadline of ours, not the task's own budget
    ENVIRONMENT = "environment"  # any other bug of the environment
    AGENT = "agent"  # the agent program could not be run at all
    CANCELLED = "cancelled"  # we ended it: shutdown, or its group was complete without it


@dataclass(frozen=True, slots=True)
class Scored:
    """The attempt was scored by its environment.

    Attributes:
        reward: what is learnt from.
        metrics: what is counted beside it, for example {"tool_errors_met": 2.0}.
        solved: whether the task counts as solved (pass@k); None where the environment has no such notion.
    """

    reward: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    solved: bool | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The system failed the attempt: no reward, no part in its group's baseline."""

    kind: FailureKind
    reason: str


Ending = Scored | Failed


class FinishReason(StrEnum):
    """Why a model call ended."""

    STOP = "stop"  # a stop token or stop string
    LENGTH = "length"  # max_tokens or the context was reached: truncated


@dataclass(frozen=True, slots=True)
class ExpertChoices:
    """Which experts of a mixture-of-experts model were chosen at the places that led to some tokens.

    Attributes:
        layers: number of sparse layers.
        per_token: experts that compute a token in each.
        ids: (tokens, layers, per_token) little-endian int16, row by row; -1 where the choice is not known.
    """

    layers: int
    per_token: int
    ids: bytes

    def last(self, tokens: int) -> ExpertChoices:
        """Those that led to the last so many tokens."""
        size = 2 * self.layers * self.per_token
        return replace(self, ids=self.ids[len(self.ids) - tokens * size :])


@dataclass(slots=True)
class ModelCall:
    """One call of the model: a node of the rollout's graph.

    Attributes:
        parent: index (in `Rollout.calls`) of the call whose tokens, prompt and sampled, this call's prompt extends;
            None opens a new root.
        prompt: the prompt tokens that are new: all of them at a root, else what follows the parent's last token.
        tokens: the sampled tokens, in order, the stop token included.
        logprobs: log-probability of each sampled token under the distribution it was sampled from.
        versions: weight version that sampled each token.
        finish_reason: why it ended.
        cached: how many tokens of the whole prompt needed no prefill.
        started, ended: seconds on the run's monotonic clock.
        experts: what the sampler's routers chose at the place before each token, prompt and sampled; None for a model
            without experts.
        constrained: whether it was sampled within a grammar. Its log-probabilities are those of that distribution,
            which the model alone does not have, so training on it has to be meant.
    """

    parent: int | None
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    cached: int = 0
    started: float = 0.0
    ended: float = 0.0
    experts: ExpertChoices | None = None
    constrained: bool = False

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a model call has {len(self.tokens)} tokens, {len(self.logprobs)} log-probabilities and "
                f"{len(self.versions)} versions: every sampled token needs one of each"
            )


@dataclass(slots=True)
class Rollout:
    """One attempt, whole.

    Attributes:
        id: unique within the run: group id and member.
        task_id: the task that was attempted.
        environment: name of its environment.
        member: number within its group.
        seed: every random draw of the attempt derives from it.
        calls: the model calls, in the order in which they ended.
        transcript: the conversation as messages, for readers; training uses `calls` alone.
        ending: how it ended; None while it runs.
        tries: how often it was started (1 plus retries after failures of the system).
        forks: how often a new root was opened because history was rewritten.
        seconds: time by part, for example {"sampler": 1.2, "tools": 0.3, "scoring": 0.0}.
        started, ended: seconds on the run's monotonic clock.
    """

    id: str
    task_id: str
    environment: str
    member: int
    seed: int
    calls: list[ModelCall] = field(default_factory=list)
    transcript: list[Message] = field(default_factory=list)
    ending: Ending | None = None
    tries: int = 1
    forks: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    started: float = 0.0
    ended: float = 0.0

    @property
    def reward(self) -> float | None:
        """The reward, or None if the attempt was not scored."""
        return self.ending.reward if isinstance(self.ending, Scored) else None

    @property
    def truncated(self) -> bool:
        """Whether its last model call ran into the token limit."""
        return bool(self.calls) and self.calls[-1].finish_reason is FinishReason.LENGTH

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled tokens over all calls."""
        return sum(len(call.tokens) for call in self.calls)

    def leaves(self) -> list[int]:
        """Indices of calls that no other call extends: one branch ends in each."""
        parents = {call.parent for call in self.calls}
        return [index for index in range(len(self.calls)) if index not in parents]

    def branch(self, leaf: int) -> list[int]:
        """Indices of the calls from a root to `leaf`, in order."""
        path, at = [], leaf
        while True:
            path.append(at)
            parent = self.calls[at].parent
            if parent is None:
                return path[::-1]
            at = parent

    def branch_tokens(self, leaf: int) -> list[int]:
        """The whole token sequence of the branch that ends in `leaf`: prompts and sampled tokens."""
        tokens: list[int] = []
        for index in self.branch(leaf):
            tokens += self.calls[index].prompt
            tokens += self.calls[index].tokens
        return tokens


@dataclass(slots=True)
class Group:
    """The rollouts of one task that are compared with each other.

    Attributes:
        id: unique within the run.
        task: the task all of them attempt.
        rollouts: the members, by member number. Failed members stay listed, with their ending.
        step: the training step that asked for it (data order); the step that trains on it may be later.
    """

    id: str
    task: Task
    rollouts: list[Rollout]
    step: int = 0

    @property
    def rewards(self) -> list[float | None]:
        """Reward of each member; None where it was not scored."""
        return [rollout.reward for rollout in self.rollouts]

    def scored(self) -> Iterator[Rollout]:
        """The members that count."""
        return (rollout for rollout in self.rollouts if isinstance(rollout.ending, Scored))


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on every part and on nothing else (not on the process, not on order of work)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def final_text(transcript: Sequence[Message]) -> str:
    """Content of the last assistant message that has any; empty if there is none."""
    for message in reversed(transcript):
        if message.get("role") == "assistant" and message.get("content"):
            return str(message["content"])
    return ""
