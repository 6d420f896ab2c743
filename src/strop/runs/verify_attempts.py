"""What `strop verify` asks of stored attempts: that each came out once and whole, that every trained token was sampled,
by weights that were young enough, and that groups and steps are what the recipe and the log say.

The files around them (events, checkpoints, journal, summary) are in `strop.runs.verify`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from strop.config import AttemptsSettings, Recipe
from strop.rollouts import Failed, Group, ModelCall, Rollout, Scored, derive_seed

#: Log-probabilities come from fp32 sums, which may round to a hair above 0.
ROUNDING = 1e-5


class Problem(NamedTuple):
    """Something that isn't as it should be.

    Attributes:
        file: path within the run directory.
        sentence: what is broken.
        mended: whether it is what a kill leaves behind, and `strop train --resume` mends by itself.
    """

    file: str
    sentence: str
    mended: bool = False


@dataclass
class StageBook:
    """What was found of one stage's groups so far.

    Attributes:
        settings: the stage's.
        before: weight version before each logged step.
        latest: weight version after the last logged step.
        places: which file each group's number is in.
        next, open: of the newest batch's collector state: number of the next group, and groups that were open.
    """

    settings: AttemptsSettings
    before: Mapping[int, int]
    latest: int
    places: dict[int, str] = field(default_factory=dict)
    next: int = 0
    open: Mapping[str, int] = field(default_factory=dict)

    def version_at(self, step: int) -> int:
        """Weight version when a step began (the newest known for one that isn't logged yet)."""
        return self.before.get(step, self.latest)


def check_groups(name: str, groups: Sequence[tuple[Group, str]], seen: dict[str, str]) -> Iterator[str]:
    """What holds for every file of attempts.

    Args:
        name: the file's.
        groups: what is in it.
        seen: file of every attempt so far, by id; this file's are added.
    """
    for group, _ in groups:
        members = Counter(rollout.member for rollout in group.rollouts)
        if len(members) != len(group.rollouts):
            yield f"group {group.id} has a member twice"
        for rollout in group.rollouts:
            if rollout.id in seen:
                yield f"attempt {rollout.id} is in {seen[rollout.id]} already: an attempt comes out exactly once"
            seen[rollout.id] = name
            for sentence in check_rollout(group, rollout):
                yield f"attempt {rollout.id} {sentence}"


def check_rollout(group: Group, rollout: Rollout) -> Iterator[str]:
    """What holds for every attempt; sentences that go on after its name."""
    if rollout.id != f"{group.id}/{rollout.member}":
        yield f"is called so, but is member {rollout.member} of group {group.id}"
    if (rollout.task_id, rollout.environment) != (group.task.id, group.task.environment):
        yield f"is at task {rollout.task_id}, but its group at {group.task.id}"
    if rollout.ending is None:
        yield "has no ending: an attempt is scored or failed"
    if isinstance(rollout.ending, Scored) and not math.isfinite(rollout.ending.reward):
        yield f"has the reward {rollout.ending.reward}"
    if rollout.tries < 1:
        yield f"was tried {rollout.tries} times"
    for number, call in enumerate(rollout.calls):
        for sentence in _check_call(rollout, number, call):
            yield f"call {number} {sentence}"


def _check_call(rollout: Rollout, number: int, call: ModelCall) -> Iterator[str]:
    if call.parent is not None and not 0 <= call.parent < number:
        yield f"extends call {call.parent}, which does not come before it"
    elif call.parent is None and not call.prompt:
        yield "opens a conversation with an empty prompt: its first token was predicted from nothing"
    if not call.tokens:
        yield "has no sampled token"
    if any(token < 0 for token in (*call.prompt, *call.tokens)):
        yield "has a token below 0"
    if wrong := [logprob for logprob in call.logprobs if not -math.inf < logprob <= ROUNDING]:
        yield f"has the log-probability {wrong[0]:g}: a sampled token's is finite and not above 0"
    if any(version < 0 for version in call.versions):
        yield f"has tokens of weight version {min(call.versions)}: every sampled token carries one, from 0 on"
    if any(later < earlier for earlier, later in zip(call.versions, call.versions[1:], strict=False)):
        yield "has weight versions that go back"
    if isinstance(rollout.ending, Failed):
        return
    if call.ended < call.started:
        yield "ended before it began"


def check_seeds(groups: Sequence[tuple[Group, str]], seed: int) -> Iterator[str]:
    """Every random draw of an attempt derives from its seed, and that from the run's; what never began has none."""
    for group, _ in groups:
        for rollout in group.rollouts:
            expected = derive_seed(seed, rollout.id)
            if rollout.seed != expected and (rollout.seed or rollout.calls):
                yield f"attempt {rollout.id} has the seed {rollout.seed}, but the run's seed gives it {expected}"


def check_limits(groups: Sequence[tuple[Group, str]], max_tokens: int, max_context: int) -> Iterator[str]:
    """No reply and no conversation is longer than the recipe allows."""
    for group, _ in groups:
        for rollout in group.rollouts:
            longest = max((len(call.tokens) for call in rollout.calls), default=0)
            if longest > max_tokens:
                yield f"attempt {rollout.id} has a reply of {longest} tokens, more than agent.max_tokens = {max_tokens}"
            lengths: list[int] = []  # of the conversation up to each call
            for call in rollout.calls:
                before = lengths[call.parent] if call.parent is not None and 0 <= call.parent < len(lengths) else 0
                lengths.append(before + len(call.prompt) + len(call.tokens))
            if max(lengths, default=0) > max_context:
                yield f"attempt {rollout.id} has {max(lengths)} tokens, more than sampler.max_context = {max_context}"


def check_batch(
    book: StageBook, name: str, step: int, groups: Sequence[tuple[Group, str]], metrics: Mapping[str, float] | None
) -> Iterator[str]:
    """What holds for the batch of a step: its size, the age of its tokens, and what the log says of it.

    Args:
        book: of the stage; the batch's groups are added.
        name: the file's.
        step: that trains on it.
        groups: what is in it.
        metrics: of the logged step; None if it isn't logged yet.
    """
    collect = book.settings.collect
    yield from check_places(book, name, groups)
    trained = [group for group, used in groups if used == "trained"]
    if len(trained) > collect.groups:
        yield f"has {len(trained)} groups to train on, but collect.groups = {collect.groups}"
    for group in trained:
        fewest = min(2, collect.group_size)
        if len(list(group.scored())) < fewest:
            yield f"group {group.id} was trained on with fewer than {fewest} scored members: there is no baseline"
        if not 0 <= step - group.step <= collect.staleness:
            yield (
                f"group {group.id} was begun at step {group.step + 1} and trained on at step {step + 1}, but "
                f"collect.staleness = {collect.staleness}"
            )
        versions = [version for rollout in group.rollouts for call in rollout.calls for version in call.versions]
        now = book.version_at(step)
        if versions and max(versions) > now:
            yield f"group {group.id} has tokens of weight version {max(versions)}, but step {step + 1} began at {now}"
        if versions and now - min(versions) > collect.staleness:
            yield (
                f"group {group.id} has tokens of weight version {min(versions)}, which is {now - min(versions)} behind "
                f"step {step + 1}, but collect.staleness = {collect.staleness}"
            )
    if metrics is not None:
        yield from _check_metrics(step, trained, metrics)


def _check_metrics(step: int, trained: Sequence[Group], metrics: Mapping[str, float]) -> Iterator[str]:
    """The logged step must be of these attempts."""
    rollouts = [rollout for group in trained for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    there: dict[str, float] = {"attempts": len(rollouts), "failed": len(rollouts) - len(rewards)}
    if rewards:
        there["reward"] = math.fsum(rewards) / len(rewards)
    for key, value in there.items():
        if key in metrics and not math.isclose(metrics[key], value, rel_tol=1e-6, abs_tol=1e-9):
            yield f"has {key} {value:g}, but step {step + 1} was logged with {metrics[key]:g}"
    sampled = sum(rollout.sampled_tokens for rollout in rollouts if rollout.reward is not None)
    if metrics.get("tokens_trained", 0) > sampled:
        yield (
            f"has {sampled} sampled tokens, but step {step + 1} trained on {metrics['tokens_trained']:.0f}: every trained "
            f"token is a sampled one"
        )


def check_places(book: StageBook, name: str, groups: Sequence[tuple[Group, str]]) -> Iterator[str]:
    """Groups have all their members, and a number of the stage that no other file has."""
    collect, stage = book.settings.collect, book.settings.name
    size = collect.group_size + collect.oversample
    for group, used in groups:
        number = group.id.removeprefix(f"{stage}-")
        if not number.isdigit():
            yield f"group {group.id} is not one of stage {stage}"
            continue
        if int(number) in book.places:
            yield f"group {group.id} is in {book.places[int(number)]} already"
        book.places[int(number)] = name
        if len(group.rollouts) != size:
            yield f"group {group.id} has {len(group.rollouts)} members, but the recipe asks for {size}"
        if used == "evaluation":
            yield f"group {group.id} is marked as an evaluation's"


def check_all_came_out(book: StageBook, ended: bool) -> Iterator[str]:
    """Every group that was begun is in a file, or was open when the newest batch was stored.

    Args:
        book: of the stage, all of whose files were read.
        ended: whether the stage is over, so that nothing may be open.
    """
    begun = max(book.next, max(book.places, default=-1) + 1 if ended else 0)
    missing = [number for number in range(begun) if number not in book.places]
    if not ended:
        missing = [number for number in missing if str(number) not in book.open]
        late = [number for number in book.places if number >= book.next]
        if late:
            yield f"group {late[0]} is stored, but the newest batch says that groups up to {book.next - 1} were begun"
    if missing:
        yield f"{len(missing)} groups were begun and are in no file, first of them number {missing[0]}: attempts were lost"


def check_evaluation(groups: Sequence[tuple[Group, str]], event: Mapping[str, Any]) -> Iterator[str]:
    """The logged evaluation is what its stored attempts give."""
    found: dict[str, list[float]] = {}
    failed, versions = 0, set()
    for group, _ in groups:
        rewards = [float(rollout.ending.reward) for rollout in group.rollouts if isinstance(rollout.ending, Scored)]
        failed += len(group.rollouts) - len(rewards)
        versions |= {v for rollout in group.rollouts for call in rollout.calls for v in call.versions}
        if rewards:
            found[group.task.id] = rewards
    logged = {task[0]: [float(reward) for reward in task[3]] for task in event["tasks"]}
    if different := [task for task in sorted(found.keys() | logged.keys()) if found.get(task) != logged.get(task)]:
        task = different[0]
        yield (
            f"gives task {task} the rewards {found.get(task)}, but evaluation {event['name']!r} was logged with "
            f"{logged.get(task)}"
        )
    if failed != event["failed"]:
        yield f"has {failed} failed attempts, but evaluation {event['name']!r} was logged with {event['failed']}"
    if len(versions) > 1:
        yield f"has tokens of the weight versions {sorted(versions)}: an evaluation is of one version"


def seed_of(recipe: Recipe, purpose: str) -> int:
    """Seed from which the attempts of a stage, or of "evaluation", derive theirs."""
    return derive_seed(recipe.seed, purpose)
