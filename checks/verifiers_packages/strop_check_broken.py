"""A reward function that raises: verifiers alone would make a reward of 0 of it."""

import verifiers as vf
from datasets import Dataset


def load_environment() -> vf.Environment:
    def broken(completion, **kwargs) -> float:
        raise ValueError("no such file: answers.json")

    return vf.SingleTurnEnv(
        dataset=Dataset.from_list([{"question": "Hi", "answer": ""}]), rubric=vf.Rubric(funcs=[broken])
    )
