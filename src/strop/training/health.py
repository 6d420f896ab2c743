"""Signals of sickness: what goes wrong in post-training runs without an error, each said in a plain sentence with what
to do about it. Pure functions over the metrics of a stage's steps, and the one listener that calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from strop.config import HealthSettings
from strop.errors import AttemptError, ConfigError, RunError, StropError
from strop.runs.events import Event
from strop.runs.reading import RunRecord
from strop.runs.run import Run
from strop.sampling.sampler import Sampler, SamplingParams

if TYPE_CHECKING:
    from renderers.base import Renderer

Metrics = Mapping[str, float]
#: Steps of a stage that trends are measured from.
FIRST_STEPS = 5
#: Steps that a gradient's norm is compared with: at most, and at least.
GRADIENTS, FEWEST_GRADIENTS = 20, 5
#: Steps until a signal that lasts is said again.
AGAIN = 20
#: Tokens that the canary is asked for: enough that an update shows in their log-probability, few enough to be free.
CANARY_TOKENS = 8


#: Steps that are remembered beside the first ones.
REMEMBERED = 100


class Score(NamedTuple):
    """A held-out score, and the mean training reward of the steps around it."""

    score: float
    reward: float


class Signal(NamedTuple):
    """A sign of sickness: its name in `[health] stop`, what is seen, and what to do."""

    name: str
    sentence: str
    advice: str


def diagnose(steps: Sequence[Metrics], settings: HealthSettings) -> list[Signal]:
    """What looks sick after the last of `steps`.

    Args:
        steps: metrics of a stage's steps in order, the first ones and the last ones; some in between may be left out.
        settings: thresholds.
    """
    found = [(name, look(steps, settings) if steps else None, advice) for name, (look, advice) in SIGNALS.items()]
    return [Signal(name, sentence, advice) for name, sentence, advice in found if sentence]


def diagnose_scores(scores: Sequence[Score], settings: HealthSettings) -> list[Signal]:
    """What looks sick after the last of a stage's evaluations: reward that rises while the held-out score falls."""
    if len(scores) < 2:
        return []
    (before, earlier), (now, recent) = scores[-2:]
    if now > before - settings.held_out_drop or not recent - earlier >= settings.held_out_drop:
        return []
    sentence = (
        f"training reward rose from {earlier:.3g} to {recent:.3g} while the held-out score fell from {before:.3g} to "
        f"{now:.3g}: a hint that the reward is gamed"
    )
    return [Signal("reward_hacking", sentence, _HACKING)]


def _last(steps: Sequence[Metrics], name: str, count: int) -> list[float] | None:
    """The metric at the last `count` steps; None unless all of them have it."""
    values = [step[name] for step in steps[-count:] if name in step]
    return values if len(values) == count else None


def _lasting(steps: Sequence[Metrics], name: str, settings: HealthSettings, limit: float) -> float | None:
    """Mean over the window, if the metric was at or above the limit in all of it."""
    values = _last(steps, name, settings.window)
    return fmean(values) if values and min(values) >= limit else None


def _trend(steps: Sequence[Metrics], name: str, settings: HealthSettings) -> tuple[float, float] | None:
    """Means over the first steps and over the window; None while they overlap."""
    having = [step[name] for step in steps if name in step]
    if len(having) < FIRST_STEPS + settings.window:
        return None
    return fmean(having[:FIRST_STEPS]), fmean(having[-settings.window :])


