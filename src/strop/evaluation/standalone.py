"""Scoring a model outside a run: load it, attempt an environment's held-out tasks, give back the evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable

from strop.agents import make_agent
from strop.agents.attempts import AttemptRunner
from strop.config import EnvironmentSettings, EvaluationSettings
from strop.costs import Ledger
from strop.environments import load_environment
from strop.evaluation.evaluate import attempt_all, evaluation_of
from strop.rollouts import derive_seed
from strop.sampling.opening import Endpoint, open_sampler
from strop.sampling.sampler import SamplingParams
from strop.statistics import Evaluation


async def score_model(
    model: str,
    asked: EnvironmentSettings,
    settings: EvaluationSettings,
    *,
    max_context: int,
    seed: int = 0,
    tell: Callable[[int, int], None] = lambda done, of: None,
    endpoint: Endpoint | None = None,
) -> Evaluation:
    """Score a model.

    Args:
        model: a start model, a folder, or a hub name.
        asked: environment and agent.
        settings: which tasks, how often, at which temperature.
        max_context: tokens of a whole conversation.
        seed: of the sampling.
        tell: told attempts done, and of how many.
        endpoint: a server that samples; None samples here. `model` gives the tokenizer alone then.

    Raises:
        StropError: the model, the environment or an option is not right.
    """
    from strop.sampling.rendering import renderer_for

    environment = load_environment(asked.name, asked.options)
    split = environment.tasks(settings.split)
    tasks = [split[number] for number in range(min(settings.tasks, len(split)))]
    sampler, tokenizer, source = await open_sampler(model, slots=64, max_context=max_context, endpoint=endpoint)
    runner = AttemptRunner(
        environment=environment,
        agent=make_agent(asked.agent),
        sampler=sampler,
        renderer=renderer_for(tokenizer, source),
        params=SamplingParams(max_tokens=asked.agent.max_tokens, temperature=settings.temperature),
        seconds=600.0,
        ledger=Ledger(),
        clock=time.monotonic,
    )
    done = 0

    def count(*_: object) -> None:
        nonlocal done
        done += 1
        tell(done, len(tasks) * settings.attempts)

    try:
        groups = await attempt_all(
            tasks,
            runner,
            name=asked.name.rpartition(":")[2],
            attempts=settings.attempts,
            seed=derive_seed(seed, "evaluation"),
            on_finished=count,
        )
    finally:
        await sampler.close()
    return evaluation_of(model, groups)
