"""The reasoning-gym adapter: every task draws and scores, and nothing that a model wrote is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strop.environments.reasoning_gym import ReasoningGym
from strop.errors import AttemptError
from strop.rollouts import FailureKind, Rollout, Task

factory = pytest.importorskip("reasoning_gym.factory")
#: "composite" is a mixture of other tasks and has none by itself.
NAMES = sorted(set(factory.DATASETS) - {"composite"})


def said(reply: str) -> Rollout:
    rollout = Rollout(id="g/0", task_id="t", environment="reasoning_gym", member=0, seed=0)
    rollout.transcript = [{"role": "assistant", "content": reply}]
    return rollout


@pytest.mark.parametrize("name", NAMES)
async def test_every_task_draws_and_scores(name: str) -> None:
    environment = ReasoningGym(name, train_tasks=20, test_tasks=5)
    task = environment.tasks("train")[0]
    assert task == ReasoningGym(name, train_tasks=20, test_tasks=5).tasks("train")[0]
    answer = environment._entry(task.data["index"])["answer"]
    if answer is not None:  # some are scored by simulation and have no one answer
        right = await environment.score(task, said(f"<answer>{answer}</answer>"))
        assert right.reward == pytest.approx(1.0) and right.solved
    # What no task asks for: none of it is right, and none of it breaks a scorer.
    for reply in (
        "I don't know.",
        "",
        "1 × x",
        "{}",
        '["a"]',
        "null",
        "1e999",
        "nan",
        "-inf",
        "nan + nani",
        "1/0",
        "\n\n",
    ):
        wrong = await environment.score(task, said(reply))
        assert 0 <= wrong.reward < 0.9 and not wrong.solved, reply


def test_splits_are_disjoint() -> None:
    environment = ReasoningGym(
        "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, test_tasks=20
    )
    train = {environment.tasks("train")[index].messages[0]["content"] for index in range(400)}
    test = {task.messages[0]["content"] for task in environment.tasks("test")}
    assert test and not train & test


async def test_the_answer_is_the_last_one_marked_or_the_whole_reply() -> None:
    environment = ReasoningGym("chain_sum", suffix="Give the number alone.")
    task = environment.tasks("train")[0]
    assert task.messages[0]["content"].endswith("\nGive the number alone.")
    answer = environment._entry(task.data["index"])["answer"]
    replies = [f" {answer} ", f"<answer>0.1</answer> no, <answer>\n{answer}</answer>", f"it is {answer}1"]
    scores = [await environment.score(task, said(reply)) for reply in replies]
    assert [score.solved for score in scores] == [True, True, False]
    assert [score.metrics["answer_marked"] for score in scores] == [0.0, 1.0, 0.0]


async def test_a_scorer_that_raises_is_the_systems_failure() -> None:
    environment = ReasoningGym("chain_sum")
    task = Task("t", "reasoning_gym", (), data={"index": "not a number"})
    with pytest.raises(AttemptError) as caught:
        await environment.score(task, said("3"))
    assert caught.value.kind is FailureKind.SCORER


@pytest.mark.parametrize(
    "name",
    [
        *("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"),
        *("countdown", "puzzle24", "simple_integration"),
    ],
)
async def test_what_a_model_wrote_is_never_executed(name: str, tmp_path: Path) -> None:
    environment = ReasoningGym(name)
    task = environment.tasks("train")[0]
    trace = tmp_path / "executed"
    attacks = [
        f"open({str(trace)!r}, 'w').write('x')",
        f"[open({str(trace)!r}, 'w') for _ in [1]]",
        f"__import__('pathlib').Path({str(trace)!r}).touch()",
        f"(lambda: open({str(trace)!r}, 'w'))()",
        "exit()",
        "9**9**9**9",
        "(9**99)**99999",
        "factorial(10**8)",
        "1<<10**10",
        "x**10**10",
        "9**(99*99*99*99*99)",
        "(((9**98)*(9**98))**98)**98",
    ]
    for attack in attacks:
        scored = await environment.score(task, said(f"<answer>{attack}</answer>"))
        assert not scored.solved
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "answer", "reward"),
    [
        ("countdown", "{answer}", 1.0),
        ("spiral_matrix", "[{commas}]", 0.1),  # the package's score for a right answer written as a list
    ],
)
async def test_plain_literals_and_formulas_get_through(name: str, answer: str, reward: float) -> None:
    environment: Any = ReasoningGym(name)
    task = environment.tasks("train")[1]
    right = environment._entry(task.data["index"])["answer"]
    text = answer.format(answer=right, commas=right.replace(" ", ","))
    assert (await environment.score(task, said(text))).reward == pytest.approx(reward)
