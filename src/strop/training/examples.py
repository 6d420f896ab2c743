"""The examples that a stage trains on and holds out, in tokens: from files, demonstrations, or a run's scored attempts.

Which of them a step trains on is a function of the step's number, so that the order survives a kill.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.config import DataSettings, ExamplesSettings, SFTSettings, StoredPairsSettings
from strop.data import Rendered, Row, RowRenderer, load_rows, usable_rows
from strop.errors import ConfigError
from strop.rollouts import Group, Rollout, derive_seed
from strop.runs.reading import open_run
from strop.runs.run import read_recipe
from strop.sampling.rendering import training_example
from strop.training.stored import stored_groups

if TYPE_CHECKING:
    from strop.training.workshop import Workshop


@dataclass(frozen=True, slots=True)
class Examples:
    """What a stage learns from.

    Attributes:
        trained: to be trained on.
        held_out: never trained on.
        warnings: rows that were dropped or cut, in sentences.
    """

    trained: list[Rendered]
    held_out: list[Rendered]
    warnings: tuple[str, ...] = ()


def gather(stage: ExamplesSettings, shop: Workshop) -> Examples:
    """The stage's examples: the same ones in every process, read once.

    Raises:
        StropError: there are none, or something is wrong with them.
    """
    if stage.name not in shop.examples:
        shop.examples[stage.name] = _gather(stage, shop)
    return shop.examples[stage.name]


def _gather(stage: ExamplesSettings, shop: Workshop) -> Examples:
    share, seed = (stage.validation.share if stage.validation else 0.0), shop.seed(stage.name, "held out")
    warnings: list[str] = []
    if stage.data is not None:
        rows, warnings = _rows(stage, stage.data, shop)
        found = [(row.content, row.rendered) for row in rows]
    elif attempts := getattr(stage, "attempts", None):
        found = list(stored_pairs(attempts, shop))
    else:
        found = _demonstrations(stage, shop)
    if "judged answers" in kinds_of(stage):
        found = [(content, part) for content, rendered in found for part in _judged(rendered)]
    # By content: rows that say the same are all trained on or all held out.
    apart = [derive_seed(seed, content) / 2**63 < share for content, _ in found]
    train = [rendered for (_, rendered), held in zip(found, apart, strict=True) if not held]
    held_out = [rendered for (_, rendered), held in zip(found, apart, strict=True) if held]
    if stage.validation and stage.validation.path:
        data = (stage.data or DataSettings(path="")).model_copy(update={"path": stage.validation.path, "split": ""})
        rows, more = _rows(stage, data, shop)
        held_out, warnings = [row.rendered for row in rows], warnings + more
        if "judged answers" in kinds_of(stage):
            held_out = [part for rendered in held_out for part in _judged(rendered)]
    key = f"stages.{stage.name}"
    if not train:
        raise ConfigError(key, "there is nothing to train on", "Name data with rows, or hold out a smaller share")
    if stage.validation and not held_out:
        wrong = f"a share of {share:g} of {len(found)} examples holds out none"
        raise ConfigError(f"{key}.validation.share", wrong, "Raise it, or name a file of their own as validation.path")
    return Examples(train, held_out, tuple(warnings))


def _judged(example: Rendered) -> list[Rendered]:
    """A judged answer as it is; of a pair, the first as a good one and the second as a bad one."""
    if len(example.sequences) == 1:
        return [example]
    return [Rendered((sequence,), good) for sequence, good in zip(example.sequences, (True, False), strict=True)]


def _rows(stage: ExamplesSettings, data: DataSettings, shop: Workshop) -> tuple[list[Row], list[str]]:
    render = RowRenderer(
        shop.renderer,
        shop.tokenizer,
        reasoning=data.reasoning,
        max_tokens=data.max_tokens,
        cut=data.too_long == "cut",
    )

    def tell(rows: int) -> None:
        if rows % 1000 == 0:
            shop.run.tell("progress", what=f"reading {data.path}", done=rows, of=0)

    return usable_rows(load_rows(data, render, tell), data, kinds_of(stage))


def kinds_of(stage: ExamplesSettings) -> tuple[str, ...]:
    """What the rows of a stage's data may be, among `Format.gives`."""
    if isinstance(stage, SFTSettings):
        return ("demonstrations",)
    judges = any(part.name == "kto" for part in getattr(stage, "loss", ()))
    return ("judged answers", "pairs") if judges else ("pairs",)


