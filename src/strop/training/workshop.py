"""What every stage of a recipe works with: the model in its sampler and learner, environments, evaluation,
checkpoints. Built and checked before any work starts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from strop.agents import make_agent
from strop.agents.attempts import AttemptRunner
from strop.agents.metrics import Metrics
from strop.config import EnvironmentSettings, RLSettings, StageSettings
from strop.environments import Environment, load_environment
from strop.errors import ConfigError, EvaluationError
from strop.evaluation import attempt_all, evaluation_of
from strop.rollouts import Task, derive_seed
from strop.runs.journal import Entry, Journal
from strop.runs.run import Run, read_checkpoint_state
from strop.runs.store import write_groups
from strop.sampling.sampler import SamplingParams
from strop.training.collector import TaskSource
from strop.training.health import Canary

if TYPE_CHECKING:
    from renderers.base import Renderer

    from strop.learning import Learner
    from strop.sampling.sampler import Sampler

T = TypeVar("T", bound=Metrics)


class Workshop:
    """The parts of a run, put together.

    Attributes:
        run: its directory.
        sampler, learner, renderer: the model.
        canary: asked after every update whether the weights reached the sampler.
    """

    def __init__(self, run: Run, sampler: Sampler, learner: Learner, renderer: Renderer) -> None:
        self.run, self.recipe = run, run.recipe
        self.sampler, self.learner, self.renderer = sampler, learner, renderer
        self.canary = Canary(sampler, renderer)
        self._environments: dict[str, Environment] = {}

    @property
    def trains(self) -> bool:
        """Whether batches are trained on, or only collected."""
        return self.recipe.debug.only != "rollouts"

    @property
    def version(self) -> int:
        """Version of the weights."""
        return self.sampler.version

    def seed(self, *purpose: str) -> int:
        """A seed of the run for a purpose."""
        return derive_seed(self.recipe.seed, *purpose)

    async def work(self, function: Callable[..., Metrics], *arguments: Any) -> Metrics:
        """Run a piece of the learner's work in a thread, so that attempts under way go on.

        Raises:
            StallError: it took longer than `deadlines.learner_seconds`.
        """
        what = f"the learner's {function.__name__}"
        async with self.run.waits.on(what, self.recipe.deadlines.learner_seconds):
            with self.run.ledger.activity("learner"):
                metrics = await asyncio.to_thread(function, *arguments)
        self.run.ledger.count(trained=int(metrics.get("tokens_trained", 0)))
        return metrics

    # -- attempts ---------------------------------------------------------------------------------------------------

    def environment(self, stage: StageSettings) -> Environment:
        """The stage's environment, loaded once."""
        return self._environment(self.recipe.environment_of(stage))

    def _environment(self, asked: EnvironmentSettings) -> Environment:
        key = asked.model_dump_json()
        if key not in self._environments:
            self._environments[key] = load_environment(asked.name, asked.options)
        return self._environments[key]

    def runner(self, asked: EnvironmentSettings, params: SamplingParams, seconds: float) -> AttemptRunner:
        """Makes attempts at an environment with this model."""
        return AttemptRunner(
            environment=self._environment(asked),
            agent=make_agent(asked.agent),
            sampler=self.sampler,
            renderer=self.renderer,
            params=params,
            seconds=seconds,
            ledger=self.run.ledger,
            clock=lambda: self.run.clock,
            waits=self.run.waits,
        )

    def tasks(self, stage: RLSettings) -> TaskSource:
        """Which task each of a stage's groups attempts: the training tasks, shuffled anew in every epoch."""
        asked, collect = self.recipe.environment_of(stage), stage.collect
        params = SamplingParams(
            max_tokens=asked.agent.max_tokens,
            temperature=collect.temperature,
            top_p=collect.top_p,
            top_k=collect.top_k,
            min_p=collect.min_p,
        )
        runner = self.runner(asked, params, collect.attempt_seconds)
        tasks = self._environment(asked).tasks("train")
        order = shuffled(len(tasks), self.seed(stage.name, "order"))
        return lambda number: (tasks[order(number)], runner)

    # -- evaluation -------------------------------------------------------------------------------------------------

    async def evaluate(self, stage: StageSettings, name: str, after: str, step: int) -> None:
        """Score the model on held-out tasks once, and record every attempt.

        Args:
            stage: whose environment and evaluation settings apply.
            name: of the evaluation.
            after: stage whose result is scored; "" at the start.
            step: steps done in it.
        """
        asked, file_name = self.recipe.evaluation_of(stage), name.replace(" ", "-")
        journal_path = self.run.path / "rollouts" / f"evaluation-{file_name}.journal"
        if not asked.tasks or self.recipe.debug.only:
            return
        if self.run.evaluation(name):
            journal_path.unlink(missing_ok=True)  # a kill may have fallen between the two
            return
        environment = self.recipe.environment_of(stage)
        params = SamplingParams(max_tokens=environment.agent.max_tokens, temperature=asked.temperature)
        runner = self.runner(environment, params, self.recipe.deadlines.evaluation_attempt_seconds)
        tasks = self._environment(environment).tasks(asked.split)
        tasks = [tasks[number] for number in range(min(asked.tasks, len(tasks)))]
        journal = Journal(journal_path)
        finished = 0

        def keep(number: int, rollout: Any) -> None:
            nonlocal finished
            finished += 1
            journal.append(Entry(number, step, rollout))
            self.run.tell("progress", what=f"evaluation {name}", done=finished, of=len(tasks) * asked.attempts)

        with self.run.ledger.within("evaluation"):
            async with self.run.waits.on(
                f"evaluation {name}",
                self.recipe.deadlines.evaluation_seconds,
                lambda: f"{finished} of {len(tasks) * asked.attempts} attempts finished",
            ):
                groups = await attempt_all(
                    tasks,
                    runner,
                    name=file_name,
                    attempts=asked.attempts,
                    seed=self.seed("evaluation"),
                    finished=[entry.rollout for entry in journal.found],
                    on_finished=keep,
                )
            with self.run.ledger.activity("records"):
                try:
                    record = evaluation_of(name, groups).as_record()
                except EvaluationError:  # nothing was scored: whoever resumes begins it anew
                    journal.close(remove=True)
                    raise
                path = self.run.path / "rollouts" / f"evaluation-{file_name}.parquet"
                write_groups(path, [(group, "evaluation") for group in groups], {})
                self.run.batch_stored(path)
        self.run.log("evaluation", stage=after, step=step, flush=True, **record)
        self.run.log("cost", stage=after, step=step, ledger=self.run.ledger.snapshot())
        journal.close(remove=True)

    async def evaluate_if_due(self, stage: StageSettings, steps: int) -> None:
        """Evaluate within a stage, every so many steps; its end is evaluated as the stage."""
        every = self.recipe.evaluation_of(stage).every
        if every and steps % every == 0 and steps < stage.steps:
            await self.evaluate(stage, f"{stage.name} {steps}", stage.name, steps)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint_if_due(self, stage: StageSettings, steps: int) -> None:
        """Save within a stage, every so many steps, and at its end."""
        if not self.trains:
            return
        if steps == stage.steps or (stage.checkpoints.every and steps % stage.checkpoints.every == 0):
            self.run.checkpoint(stage.name, steps, self.learner.save, {"version": self.version})

    def load(self, checkpoint: Path) -> None:
        """Go back to a verified checkpoint."""
        self.learner.load(checkpoint, version=int(read_checkpoint_state(checkpoint)["version"]))


def shuffled(count: int, seed: int) -> Callable[[int], int]:
    """Order of an endless pass over `count` things: every epoch is a permutation of its own.

    Raises:
        ConfigError: there is nothing to pass over.
    """
    if not count:
        raise ConfigError("environment", "its training split has no tasks", "Choose options that leave some")
    epochs: dict[int, list[int]] = {}

    def at(number: int) -> int:
        epoch, within = divmod(number, count)
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = random.Random(derive_seed(seed, epoch)).sample(range(count), count)
        return epochs[epoch][within]

    return at


def check_prompt(task: Task, renderer: Renderer, max_context: int) -> None:
    """Refuse a task whose prompt leaves no room for a reply.

    Raises:
        ConfigError: it is too long.
    """
    length = len(renderer.render_ids(list(task.messages), tools=list(task.tools) or None, add_generation_prompt=True))
    if length >= max_context:
        raise ConfigError(
            "sampler.max_context",
            f"the prompt of task {task.id} has {length} tokens and the context {max_context}",
            "Raise sampler.max_context or choose shorter tasks",
        )
