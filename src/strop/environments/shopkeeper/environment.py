"""The shopkeeper: multi-turn questions that need tools, some of which fail, and demonstrations of how it is done."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

from strop.environments.drawn import DrawnTasks
from strop.environments.environment import Demonstration, Environment, Session, ToolOutcome
from strop.environments.numbers import last_number, write_number
from strop.environments.shopkeeper.questions import KINDS, draw_question, draw_table
from strop.environments.shopkeeper.tools import TOOLS, Workbench, draw_faults
from strop.errors import ConfigError
from strop.rollouts import Message, Rollout, Scored, Task

if TYPE_CHECKING:
    from strop.environments.shopkeeper.sandboxed import SandboxedTools
    from strop.sandboxes import SandboxPool

#: How a demonstration ends: the number last, since that is what is read.
_ANSWERS = ("{} {}", "It is {} {}.", "The answer is {} {}.", "That makes {} {}.")
#: For machines on which sandboxes do not work.
_MEND = "`strop doctor` says what would mend that"
#: In a demonstration, the share of answers in the wrong unit that are converted; the others are asked for again.
_CONVERTED = 0.3


class Shopkeeper(Environment):
    """Questions about a shop's goods: what a bill comes to, what a load weighs in kg, how much change there is.

    The facts are drawn for each task and only the tools know them, so a question takes 2 to 4 calls in which later
    ones need what earlier ones gave. At a set rate a call fails: it times out, is busy, answers something malformed,
    or answers in another unit than it should. Every fault can be recovered from by reading what came back. Faults
    belong to the task (they are drawn for the n-th call of each tool), so all members of a group meet the same ones.

    Solved is an attempt whose final message ends in the right number. Metrics: `tool_calls` (run), `malformed_calls`
    (not readable as a call), `rejected_calls` (unknown tool or senseless arguments), `errors_met`,
    `errors_recovered` (see `Workbench`; all of them if the answer is right), `turns` (replies of the model).

    Args:
        steps: which lengths of question, in calls when nothing fails: any of 2, 3, 4.
        fault_rate: share of tool calls that fail, 0 to 0.6.
        train_tasks, test_tasks: size of the splits.
        seed: another seed draws other tasks.
        demonstration_fault_rate: of the demonstrations' own calls, 0 to 0.6; None: as `fault_rate`. Recoveries have to
            be seen to be learnt, and a short warm-up sees few.
        tools: where the tools run: "process" is this one, "sandbox" a Python interpreter in a sandbox, "auto" a sandbox
            where the machine can make one, and a notice where it can't. What they answer is the same to the byte, and
            so are the weights that come of it.

    Raises:
        ConfigError: an option is out of its range.
    """

    name = "shopkeeper"

    def __init__(
        self,
        steps: Sequence[int] = (2, 3, 4),
        fault_rate: float = 0.25,
        train_tasks: int = 10_000,
        test_tasks: int = 500,
        seed: int = 0,
        demonstration_fault_rate: float | None = None,
        tools: Literal["process", "sandbox", "auto"] = "process",
    ) -> None:
        unknown = [count for count in steps if count not in KINDS]
        if unknown or not steps:
            wrong = f"there are no questions of {unknown[0]} steps" if unknown else "it is empty"
            raise ConfigError("environment.options.steps", wrong, "Known are 2, 3 and 4.")
        demonstrated = fault_rate if demonstration_fault_rate is None else demonstration_fault_rate
        for name, rate in (("fault_rate", fault_rate), ("demonstration_fault_rate", demonstrated)):
            if not 0 <= rate <= 0.6:
                raise ConfigError(f"environment.options.{name}", f"it is {rate}", "It must be within 0 and 0.6.")
        self.steps, self.fault_rate, self.demonstration_fault_rate = tuple(steps), fault_rate, demonstrated
        self.sizes, self.seed = {"train": train_tasks, "test": test_tasks}, seed
        self.sandboxed: SandboxedTools | None = None
        if tools != "process":
            from strop.environments.shopkeeper.sandboxed import SandboxedTools

            self.sandboxed = SandboxedTools()
            if (problem := self.sandboxed.problem()) is not None:
                if tools == "sandbox":
                    wrong = f'it is "sandbox", and sandboxes do not work here: {problem}'
                    raise ConfigError("environment.options.tools", wrong, f'{_MEND}, or set tools = "process".')
                self.sandboxed = None
                self.notices = (f"The shopkeeper's tools run in this process, not in sandboxes: {problem}. {_MEND}.",)

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        return self._tasks(split, self.fault_rate)

    def _tasks(self, split: str, fault_rate: float) -> Sequence[Task]:
        return DrawnTasks(partial(self._draw, fault_rate), split, self.sizes.get(split, 1), self.seed)

    def _draw(self, fault_rate: float, rng: random.Random) -> tuple[str, Task]:
        steps = rng.choice(self.steps)
        table = draw_table(rng)
        question = draw_question(table, steps, rng)
        answer = _answer(table, question.plan)
        task = Task(
            id="",
            environment=self.name,
            messages=({"role": "user", "content": question.text},),
            tools=TOOLS,
            data={
                "answer": answer,
                "unit": question.unit,
                "table": table,
                "plan": question.plan,
                "faults": draw_faults(fault_rate, rng),
            },
            labels={"steps": str(steps), "kind": question.kind},
        )
        return json.dumps(question.plan), task  # the same counts of the same things, however it is worded

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment.start`. Nothing depends on `seed`: members of a group meet the same tools."""
        pool = await self.sandboxed.open() if self.sandboxed is not None else None
        return ShopSession(self, task, seed, pool)

    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        """Conversations of a shopkeeper who reads every answer, tries again and converts where it is needed."""
        tasks = self._tasks("train", self.demonstration_fault_rate)
        return [demonstrate(tasks[rng.randrange(len(tasks))], rng) for _ in range(count)]


