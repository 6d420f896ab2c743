"""An attempt's time goes to the account of what it waits for: its tools, its scorer, the environment, or itself."""

from __future__ import annotations

from typing import Any

from strop.agents import ToolLoop
from strop.agents.attempts import AttemptRunner
from strop.costs import Ledger
from strop.environments.environment import Environment, Session, ToolOutcome
from strop.rollouts import Rollout, Scored, Task
from strop.runs.waits import Waits
from strop.sampling.rendering import renderer_for
from strop.sampling.sampler import SamplingParams

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>'
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}},
}
TASK = Task("t", "slow", ({"role": "user", "content": "Go"},), tools=(TOOL,))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Environment):
    """Everything takes its own number of seconds on a clock that is moved by hand."""

    name = "slow"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    async def start(self, task: Task, seed: int) -> Session:
        self.clock.now += 1
        return SlowSession(self, task, seed)


class SlowSession(Session):
    environment: Slow

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        self.environment.clock.now += 10
        return ToolOutcome("seen")

    async def score(self, rollout: Rollout) -> Scored:
        self.environment.clock.now += 100
        return Scored(1.0)


async def test_tools_scoring_and_environment_have_accounts_of_their_own(scripted_sampler: Any) -> None:
    clock = Clock()
    ledger = Ledger(clock, phase="rl")
    sampler = scripted_sampler([CALL, CALL, "done<|im_end|>"])
    made = AttemptRunner(
        environment=Slow(clock),
        agent=ToolLoop(),
        sampler=sampler,
        renderer=renderer_for(sampler.tokenizer, "some/folder"),
        params=SamplingParams(max_tokens=200),
        seconds=30.0,
        ledger=ledger,
        clock=clock,
        waits=Waits(),
    )
    rollout = await made.run("g", 0, TASK, 1)
    assert rollout.reward == 1.0
    assert {name: s for name, s in ledger.snapshot()["accounts"]["rl"].items() if s} == {
        "environment": 1.0,
        "tools": 20.0,
        "scoring": 100.0,
    }
