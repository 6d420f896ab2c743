"""What is attempted next: shares of mixed environments, curricula by measured pass rate, names that stay apart."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.config import CurriculumSettings
from strop.errors import ConfigError
from strop.rollouts import Failed, FailureKind, Group, Rollout, Scored, Task
from strop.training.tasks import Curriculum, LabelledTasks, MixedRunner, Part, StageTasks, shuffled

LEVELS = ("easy", "medium", "hard")


def tasks(count: int = 90, environment: str = "levels") -> list[Task]:
    return [Task(f"t{n}", environment, (), labels={"level": LEVELS[n % 3]}) for n in range(count)]


def nothing_stored(step: int):
    raise AssertionError(f"the batch of step {step} was read")


def stage(*weights: float, **part) -> StageTasks:
    parts = [
        Part(
            f"e{number}",
            LabelledTasks(tasks(), f"e{number}") if len(weights) > 1 else tasks(),
            None,
            weight,
            number,
            **part,
        )
        for number, weight in enumerate(weights)
    ]
    return StageTasks(parts, nothing_stored)


def group(number: int, task: Task, passes: Sequence[bool | None]) -> Group:
    members = []
    for member, solved in enumerate(passes):
        ending = Failed(FailureKind.SCORER, "away") if solved is None else Scored(float(solved), solved=solved)
        members.append(Rollout(f"g{number}/{member}", task.id, task.environment, member, 0, ending=ending))
    return Group(f"g{number:06d}", task, members)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=5), st.integers(1, 300))
def test_every_environment_has_its_share_to_within_a_group(weights, count):
    made = Counter(stage(*weights)._turn(number)[0] for number in range(count))
    for number, weight in enumerate(weights):
        assert abs(made[number] - count * weight / sum(weights)) <= len(weights) - 1 + 1e-9


def test_a_group_is_the_same_whoever_asks_and_in_whatever_order():
    ahead, behind = stage(1.0, 2.0, 0.5), stage(1.0, 2.0, 0.5)
    forwards = [ahead(number, 0)[0].id for number in range(50)]
    assert [behind(number, 0)[0].id for number in reversed(range(50))] == forwards[::-1]


def test_one_environment_is_passed_over_epoch_by_epoch():
    source, order = stage(1.0), shuffled(90, 0)
    assert [source(number, 0)[0].id for number in range(180)] == [f"t{order(number)}" for number in range(180)]
    assert len({source(number, 0)[0].id for number in range(90)}) == 90


def test_shares_follow_the_variance_of_the_outcome_and_keep_their_bound():
    curriculum = Curriculum(CurriculumSettings(label="level", least_share=0.3), tasks(), 0)
    assert curriculum.values == ["easy", "hard", "medium"]
    assert curriculum.shares({}) == pytest.approx([1 / 3] * 3)
    # by hand: (passed + 1) / (made + 2) = 9/10, 1/10, 1/2, so p (1 - p) = 0.09, 0.09, 0.25
    shares = curriculum.shares({"easy": (8.0, 8.0), "hard": (0.0, 8.0), "medium": (4.0, 8.0)})
    assert shares == pytest.approx([0.1 + 0.7 * part / 0.43 for part in (0.09, 0.09, 0.25)])
    extreme = curriculum.shares({"easy": (1e9, 1e9), "hard": (0.0, 1e9), "medium": (5.0, 10.0)})
    assert min(extreme) == pytest.approx(0.1) and sum(extreme) == pytest.approx(1.0)


def test_what_was_measured_fades_and_failures_of_the_system_count_nowhere():
    curriculum = Curriculum(CurriculumSettings(label="level", memory=0.5), tasks(), 0)
    easy, hard = tasks()[0], tasks()[2]
    first = curriculum.observe({}, [group(0, easy, [True, True, None, False]), group(1, hard, [None, None])])
    assert first == {"easy": (2.0, 3.0), "hard": (0.0, 0.0), "medium": (0.0, 0.0)}
    second = curriculum.observe(json.loads(json.dumps(first)), [group(2, hard, [True, False])])
    assert second == {"easy": (1.0, 1.5), "hard": (1.0, 2.0), "medium": (0.0, 0.0)}
    groups = [group(number, task, [True, False]) for number, task in enumerate(tasks(6))]
    assert curriculum.observe({}, groups) == curriculum.observe({}, groups[::-1])


def test_draws_come_up_as_often_as_their_shares():
    settings = CurriculumSettings(label="level", least_share=0.1)
    curriculum, measured = Curriculum(settings, tasks(300), 7), {"easy": [20.0, 20.0], "hard": [10.0, 20.0]}
    drawn = Counter(curriculum.task(number, measured).labels["level"] for number in range(4000))
    for value, share in zip(curriculum.values, curriculum.shares(measured), strict=True):
        assert drawn[value] / 4000 == pytest.approx(share, abs=0.03)  # four standard deviations


def test_a_process_that_takes_over_chooses_the_same_tasks():
    """What it knows comes from the stored batches alone."""
    asked = CurriculumSettings(label="level")
    stored: dict[int, str] = {}
    first = StageTasks([Part("levels", tasks(), None, curriculum=asked)], nothing_stored)
    chosen: list[str] = []
    for step in range(5):
        groups = []
        for number in range(step * 4, step * 4 + 4):
            task, _ = first(number, step)
            chosen.append(task.id)
            groups.append(group(number, task, [task.labels["level"] == "easy", number % 2 == 0]))
        stored[step] = json.dumps(first.observe(step, groups))
    for step in range(5):
        later = StageTasks([Part("levels", tasks(), None, curriculum=asked)], lambda s: json.loads(stored[s]))
        assert [later(n, step)[0].id for n in range(step * 4, step * 4 + 4)] == chosen[step * 4 : step * 4 + 4]
    without = StageTasks([Part("levels", tasks(), None, curriculum=asked)], lambda s: {})
    assert [without(n, n // 4)[0].id for n in range(20)] != chosen, "what was measured made no difference"


def test_a_label_that_no_task_has_is_refused():
    with pytest.raises(ConfigError, match=r"no task has a label 'size'. The first ones have: level"):
        Curriculum(CurriculumSettings(label="size"), tasks(), 0)


async def test_an_environment_is_given_its_own_task_and_the_record_has_the_label():
    given_to: list[Task] = []

    class Inner:
        environment = SimpleNamespace(name="levels")

        async def run(self, group_id, member, task, seed, tries=1, begun=lambda rollout: None):
            given_to.append(task)
            rollout = Rollout(f"{group_id}/{member}", task.id, task.environment, member, 0, tries=tries)
            begun(rollout)
            return rollout

    labelled = LabelledTasks(tasks(3), "first")
    assert len(labelled) == 3 and [task.id for task in labelled[1:]] == ["first/t1", "first/t2"]
    seen: list[tuple[str, str]] = []
    runner = MixedRunner({"first": Inner()})
    rollout = await runner.run("g", 0, labelled[2], 1, begun=lambda r: seen.append((r.task_id, r.environment)))
    assert (given_to[0].id, given_to[0].environment) == ("t2", "levels")
    assert (rollout.task_id, rollout.environment) == ("first/t2", "first") == seen[0]
    assert labelled[2].labels == {"environment": "first", "level": "hard"}
