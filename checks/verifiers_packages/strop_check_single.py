"""One question, one reply, two reward functions: a package as its author would write it."""

import verifiers as vf
from datasets import Dataset


def load_environment(words: int = 20) -> vf.Environment:
    rows = [
        {"question": f"Write the word 'pear{number}' backwards.", "answer": f"{number}raep"} for number in range(words)
    ]

    def right(completion, answer, **kwargs) -> float:
        return float(answer in completion[-1]["content"])

    async def short(completion, **kwargs) -> float:
        return float(len(completion[-1]["content"]) < 80)

    rubric = vf.Rubric(funcs=[right, short], weights=[1.0, 0.2])
    data = Dataset.from_list(rows)
    return vf.SingleTurnEnv(
        dataset=data.select(range(words - 5)), eval_dataset=data.select(range(words - 5, words)), rubric=rubric
    )
