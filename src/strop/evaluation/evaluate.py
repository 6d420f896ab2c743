"""Attempts at held-out tasks, and the evaluation they make. Failures of the system are retried, then in no score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from strop.agents.attempts import Runner
from strop.agents.metrics import attempt_metrics
from strop.errors import EvaluationError
from strop.rollouts import Failed, Group, Rollout, Scored, Task
from strop.statistics import Evaluation, TaskResult

#: Attempts at once: enough to keep a sampler's slots full while others call tools.
IN_FLIGHT = 256


async def attempt_all(
    tasks: Sequence[Task],
    runner: Runner,
    *,
    name: str,
    attempts: int = 1,
    seed: int = 0,
    retries: int = 2,
    finished: Sequence[Rollout] = (),
    on_finished: Callable[[int, Rollout], None] = lambda number, rollout: None,
) -> list[Group]:
    """Attempt every task.

    Args:
        tasks: what to attempt.
        runner: how.
        name: attempts are called "evaluation-NAME-000012/0".
        attempts: of each task.
        seed: attempts' seeds derive from it, the task's number and the attempt's.
        retries: of an attempt that the system failed.
        finished: attempts of an earlier process, which are not made again.
        on_finished: told the task's number and the attempt as it ends.

    Raises:
        StropError: what no retry would mend; the other attempts were cancelled.

    Returns:
        One group a task, in the order of `tasks`.
    """
    done = {rollout.id: rollout for rollout in finished}
    places = asyncio.Semaphore(IN_FLIGHT)

    async def attempt(number: int, member: int) -> Rollout:
        group_id = f"evaluation-{name}-{number:06d}"
        if (known := done.get(f"{group_id}/{member}")) is not None:
            return known
        async with places:
            for tries in range(1, retries + 2):
                rollout = await runner.run(group_id, member, tasks[number], seed, tries)
                if not isinstance(rollout.ending, Failed):
                    break
        on_finished(number, rollout)
        return rollout

    try:
        async with asyncio.TaskGroup() as group:
            made = [[group.create_task(attempt(n, m)) for m in range(attempts)] for n in range(len(tasks))]
    except BaseExceptionGroup as failures:  # bad input, or a budget that is spent: the first one says it
        raise failures.exceptions[0] from None
    return [
        Group(f"evaluation-{name}-{number:06d}", tasks[number], [member.result() for member in members])
        for number, members in enumerate(made)
    ]


def evaluation_of(name: str, groups: Sequence[Group]) -> Evaluation:
    """The evaluation that scored attempts make.

    Raises:
        EvaluationError: no attempt was scored.
    """
    results, failures = [], 0
    for group in groups:
        endings = [rollout.ending for rollout in group.rollouts]
        scored = [ending for ending in endings if isinstance(ending, Scored)]
        failures += len(endings) - len(scored)
        if scored:
            solved = tuple(float(s.solved) for s in scored if s.solved is not None)
            rewards = tuple(float(s.reward) for s in scored)
            label = ", ".join(f"{name} {value}" for name, value in group.task.labels.items())
            results.append(TaskResult(group.task.id, label, rewards, solved if len(solved) == len(scored) else ()))
    if not results:
        reasons = {str(r.ending.reason) for g in groups for r in g.rollouts if isinstance(r.ending, Failed)}
        raise EvaluationError(
            f"Evaluation {name!r} has no scored attempt; they failed with: {'; '.join(reasons)[:500]}"
        )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return Evaluation(name, tuple(results), attempt_metrics(rollouts), failures)