def _demonstrations(stage: ExamplesSettings, shop: Workshop) -> list[tuple[str, Rendered]]:
    assert isinstance(stage, SFTSettings)
    environment = shop.environment(stage)
    drawn = environment.demonstrations(stage.demonstrations, random.Random(shop.seed(stage.name)))
    if not drawn:
        raise ConfigError(
            f"stages.{stage.name}.environment",
            f"{environment.name} has no demonstrations to fine-tune on",
            "Name an environment that writes them, name data, or leave the stage out",
        )
    shown = [(demo.task.id, training_example(shop.renderer, demo.messages, demo.task.tools)) for demo in drawn]
    return [(name, Rendered((example,))) for name, example in shown]


def stored_pairs(asked: StoredPairsSettings, shop: Workshop) -> Iterator[tuple[str, Rendered]]:
    """Pairs of a run's attempts, in the tokens that were sampled: the best and the worst of each group.

    Left out are attempts whose history was rewritten: their branches are not one sequence.

    Raises:
        StropError: there is no such run, it is of another model, or no group has such a pair.
    """
    path = Path(asked.run).expanduser()
    recipe, mine = read_recipe(path), shop.recipe.model.name
    if recipe.model.name != mine:
        wrong = f"{path} is a run of {recipe.model.name}, whose tokens are not those of {mine}"
        raise ConfigError("attempts.run", wrong, "Name a run of the same model")
    pairs = 0
    for group in stored_groups(open_run(str(path)), asked.stage):
        for number, (best, worst) in enumerate(best_and_worst(group, asked.margin, asked.by_group)):
            pairs += 1
            yield f"{group.id} {number}", Rendered((_tokens(best), _tokens(worst)))
    if not pairs:
        wrong = f"no group of {path}'s stage {asked.stage!r} has two attempts more than {asked.margin:g} apart"
        raise ConfigError("attempts", wrong, "Name another stage, or lower attempts.margin")


def best_and_worst(group: Group, margin: float, most: int) -> Iterator[tuple[Rollout, Rollout]]:
    """Pairs of a group's attempts whose rewards are more than `margin` apart, the widest apart first."""
    ranked = sorted(
        (rollout for rollout in group.scored() if len(rollout.leaves()) == 1 and rollout.sampled_tokens),
        key=lambda rollout: (-rollout.ending.reward, rollout.member),  # type: ignore[union-attr]
    )
    for best, worst in zip(ranked[:most], reversed(ranked), strict=False):
        if best.ending.reward - worst.ending.reward <= margin:  # type: ignore[union-attr]
            return
        yield best, worst


def _tokens(rollout: Rollout) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    mask: list[bool] = []
    for index in rollout.branch(rollout.leaves()[0]):
        call = rollout.calls[index]
        tokens += [*call.prompt, *call.tokens]
        mask += [False] * len(call.prompt) + [True] * len(call.tokens)
    return tokens, mask


def batch_numbers(stage: ExamplesSettings, count: int, step: int, seed: int) -> list[int]:
    """Numbers of the examples that a step trains on: epochs one after another, each in an order of its own."""
    places = range(step * stage.batch_size, (step + 1) * stage.batch_size)
    return [_epoch(count, seed, stage.name, place // count)[place % count] for place in places]


@lru_cache(maxsize=4)
def _epoch(count: int, seed: int, stage: str, epoch: int) -> Sequence[int]:
    return random.Random(derive_seed(seed, stage, "epoch", epoch)).sample(range(count), count)


def log_examples(stage: ExamplesSettings, shop: Workshop) -> None:
    """Say what the stage learns from, and what was left out."""
    examples = gather(stage, shop)
    told: dict[str, Any] = {"trained": len(examples.trained), "held_out": len(examples.held_out)}
    told["tokens"] = sum(example.tokens for example in examples.trained)
    told["tokens_trained"] = sum(example.trained for example in examples.trained)
    shop.run.log("examples", stage=stage.name, **told)
    for sentence in examples.warnings:
        shop.run.warn(sentence)
