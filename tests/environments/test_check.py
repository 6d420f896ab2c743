"""`strop env check`: each mistake an author can make is found and said in a sentence; good environments pass."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from strop.environments import BUILT_IN, Demonstration, Environment, Session, ToolOutcome
from strop.environments.check import check_environment, show_check
from strop.errors import AttemptError
from strop.rollouts import FailureKind, Rollout, Scored, Task
from strop.sampling.rendering import renderer_for


class Good(Environment):
    """Without a fault; the broken ones below change one thing each."""

    name = "good"

    def task(self, split: str, number: int, **changes: Any) -> Task:
        parts: dict[str, Any] = {
            "id": f"{split}-{number}",
            "environment": self.name,
            "messages": ({"role": "user", "content": f"{split} question {number}"},),
            "data": {"answer": 12345 + number},
        }
        return Task(**{**parts, **changes})

    def tasks(self, split: str) -> Sequence[Task]:
        return [self.task(split, number) for number in range(5)]

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        return Scored(0.0, {"length": 3.0}, solved=False)


class Unscored(Good):
    score = Environment.score  # type: ignore[assignment]


class NoTasks(Good):
    tasks = Environment.tasks  # type: ignore[assignment]


class Empty(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return []


class NotTasks(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [{"question": "?"}]  # type: ignore[list-item]


class SameIds(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [self.task(split, number, id=f"{split} one") for number in range(3)]


class SharedIds(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [self.task(split, number, id=f"task {number}") for number in range(3)]


class SharedQuestions(Good):
    def tasks(self, split: str) -> Sequence[Task]:
        return [self.task("any", number, id=f"{split} {number}") for number in range(3)]


class Changing(Good):
    numbers = itertools.count()

    def tasks(self, split: str) -> Sequence[Task]:
        return [self.task(split, next(self.numbers))]


class Changed(Good):
    """One task, changed by the parts given."""

    parts: ClassVar[dict[str, Any]] = {}

    def tasks(self, split: str) -> Sequence[Task]:
        data = {"answer": 12345, **self.parts.get("data", {}), "split": split}
        return [self.task(split, 1, **{**self.parts, "data": data})]


class OtherEnvironment(Changed):
    parts: ClassVar[dict[str, Any]] = {"environment": "another"}


class NoMessages(Changed):
    parts: ClassVar[dict[str, Any]] = {"messages": ()}


class NoContent(Changed):
    parts: ClassVar[dict[str, Any]] = {"messages": ({"role": "user"},)}


class NoJson(Changed):
    parts: ClassVar[dict[str, Any]] = {"data": {"answer": {1, 2}}}


class NoTextKeys(Changed):
    parts: ClassVar[dict[str, Any]] = {"data": {"table": {1: "one"}}}


class NumberLabels(Changed):
    parts: ClassVar[dict[str, Any]] = {"labels": {"difficulty": 3}}


class BadTool(Changed):
    parts: ClassVar[dict[str, Any]] = {"tools": ({"name": "look"},)}


class Leaking(Changed):
    parts: ClassVar[dict[str, Any]] = {
        "messages": ({"role": "user", "content": "Say 54321"},),
        "data": {"answer": 54321},
    }


class Long(Changed):
    parts: ClassVar[dict[str, Any]] = {"messages": ({"role": "user", "content": "well " * 3000},)}


class Raising(Good):
    async def score(self, task: Task, rollout: Rollout) -> Scored:
        raise KeyError("answer")


class FailingStart(Good):
    async def start(self, task: Task, seed: int) -> Session:
        raise AttemptError(FailureKind.SANDBOX, "no sandbox here")


class NoSession(Good):
    async def start(self, task: Task, seed: int) -> Session:
        return None  # type: ignore[return-value]


class Wrongly(Good):
    given: Any = None

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        return self.given  # type: ignore[no-any-return]


class PlainNumber(Wrongly):
    given = 1.0


class NotFinite(Wrongly):
    given = Scored(float("nan"))


class BadMetric(Wrongly):
    given = Scored(0.0, {"length": "three"})  # type: ignore[dict-item]


class Generous(Wrongly):
    given = Scored(1.0, solved=True)


class Undecided(Wrongly):
    given = Scored(0.0)


class WithTools(Good):
    class Session(Session):
        async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
            return ToolOutcome(str(arguments["item"]))

    def tasks(self, split: str) -> Sequence[Task]:
        return [self.task(split, 1, tools=({"type": "function", "function": {"name": "look"}},))]

    async def start(self, task: Task, seed: int) -> Session:
        return self.Session(self, task, seed)


class ToolsSayText(WithTools):
    class Session(Session):
        async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
            return "fine"  # type: ignore[return-value]


class ToolsNeverErr(WithTools):
    class Session(Session):
        async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
            return ToolOutcome("fine")


class Silent(Good):
    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        task = self.tasks("train")[0]
        return [Demonstration(task, task.messages)]


class NotDemonstrations(Good):
    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        return [[{"role": "assistant", "content": "so"}]]  # type: ignore[list-item]


PROBLEMS = [
    (Unscored, "raises TypeError: Unscored must define score"),
    (NoTasks, "tasks('train') raises TypeError: NoTasks must define tasks"),
    (Empty, "tasks('train') is empty"),
    (NotTasks, "holds a dict where a strop.rollouts.Task is needed"),
    (SameIds, "Two tasks of 'train' have the id 'train one'"),
    (SharedIds, "The id 'task 0' is in both splits"),
    (SharedQuestions, "3 of the first 3 test tasks ask what a training task asks"),
    (Changing, "differs from one reading to the next"),
    (OtherEnvironment, "its environment is 'another'"),
    (NoMessages, "has no messages"),
    (NoContent, "a message is not of the form"),
    (NoJson, "its data can't be stored as JSON"),
    (NoTextKeys, "a key is not a string"),
    (NumberLabels, "labels must be strings"),
    (BadTool, "a tool is not of the form"),
    (Raising, "raises KeyError: 'answer'"),
    (FailingStart, "fails as a fault of the system (sandbox: no sandbox here)"),
    (NoSession, "gives a NoneType; it must give a Session"),
    (PlainNumber, "score gives a float; it must give a strop.rollouts.Scored"),
    (NotFinite, "score gives nan as reward"),
    (BadMetric, "score gives 'three' as length"),
    (WithTools, "session.call('look', {}) raises KeyError: 'item'"),
    (ToolsSayText, "gives a str; it must give a ToolOutcome"),
    (Silent, "no assistant message"),
    (NotDemonstrations, "demonstrations gives a list"),
]
ADVICE = [
    (Leaking, "its answer ('54321', in data) can be read in its messages"),
    (Long, "A prompt has 15"),
    (Generous, "“I don't know.” counts as solved"),
    (Undecided, "pass@k can't be computed"),
    (ToolsNeverErr, "comes back without an error"),
]


def spec(environment: type[Environment]) -> str:
    return f"{environment.__module__}:{environment.__qualname__}"


@pytest.mark.parametrize(("environment", "said"), PROBLEMS, ids=[case[0].__name__ for case in PROBLEMS])
def test_what_breaks_the_protocol_is_said(environment: type[Environment], said: str) -> None:
    check = check_environment(spec(environment))
    assert not check.good
    assert any(said in problem for problem in check.problems), check.problems
    assert said in show_check(check)


@pytest.mark.parametrize(("environment", "said"), ADVICE, ids=[case[0].__name__ for case in ADVICE])
def test_what_is_probably_not_meant_is_said(environment: type[Environment], said: str) -> None:
    check = check_environment(spec(environment))
    assert check.good, check.problems
    assert any(said in advice for advice in check.advice), check.advice


#: Environments of other ecosystems and those made of data of the user's: they have no tasks by themselves.
GIVEN = {"code", "gymnasium", "harbor", "nemo_gym", "pivots", "textarena", "worker"}


@pytest.mark.parametrize("name", sorted(BUILT_IN.keys() - GIVEN))
def test_the_built_in_environments_pass(name: str) -> None:
    needed = {"reasoning_gym": {"task": "chain_sum"}, "faults": {"environment": "shopkeeper"}}
    check = check_environment(name, needed.get(name, {}))
    assert check.good and not check.advice, show_check(check)
    assert check.sample is not None and str(check.sample.messages[-1]["content"]) in show_check(check)


def test_a_good_environment_passes_and_its_prompts_are_counted_in_tokens(chat_tokenizer: Any) -> None:
    renderer = renderer_for(chat_tokenizer, "some/folder")
    check = check_environment(spec(Good), renderer=renderer)
    assert check.good and not check.advice
    task = Good().tasks("train")[0]
    count = len(chat_tokenizer.apply_chat_template(list(task.messages), add_generation_prompt=True, return_dict=False))
    assert check.facts["prompt"] == f"{count} to {count} tokens"


def test_what_can_not_be_loaded_is_a_problem_not_a_crash() -> None:
    check = check_environment("nowhere:Mine")
    assert not check.good and "there is no 'nowhere'" in check.problems[0]