class ShopSession(Session):
    """One attempt: the task's tools, and the score of what was made of them."""

    def __init__(self, environment: Shopkeeper, task: Task, seed: int, pool: SandboxPool | None = None) -> None:
        super().__init__(environment, task, seed)
        self._sandboxed, self._pool = environment.sandboxed, pool
        self.workbench = Workbench(task.data["table"], task.data["faults"])

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        """See `Session.call`."""
        if self._sandboxed is None or self._pool is None:
            return self.workbench.call(name, arguments)
        answer = await self._sandboxed.answer(self._pool, self.workbench.table, name, arguments)
        return self.workbench.receive(name, answer)

    async def close(self) -> None:
        """See `Session.close`."""
        if self._sandboxed is not None and self._pool is not None:
            self._pool = None
            await self._sandboxed.close()

    async def score(self, rollout: Rollout) -> Scored:
        """1 if the final message ends in the right number, else 0. A message that was cut off is no final one."""
        last = rollout.transcript[-1] if rollout.transcript else {}
        final = last.get("role") == "assistant" and not last.get("tool_calls") and not rollout.truncated
        said = last_number(str(last.get("content") or "")) if final else None
        right = said is not None and abs(said - self.task.data["answer"]) < 1e-6
        malformed = sum(message.get("error") == "malformed call" for message in rollout.transcript)
        bench = self.workbench
        metrics = {
            "tool_calls": sum(bench.calls.values()),
            "malformed_calls": malformed,
            "rejected_calls": bench.rejected,
            "errors_met": bench.met,
            "errors_recovered": bench.met if right else bench.recovered,  # a right answer made up for all of them
            "turns": len(rollout.calls),
        }
        return Scored(float(right), {name: float(value) for name, value in metrics.items()}, solved=right)


def demonstrate(task: Task, rng: random.Random) -> Demonstration:
    """Work through a task's plan with its tools, faults and all."""
    bench = Workbench(task.data["table"], task.data["faults"])
    messages: list[Message] = list(task.messages)
    numbers: list[str] = []

    def call(name: str, arguments: Mapping[str, object]) -> ToolOutcome:
        """One call and its answer, as the conversation has them."""
        identity = f"call_{len(messages)}"
        function = {"name": name, "arguments": json.dumps(arguments)}
        part = {"id": identity, "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [part]})
        outcome = bench.call(name, arguments)
        messages.append({"role": "tool", "tool_call_id": identity, "name": name, "content": outcome.content})
        return outcome

    for step in task.data["plan"]:
        ((name, template),) = step.items()
        arguments = _fill(template, numbers)
        while (outcome := call(name, arguments)).error is not None:
            if outcome.error == "wrong unit" and rng.random() < _CONVERTED:
                shown, unit = outcome.content.split()
                right = {"cents": "dollars", "kg": "g", "m": "km"}[unit]
                name, arguments = "convert", {"value": _as_number(shown), "from": unit, "to": right}
        numbers.append(outcome.content.split()[0])
    messages.append({"role": "assistant", "content": rng.choice(_ANSWERS).format(numbers[-1], task.data["unit"])})
    return Demonstration(task, tuple(messages))


def _answer(table: Mapping[str, Mapping[str, float]], plan: Sequence[Mapping[str, Mapping[str, str]]]) -> float:
    """The number that the plan comes to when no tool fails."""
    bench, numbers = Workbench(table, {}), list[str]()
    for step in plan:
        ((name, template),) = step.items()
        numbers.append(bench.call(name, _fill(template, numbers)).content.split()[0])
    return float(numbers[-1])


def _fill(template: Mapping[str, str], numbers: Sequence[str]) -> dict[str, object]:
    """A step's arguments, with the numbers that earlier steps gave."""
    filled: dict[str, object] = {name: value.format(*numbers) for name, value in template.items()}
    if "value" in filled:
        filled["value"] = _as_number(str(filled["value"]))
    return filled


def _as_number(text: str) -> float | int:
    number = float(text)
    return int(number) if write_number(number).lstrip("-").isdigit() else number
