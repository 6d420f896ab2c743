"""A taskset for verifiers ≥ 0.4, as its author would write it: one prompt, a reward, and a reward that is broken."""

from collections.abc import Iterator

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str
    broken: bool = False


class AnswerTask(vf.Task[Data]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.broken:
            raise ValueError("no such file: answers.json")
        return float(self.data.answer in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class Config(vf.TasksetConfig):
    broken: bool = False


class Answers(vf.Taskset[AnswerTask, Config]):
    def load(self) -> Iterator[AnswerTask]:
        for number in range(10):
            data = Data(
                idx=number, prompt=f"What is 20 + {number}?", answer=str(20 + number), broken=self.config.broken
            )
            yield AnswerTask(data, self.config.task)


__all__ = ["Answers"]
