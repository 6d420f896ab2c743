"""What every stage of a recipe works with: the model in its sampler and learner, environments, evaluation,
checkpoints. Built and checked before any work starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from strop.agents import make_agent
from strop.agents.attempts import AttemptRunner, Runner
from strop.agents.metrics import Metrics
from strop.config import AttemptsSettings, EnvironmentSettings, JudgeSettings, RewardSettings, StageSettings
from strop.environments import Environment, load_environment
from strop.environments.judging import Cache, Endpoint, Judge, Judged, Purse
from strop.errors import ConfigError, EvaluationError
from strop.evaluation import attempt_all, evaluation_of
from strop.rollouts import Task, derive_seed
from strop.runs.journal import Entry, Journal
from strop.runs.run import Run, read_checkpoint_state
from strop.runs.store import read_state, write_groups
from strop.sampling.sampler import SamplingParams
from strop.training.health import Canary
from strop.training.reward import become_reward_model
from strop.training.tasks import MixedRunner, Part, StageTasks, labelled_tasks

if TYPE_CHECKING:
    from renderers.base import Renderer
    from torch import Tensor

    from strop.learning import Learner
    from strop.sampling.sampler import Sampler
    from strop.training.examples import Examples

T = TypeVar("T")


class Workshop:
    """The parts of a run, put together.

    Attributes:
        run: its directory.
        sampler, learner, renderer: the model.
        canary: asked after every update whether the weights reached the sampler.
        tokenizer: the model's.
        fresh: gives the recipe's model anew: weights by parameter name.
        examples: of stages that train on given ones, by the stage's name; see `strop.training.examples`.
        checkpoints: folder of the run's checkpoints.
    """

    def __init__(
        self,
        run: Run,
        sampler: Sampler,
        learner: Learner,
        renderer: Renderer,
        tokenizer: Any,
        fresh: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.run, self.recipe = run, run.recipe
        self.sampler, self.learner, self.renderer, self.fresh = sampler, learner, renderer, fresh
        self.tokenizer = tokenizer
        self.examples: dict[str, Examples] = {}
        self.checkpoints = run.path / "checkpoints"
        self.canary = Canary(sampler, renderer)
        self._environments: dict[str, Environment] = {}
        self._purse: Purse | None = None
        self._endpoints: list[Endpoint] = []

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
        metrics = await self.compute(what, "learner", function, *arguments)
        self.run.ledger.count(trained=int(metrics.get("tokens_trained", 0)))
        if metrics.get("memory_splits"):
            self.run.warn(
                f"{what} ran out of memory; the batch was done again in smaller parts, and the run goes on with "
                f"micro-batches of at most {metrics['tokens_per_micro_batch']:.0f} tokens",
                tokens_per_micro_batch=metrics["tokens_per_micro_batch"],
            )
        return metrics

    async def compute(self, what: str, activity: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run a computation in a thread; `what` it is stands in the list of waits, and in the ledger as an `activity`.

        Raises:
            StallError: it took longer than `deadlines.learner_seconds`.
        """
        async with self.run.waits.on(what, self.recipe.deadlines.learner_seconds):
            with self.run.ledger.activity(activity):
                return await asyncio.to_thread(function, *arguments)

    # -- attempts ---------------------------------------------------------------------------------------------------

    def environment(self, stage: StageSettings) -> Environment:
        """The stage's environment, loaded once; of several, the first."""
        return self._environment(self.recipe.environment_of(stage))

    def environments(self, stage: StageSettings) -> dict[str, Environment]:
        """The stage's environments by what they are called, in the recipe's order."""
        return {asked.called: self._environment(asked) for asked in self.recipe.environments_of(stage)}

    def _environment(self, asked: EnvironmentSettings) -> Environment:
        key = asked.model_dump_json(include={"name", "options", "judge"})
        if key not in self._environments:
            environment = load_environment(asked.name, asked.options)
            for sentence in environment.notices:
                self.run.warn(sentence)
            self._environments[key] = self._judged(environment, asked.judge) if asked.judge else environment
        return self._environments[key]

    def _judged(self, environment: Environment, asked: JudgeSettings) -> Environment:
        """The environment scored by a judge. All judges of the run pay from one purse."""
        kept = self.run.path / "judgements.sqlite"
        self._purse = self._purse or Purse(kept, self.run.ledger)
        endpoint = Endpoint(asked, self._purse, Cache(Path(asked.cache) if asked.cache else kept))
        self._endpoints.append(endpoint)
        return Judged(environment, Judge(asked, endpoint))

    async def close(self) -> None:
        """Let go of the sampler, and of judges."""
        await self.sampler.close()
        for endpoint in self._endpoints:
            await endpoint.close()
        if self._purse:
            self._purse.close()

    def runner(
        self, stage: StageSettings, params: Callable[[EnvironmentSettings], SamplingParams], seconds: float
    ) -> Runner:
        """Makes attempts at a stage's environments with this model."""
        runners = {
            asked.called: self._runner(asked, params(asked), seconds) for asked in self.recipe.environments_of(stage)
        }
        return MixedRunner(runners) if len(runners) > 1 else next(iter(runners.values()))

    def _runner(self, asked: EnvironmentSettings, params: SamplingParams, seconds: float) -> AttemptRunner:
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

    def tasks(self, stage: AttemptsSettings) -> StageTasks:
        """Which task each of a stage's groups attempts."""
        collect, asked = stage.collect, self.recipe.environments_of(stage)

        def params(environment: EnvironmentSettings) -> SamplingParams:
            return SamplingParams(
                max_tokens=environment.agent.max_tokens,
                temperature=collect.temperature,
                top_p=collect.top_p,
                top_k=collect.top_k,
                min_p=collect.min_p,
            )

        def measured(step: int) -> Mapping[str, Any]:
            found: Mapping[str, Any] = read_state(self.run.batch_path(stage.name, step)).get("measured", {})
            return found

        runner = self.runner(stage, params, collect.attempt_seconds)
        tasks = labelled_tasks(self.environments(stage), "train")
        parts = []
        for environment in asked:
            purpose = (stage.name, "order", environment.called) if len(asked) > 1 else (stage.name, "order")
            parts.append(
                Part(
                    environment.called,
                    tasks[environment.called],
                    runner,
                    environment.weight,
                    self.seed(*purpose),
                    environment.curriculum,
                )
            )
        return StageTasks(parts, measured)

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

        def params(environment: EnvironmentSettings) -> SamplingParams:
            return SamplingParams(max_tokens=environment.agent.max_tokens, temperature=asked.temperature)

        runner = self.runner(stage, params, self.recipe.deadlines.evaluation_attempt_seconds)
        splits = labelled_tasks(self.environments(stage), asked.split).values()
        tasks = [split[number] for split in splits for number in range(min(asked.tasks, len(split)))]
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
            self.checkpoint(stage, steps)

    def checkpoint(self, stage: StageSettings, steps: int, spare: Collection[int] = ()) -> None:
        """Save after so many steps. Those of the steps to `spare` are kept however many follow."""
        state = {"version": self.learner.version}
        self.run.checkpoint(stage.name, steps, self.learner.save, state, spare=spare)

    def load(self, checkpoint: Path) -> None:
        """Go back to a verified checkpoint."""
        state = read_checkpoint_state(checkpoint)
        for stage in self.recipe.stages:
            if isinstance(stage, RewardSettings) and stage.name == state["stage"]:
                become_reward_model(self, stage)
        self.learner.load(checkpoint, version=int(state["version"]))

    # -- models of stages -------------------------------------------------------------------------------------------

    def begin(self, stage: StageSettings) -> bool:
        """Make the model ready for a stage's first step; gives whether it is another one than before."""
        anew = stage.start == "fresh" and self.version > 0  # version 0 is the recipe's model as it was loaded
        if anew:
            self.learner.restart(self.fresh())
        if isinstance(stage, RewardSettings):
            become_reward_model(self, stage)
        self.learner.begin_stage()
        return anew

    def keep(self, checkpoint: Path | None) -> None:
        """Go on from an earlier model, as a version of its own: a checkpoint's, or (None) the recipe's anew."""
        if checkpoint is None:
            self.learner.restart(self.fresh())
        else:
            self.learner.load(checkpoint)


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
