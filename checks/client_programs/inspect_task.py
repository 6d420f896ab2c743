"""inspect_ai: a task with its basic agent and a tool, scored by its own scorer."""

import os

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: float, b: float) -> str:
        """Add two numbers.

        Args:
            a: the one.
            b: the other.
        """
        return str(a + b)

    return execute


task = Task(
    dataset=[Sample(input="What is 20 + 22?", target="42"), Sample(input="What is 1 + 2?", target="3")],
    solver=[use_tools(add()), generate()],
    scorer=includes(),
    message_limit=8,
)
for provider in ("openai", "anthropic"):
    (log,) = eval(task, model=f"{provider}/{os.environ['STROP_MODEL']}", max_tokens=64, display="none", log_dir="logs")
    assert log.status == "success", log.error
    print(provider, log.results.scores[0].metrics["accuracy"].value)