def _mismatch(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    kl = steps[-1].get("mismatch_kl", 0.0)
    if math.isfinite(kl) and kl <= settings.mismatch_kl:
        return None
    return f"sampler and learner differ by a KL of {kl:.3g} nats a token (limit {settings.mismatch_kl:g})"


def _no_variance(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    share = _lasting(steps, "groups_without_variance", settings, settings.without_variance)
    return None if share is None else f"{share:.0%} of groups have members that all scored the same: they teach nothing"


def _truncated(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    share = _lasting(steps, "truncated", settings, settings.truncated)
    return None if share is None else f"{share:.0%} of attempts run into the token limit"


def _malformed(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    share = _lasting(steps, "malformed_share", settings, settings.malformed)
    return None if share is None else f"{share:.0%} of tool calls are malformed"


def _failed(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    last = [step for step in steps[-settings.window :] if step.get("attempts")]
    shares = [{"share": (step["failed"] - step.get("cut_off", 0.0)) / step["attempts"]} for step in last]
    share = _lasting(shares, "share", settings, settings.failed)
    return None if share is None else f"{share:.0%} of attempts fail for reasons of the system"


def _entropy(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    trend = _trend(steps, "entropy", settings)
    if trend is None or trend[1] >= settings.entropy_left * trend[0]:
        return None
    return f"entropy fell from {trend[0]:.3g} to {trend[1]:.3g} nats a token: the model hardly explores any more"


def _length(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    trend = _trend(steps, "tokens_per_attempt", settings)
    if trend is None or trend[1] <= settings.length_factor * trend[0]:
        return None
    return f"attempts grew from {trend[0]:.0f} to {trend[1]:.0f} tokens"


def _gradient(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    norms = [step["grad_norm"] for step in steps if "grad_norm" in step]
    if not norms or "grad_norm" not in steps[-1]:
        return None
    before = norms[-GRADIENTS - 1 : -1]
    if math.isfinite(norms[-1]):
        usual = median(before) if len(before) >= FEWEST_GRADIENTS else math.inf
        if norms[-1] <= settings.gradient_factor * usual:
            return None
        return f"the gradient's norm is {norms[-1]:.3g}, {norms[-1] / max(usual, 1e-30):.0f} times what it was"
    return f"the gradient's norm is {norms[-1]}"


def _canary(steps: Sequence[Metrics], settings: HealthSettings) -> str | None:
    heard = [(step["canary_version"], step["canary_logprob"]) for step in steps[-10:] if "canary_version" in step]
    if len(heard) < 2 or "canary_version" not in steps[-1]:
        return None
    (version, logprob), (later, again) = heard[-2:]
    if version == later or logprob != again:
        return None
    return (
        f"the sampler gives a canary prompt exactly the log-probability {again:.6g} with weight version {later:.0f} "
        f"that it gave with {version:.0f}"
    )


_HACKING = "Read the attempts with the highest reward (strop show), and mend the scorer before training on"

#: Name: how it is seen in the steps, and what to do about it.
SIGNALS: dict[str, tuple[Callable[[Sequence[Metrics], HealthSettings], str | None], str]] = {
    "mismatch": (
        _mismatch,
        "Use the same dtype for both, lower collect.staleness, or add a correction to the loss (truncated importance "
        "sampling, a sequence mask)",
    ),
    "no_variance": (_no_variance, "Choose tasks that are solved sometimes, larger groups, or collect.dynamic_sampling"),
    "truncated": (_truncated, "Raise agent.max_tokens or sampler.max_context, or add an overlong penalty"),
    "malformed": (_malformed, "Begin with a supervised stage, and look at the prompt's description of the tools"),
    "failures": (_failed, "See strop show for what they failed of; what is left is trained on"),
    "entropy": (_entropy, "Lower the learning rate, clip higher on the upper side, or add a KL component to the loss"),
    "length": (_length, "Look at whether longer attempts earn more (strop show); add an overlong penalty"),
    "gradient": (_gradient, "Look at the step's batch (strop show), lower the learning rate or learner.max_grad_norm"),
    "canary": (_canary, "The weights did not reach the sampler: nothing sampled since is of the policy being trained"),
}


class HealthWatch:
    """Listens to a run and warns, or stops it, when a stage looks sick. Trends don't cross from one stage to the next.

    Args:
        run: it begins with what an earlier process logged of it.

    Raises:
        ConfigError: `health.stop` names a signal that there isn't.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.settings = run, run.recipe.health
        check_signals(self.settings)
        self._stage, self._count = "", 0
        self._steps: list[Metrics] = []
        self._scores: list[Score] = []
        self._said: dict[str, int] = {}
        if run.resumed:
            for event in RunRecord(run.path).of_kind("step", "evaluation"):
                self._take_in(event)

    def hear(self, event: Event) -> None:
        """Take in an event of the run.

        Raises:
            RunError: a signal that the recipe wants to stop at; the run is resumable.
        """
        self._take_in(event)
        signals = diagnose(self._steps, self.settings) if event["kind"] == "step" else []
        if event["kind"] == "evaluation":
            signals = diagnose_scores(self._scores, self.settings)
        for signal in signals:
            sentence = f"{self._stage} step {self._count}: {signal.sentence}. {signal.advice}."
            if signal.name in self.settings.stop:
                raise RunError(f"{sentence} The recipe's health.stop ends the run here; it can be resumed.")
            if self._count - self._said.get(signal.name, -AGAIN) >= AGAIN:
                self._said[signal.name] = self._count
                self.run.warn(sentence, signal=signal.name, stage=self._stage, step=event["step"])

    def _take_in(self, event: Event) -> None:
        if event["kind"] == "step":
            if event["stage"] != self._stage:
                self._stage, self._count, self._steps, self._said = event["stage"], 0, [], {}
                self._scores = [Score(self._scores[-1].score, math.nan)] if self._scores else []
            self._count += 1
            self._steps.append({name: event["metrics"][name] for name in _WATCHED if name in event["metrics"]})
            if len(self._steps) > FIRST_STEPS + 2 * REMEMBERED:
                del self._steps[FIRST_STEPS:-REMEMBERED]
        elif event["kind"] == "evaluation":
            window = self.settings.window
            if self._scores and math.isnan(self._scores[-1].reward):  # of before the stage: it had no reward yet
                self._scores[-1] = Score(self._scores[-1].score, _reward(self._steps[:window]))
            self._scores = [*self._scores[-1:], Score(float(event["score"]), _reward(self._steps[-window:]))]


def _reward(steps: Sequence[Metrics]) -> float:
    """Mean training reward; not a number where there is none."""
    rewards = [step["reward"] for step in steps if "reward" in step]
    return fmean(rewards) if rewards else math.nan


_WATCHED = (
    "mismatch_kl", "groups_without_variance", "truncated", "malformed_share", "failed", "cut_off", "attempts", "entropy",
    "tokens_per_attempt", "grad_norm", "canary_version", "canary_logprob", "reward",
)  # fmt: skip


def check_signals(settings: HealthSettings) -> None:
    """Refuse names of signals that there aren't.

    Raises:
        ConfigError: names the signals that there are.
    """
    known = [*SIGNALS, "reward_hacking"]
    if unknown := [name for name in settings.stop if name not in known]:
        raise ConfigError("health.stop", f"there is no signal {unknown[0]!r}", f"There are: {', '.join(known)}")


class Canary:
    """The same short request to the sampler after every update: its log-probability must change with the weights.

    It is asked in the background and heard at the next step, so that nobody waits for it.

    Args:
        sampler: what is asked.
        renderer: of the prompt.
        seconds: after which an answer is not waited for any more.
    """

    def __init__(self, sampler: Sampler, renderer: Renderer, seconds: float = 300.0) -> None:
        self._sampler, self._seconds = sampler, seconds
        message = {"role": "user", "content": "Say something."}
        self._prompt = list(renderer.render_ids([message], add_generation_prompt=True))
        self._asked: asyncio.Task[Metrics] | None = None

    def ask(self) -> None:
        """Ask with the weights as they are now, unless the last question is still open."""
        if self._asked is None:
            self._asked = asyncio.create_task(self._sample())

    def heard(self) -> Metrics:
        """The answer: "canary_logprob" and the "canary_version" that gave it; empty while there is none."""
        if self._asked is None or not self._asked.done():
            return {}
        task, self._asked = self._asked, None
        return task.result()

    async def _sample(self) -> Metrics:
        params = SamplingParams(max_tokens=CANARY_TOKENS, seed=0)
        with contextlib.suppress(AttemptError, StropError):  # what ails the sampler shows in attempts
            sample = await self._sampler.sample(self._prompt, params, deadline=time.monotonic() + self._seconds)
            if len(set(sample.versions)) == 1:
                return {"canary_logprob": math.fsum(sample.logprobs), "canary_version": float(sample.versions[0])}
        return {}
