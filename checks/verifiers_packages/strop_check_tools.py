"""A tool loop of verifiers' own."""

import verifiers as vf
from datasets import Dataset


def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


def load_environment() -> vf.Environment:
    data = Dataset.from_list([{"question": f"What is 20 + {n}?", "answer": str(20 + n)} for n in range(10)])

    def right(completion, answer, **kwargs) -> float:
        return float(answer in str(completion[-1].get("content")))

    return vf.ToolEnv(dataset=data, tools=[add], rubric=vf.Rubric(funcs=[right]), max_turns=4)
