"""An environment of your own, in one file: a library's catalogue that is searched with a tool.

Check it with  strop env check examples/library.py:Library
and train on it with  --set environment.name=examples/library.py:Library --set environment.agent.kind=tool_loop

It shows the whole protocol: tasks in two disjoint splits, a tool with an error that the agent can act on, a score, and
demonstrations for a supervised warm-up. docs/how-to-environment.md goes through it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from strop.environments import Demonstration, Environment, Session, ToolOutcome
from strop.rollouts import Message, Rollout, Scored, Task

SUBJECTS = ("bees", "bridges", "clouds", "clocks", "maps", "rivers", "sails", "stones", "trains", "wheat")
KINDS = ("History", "Handbook", "Atlas", "Almanac", "Letters", "Lectures")
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "books of a year, a page at a time",
        "parameters": {
            "type": "object",
            "properties": {"year": {"type": "integer"}, "page": {"type": "integer"}},
            "required": ["year"],
        },
    },
}
PAGE_SIZE = 2


class Library(Environment):
    """How many pages has the book on a subject from a given year? The catalogue shows two books at a time."""

    name = "library"

    def __init__(self, books: int = 5, train_tasks: int = 2000, test_tasks: int = 200) -> None:
        self.books, self.sizes = books, {"train": train_tasks, "test": test_tasks}

    def tasks(self, split: str) -> Sequence[Task]:
        """Years before 1950 are trained on, later ones are held out: no question is in both splits."""
        years = range(1800, 1950) if split == "train" else range(1950, 2000)
        return [self._task(split, number, years) for number in range(self.sizes[split])]

    def _task(self, split: str, number: int, years: range) -> Task:
        rng = random.Random(f"library {split} {number}")  # a seed of its own: the same task in every process
        year = rng.choice(years)
        subjects = rng.sample(SUBJECTS, self.books)
        catalogue = [
            {"title": f"{rng.choice(KINDS)} of {subject}", "pages": rng.randint(80, 900)} for subject in subjects
        ]
        wanted = rng.randrange(self.books)
        question = f"How many pages has the book on {subjects[wanted]} from {year}?"
        return Task(
            id=f"{split}-{number}",
            environment=self.name,
            messages=({"role": "user", "content": question},),
            tools=(SEARCH,),
            data={"year": year, "catalogue": catalogue, "answer": catalogue[wanted]["pages"]},
            labels={"page": str(wanted // PAGE_SIZE + 1)},
        )

    async def start(self, task: Task, seed: int) -> Session:
        return LibrarySession(self, task, seed)

    def demonstrations(self, count: int, rng: random.Random) -> list[Demonstration]:
        tasks = self.tasks("train")
        return [demonstrate(rng.choice(tasks)) for _ in range(count)]


class LibrarySession(Session):
    """One attempt: it remembers how often the catalogue was searched."""

    def __init__(self, environment: Environment, task: Task, seed: int) -> None:
        super().__init__(environment, task, seed)
        self.searches = 0

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        if name != "search":
            return ToolOutcome("error: the only tool is search", error="unknown tool")
        self.searches += 1
        return search(self.task, arguments)

    async def score(self, rollout: Rollout) -> Scored:
        last = rollout.transcript[-1]
        words = str(last.get("content") or "").replace(".", " ").split()
        right = last["role"] == "assistant" and words.count(str(self.task.data["answer"])) == 1 and len(words) < 12
        return Scored(reward=float(right), metrics={"searches": float(self.searches)}, solved=right)


def search(task: Task, arguments: dict[str, object]) -> ToolOutcome:
    """A page of the catalogue. What the agent got wrong is said, so that it can do better."""
    if arguments.get("year") != task.data["year"]:
        return ToolOutcome(f"error: no books from {arguments.get('year')}", error="nothing found")
    page = arguments.get("page", 1)
    if not isinstance(page, int) or page < 1:
        return ToolOutcome("error: page is a number from 1", error="bad arguments")
    catalogue = task.data["catalogue"]
    found = catalogue[(page - 1) * PAGE_SIZE : page * PAGE_SIZE]
    more = f"; more on page {page + 1}" if len(catalogue) > page * PAGE_SIZE else ""
    return ToolOutcome("; ".join(f"{book['title']}, {book['pages']} pages" for book in found) + more)


def demonstrate(task: Task) -> Demonstration:
    """Turn the pages until the book is there."""
    messages: list[Message] = list(task.messages)
    for page in range(1, int(task.labels["page"]) + 1):
        arguments = {"year": task.data["year"]} if page == 1 else {"year": task.data["year"], "page": page}
        call = {
            "id": f"call_{page}",
            "type": "function",
            "function": {"name": "search", "arguments": json.dumps(arguments)},
        }
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{page}", "content": search(task, arguments).content})
    messages.append({"role": "assistant", "content": f"It has {task.data['answer']} pages."})
    return Demonstration(task, tuple(messages))
