"""A recipe's stages in turn: each begins with the model that the last one made, and passes its own on if its gate says so.

Whether a model is promoted is decided once, from logged evaluations, and logged; whoever resumes finds it decided.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from strop.config import (
    AttemptsSettings,
    ExamplesSettings,
    GateSettings,
    Recipe,
    StageSettings,
)
from strop.errors import GateError, RunError
from strop.runs.run import Run
from strop.statistics import Evaluation, compare
from strop.training.teachers import checkpoint_of
from strop.training.workshop import Workshop


async def train_stages(run: Run, shop: Workshop, reached: tuple[str, int] | None) -> None:
    """Train every stage that isn't done.

    Args:
        run: whose recipe it is.
        shop: what stages work with; a checkpoint is loaded, if there was one.
        reached: stage and step of that checkpoint.

    Raises:
        GateError: a stage's model was not promoted, and its gate ends the run then.
    """
    recipe = run.recipe
    names = [stage.name for stage in recipe.stages]
    first = names.index(reached[0]) if reached else 0
    if not reached:
        await shop.evaluate(recipe.stages[0], "start", "", 0)
    another = False  # whether the model is another one than was scored last
    for before, stage in list(zip([recipe.stages[0], *recipe.stages], recipe.stages, strict=False))[first:]:
        if isinstance(stage, ExamplesSettings) and not shop.trains:
            continue
        done = reached[1] if reached and reached[0] == stage.name else 0
        run.ledger.phase = stage.name
        if done == 0:
            another |= shop.begin(stage)
            if another or _scored_on(recipe, before) != _scored_on(recipe, stage):
                await shop.evaluate(stage, f"{stage.name} start", stage.name, 0)  # what it gains is seen from here
        steps = done
        if done < stage.steps:
            run.log("stage", stage=stage.name, what="began", step=done, version=shop.version)
            began = time.monotonic()
            steps = await _trainer(stage)(stage, shop, done)
            run.log("stage", stage=stage.name, what="ended", step=steps, seconds=time.monotonic() - began)
        await shop.evaluate(stage, stage.name, stage.name, steps)
        another = not promoted(run, stage)
        if another:
            shop.keep(model_before(recipe.stages, stage, shop.checkpoints, partial(was_promoted, run)))


def _scored_on(recipe: Recipe, stage: StageSettings) -> tuple[object, ...]:
    """What decides which tasks a stage is scored on, and how."""
    asked = recipe.evaluation_of(stage)
    return recipe.environments_of(stage), asked.tasks, asked.split, asked.attempts, asked.temperature


def _trainer(stage: StageSettings) -> Callable[[Any, Workshop, int], Awaitable[int]]:
    """What trains a stage, and gives how many steps it has then."""
    if isinstance(stage, AttemptsSettings):
        from strop.training.rl import train_rl

        return train_rl
    if isinstance(stage, ExamplesSettings):
        from strop.training.given import train_given

        return train_given
    raise RunError(f"stage {stage.name!r} is of a kind that this version can't train")


# -- gates ----------------------------------------------------------------------------------------------------------------


def promoted(run: Run, stage: StageSettings) -> bool:
    """Whether a stage's model goes on to the next stage.

    Raises:
        GateError: it does not, and the gate says that the run ends then.
    """
    if stage.gate is None:
        return True
    decided = run.gate(stage.name)
    if decided is None:
        missed = misses(stage.gate, _score(run, stage), _score_before(run, stage))
        then = "the run ends" if stage.gate.otherwise == "stop" else "the model from before it is kept"
        said = f"{stage.name} was not promoted: {'; '.join(missed)}; {then}" if missed else f"{stage.name} was promoted"
        run.log("gate", stage=stage.name, step=stage.steps, passed=not missed, message=said, flush=True)
        if missed and stage.gate.otherwise == "keep":
            run.warn(said, stage=stage.name)
        decided = run.gate(stage.name)
        assert decided is not None
    if not decided["passed"] and stage.gate.otherwise == "stop":
        run.log("run", what="stopped", message=decided["message"], flush=True)
        raise GateError(
            f"{decided['message']}. Nothing is lost: look at the attempts, and if the model should go on all the same: "
            f"strop train --resume {run.path} --promote {stage.name}"
        )
    return bool(decided["passed"])


def was_promoted(run: Run, name: str) -> bool:
    """What was decided of a stage that is over; without a gate, its model went on."""
    decided = run.gate(name)
    return decided is None or bool(decided["passed"])


def promote_by_hand(run: Run, name: str) -> None:
    """Record that a person lets a stage's model go on, whatever its gate said.

    Raises:
        GateError: there is nothing to decide.
    """
    decided = run.gate(name)
    if decided is None or decided["passed"]:
        raise GateError(f"{run.path}: no gate of a stage {name!r} is closed, so there is nothing to promote.")
    run.log("gate", stage=name, step=decided["step"], passed=True, message=f"{name} was promoted by hand", flush=True)


def misses(gate: GateSettings, score: Evaluation, before: Evaluation | None) -> list[str]:
    """What a model lacks to be promoted, a clause each; nothing if it is.

    Args:
        gate: what is asked.
        score: of the model, after its stage.
        before: of the model before the stage, on the same tasks; None if that was not scored on any of them.
    """
    missed = []
    if gate.score_above is not None:
        found = score.score()
        if not found.low > gate.score_above:
            missed.append(f"the held-out score's lower bound is {found.low:.3f}, not above {gate.score_above:g}")
    if gate.gain_above is not None:
        if before is None:
            missed.append("the model before it was not scored on the same tasks, so its gain is not known")
        elif not (gain := compare(before, score).gain).low > gate.gain_above:
            missed.append(f"the gain's lower bound is {gain.low:+.3f}, not above {gate.gain_above:+g}")
    return missed


def _score(run: Run, stage: StageSettings) -> Evaluation:
    found = run.evaluation(stage.name)
    if found is None:
        raise RunError(f"{run.path} has no evaluation after stage {stage.name}, which its gate asks for.")
    return Evaluation.from_record(found)


def _score_before(run: Run, stage: StageSettings) -> Evaluation | None:
    """The last evaluation of the model before a stage that shares tasks with the one after it."""
    after = {task.task_id for task in _score(run, stage).tasks}
    for event in reversed(run.evaluations):
        found = Evaluation.from_record(event)
        outside = event["stage"] != stage.name or event["step"] == 0
        if outside and any(task.task_id in after for task in found.tasks):
            return found
    return None


def model_before(
    stages: Sequence[StageSettings], stage: StageSettings, checkpoints: Path, was_promoted: Callable[[str], bool]
) -> Path | None:
    """The model that a stage began with.

    Args:
        stages: of the recipe.
        stage: one of them.
        checkpoints: their folder.
        was_promoted: whether the model of a stage, by name, went on.

    Returns:
        The last checkpoint of the nearest stage before it that was promoted; None stands for the recipe's model.

    Raises:
        RunError: that checkpoint is missing or damaged.
    """
    for earlier in reversed(stages[: stages.index(stage)]):
        if was_promoted(earlier.name):
            return checkpoint_of(checkpoints, earlier.name)
    return None
