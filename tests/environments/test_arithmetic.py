"""Drawn tasks, numbers read from text, and the arithmetic environment."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.environments.arithmetic import Arithmetic
from strop.environments.drawn import DrawnTasks
from strop.environments.numbers import last_number, write_number
from strop.errors import ConfigError, EnvironmentProblem
from strop.rollouts import Rollout, Task


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("85", 85),
        ("47 + 38 = 85.", 85),
        ("It is 1,234,567.5 dollars", 1234567.5),
        ("$12.50", 12.5),
        ("-3", -3),
        ("= −3", -3),
        ("it's -$4", -4),
        ("12-3", 3),
        ("(-2)", -2),
        ("1, 2, 3", 3),
        ("1,2,3", 3),
        (".5", 0.5),
        ("0.75 kg", 0.75),
        ("none", None),
        ("", None),
        ("9" * 400, None),
    ],
)
def test_the_last_number_is_read_as_a_person_would(text: str, number: float | None) -> None:
    assert last_number(text) == number


@given(st.integers(-(10**9), 10**9))
def test_numbers_read_back(number: int) -> None:
    assert last_number(write_number(number / 1000)) == pytest.approx(number / 1000)
    assert last_number(f"So the result is {number}.") == number


def test_questions_are_right_and_splits_disjoint_even_when_commuted() -> None:
    environment = Arithmetic(operations=["+", "-", "*"], digits=2, train_tasks=3000)
    pairs: dict[str, set[tuple[str, frozenset[int]]]] = {}
    for split in ("train", "test"):
        for task in environment.tasks(split):
            _, _, a, operation, b = task.messages[0]["content"].rstrip("?").split()
            assert 10 <= int(b) <= 99 and 10 <= int(a) <= 99
            assert task.data["answer"] == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operation]
            assert task.data["answer"] >= 0
            pairs.setdefault(split, set()).add((operation, frozenset((int(a), int(b)))))
    assert len(pairs["test"]) > 300 and not pairs["train"] & pairs["test"]


@pytest.mark.parametrize(
    ("reply", "reward"), [("The sum is 85", 1.0), ("84", 0.0), ("84 85 86", 0.0), ("eighty-five", 0.0)]
)
async def test_the_last_number_of_the_reply_is_scored(reply: str, reward: float) -> None:
    task = Task("t", "arithmetic", ({"role": "user", "content": "What is 47 + 38?"},), data={"answer": 85})
    rollout = Rollout(id="g/0", task_id="t", environment="arithmetic", member=0, seed=0)
    rollout.transcript = [*task.messages, {"role": "assistant", "content": reply}]
    scored = await Arithmetic().score(task, rollout)
    assert (scored.reward, scored.solved) == (reward, bool(reward))


def one_digit(rng: random.Random) -> tuple[str, Task]:
    number = rng.randrange(10)
    return str(number), Task("", "e", ({"role": "user", "content": str(number)},))


def test_drawn_tasks_are_a_sequence() -> None:
    tasks = DrawnTasks(one_digit, "train", 30, seed=1)
    assert len(tasks) == len(list(tasks)) == 30
    assert tasks[-1] == tasks[29] and tasks[3:5] == [tasks[3], tasks[4]]
    assert len({task.id for task in tasks}) == 30
    with pytest.raises(IndexError):
        tasks[30]
    assert list(DrawnTasks(one_digit, "train", 30, seed=2)) != list(tasks)


def test_too_few_questions_for_two_splits_are_refused() -> None:
    def always(rng: random.Random) -> tuple[str, Task]:
        return "the one", Task("", "e", ({"role": "user", "content": "the one"},))

    outcomes = []
    for split in ("train", "test"):
        try:
            outcomes.append(DrawnTasks(always, split, 1, seed=0)[0].messages[0]["content"])
        except EnvironmentProblem as problem:
            outcomes.append(str(problem).split(":")[0])
    assert sorted(outcomes)[0].startswith("2000 draws gave no question") and sorted(outcomes)[1] == "the one"


def test_the_question_is_worded_as_asked() -> None:
    task = Arithmetic(question="{a}{operation}{b}, {who}?").tasks("train")[0]
    a, b = task.messages[0]["content"].removesuffix(", {who}?").split("+")
    assert int(a) + int(b) == task.data["answer"]


@pytest.mark.parametrize(
    "options", [{"operations": ["/"]}, {"operations": []}, {"digits": 0}, {"digits": 7}, {"question": "{a}+{b}"}]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"environment.options.{next(iter(options))}"):
        Arithmetic(**options)


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(EnvironmentProblem, match="no split 'validation'"):
        Arithmetic().tasks("validation")
    with pytest.raises(ConfigError, match="train_tasks"):
        Arithmetic(train_tasks=0).tasks("train")
