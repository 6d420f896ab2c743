"""Games that are played in text, one action a turn: the frame that textarena and Gymnasium share.

The model reads the opening, then acts by a tool; what it gets back is what the game shows. An attempt that ends before
the game does has the reward that the game had given until then.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from strop.environments.drawn import DrawnTasks
from strop.environments.environment import Environment, Session, ToolOutcome
from strop.rollouts import Rollout, Scored, Task, ToolSpec


class Game(ABC):
    """One game under way. Its methods may use the global random numbers: they are the game's own while one runs."""

    @abstractmethod
    def begin(self, seed: int) -> str:
        """Start it; what is shown first."""

    @abstractmethod
    def act(self, action: str) -> tuple[str, bool]:
        """Do something; what it shows, and whether it is over. Raises ValueError, for the player to read, if it can't
        be done at all."""

    @abstractmethod
    def reward(self) -> float:
        """What it has given so far."""

    def close(self) -> None:  # noqa: B027 -- most hold nothing
        """Free what it holds."""


@dataclass(slots=True)
class _OwnRandom:
    """A state of the global random numbers that comes and goes: many games share one process."""

    state: tuple[object, ...] = field(default_factory=lambda: random.Random(0).getstate())

    @contextmanager
    def __call__(self) -> Iterator[None]:
        before = random.getstate()
        random.setstate(self.state)
        try:
            yield
        finally:
            self.state = random.getstate()
            random.setstate(before)


class Games(Environment):
    """Tasks are games by their seeds.

    Args:
        instructions: what is said before the opening.
        actions: the only actions there are; empty if any text is one.
        solved_at: reward from which a game counts as solved.
        train_tasks, test_tasks: size of the splits.
        seed: another seed draws other games.
    """

    def __init__(
        self,
        instructions: str,
        actions: Sequence[str],
        solved_at: float,
        train_tasks: int,
        test_tasks: int,
        seed: int,
    ) -> None:
        self.instructions, self.solved_at = instructions, solved_at
        self.sizes, self.seed = {"train": train_tasks, "test": test_tasks}, seed
        self._tool = _act_tool(actions)

    def make(self) -> Game:
        """A new game."""
        raise TypeError(f"{type(self).__name__} must define make()")

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        return DrawnTasks(self._draw, split, self.sizes.get(split, 1), self.seed)

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        seed = rng.getrandbits(31)
        with _OwnRandom()():
            game = self.make()
            opening = game.begin(seed)
            game.close()
        text = f"{self.instructions}\n\n{opening}".strip()
        message = {"role": "user", "content": text}
        return str(seed), Task("", self.name, (message,), (self._tool,), data={"seed": seed})

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment.start`. Members of a group play the same game."""
        return GameSession(self, task, seed)


class GameSession(Session):
    """One game played."""

    environment: Games

    def __init__(self, environment: Games, task: Task, seed: int) -> None:
        super().__init__(environment, task, seed)
        self._random = _OwnRandom()
        self._over, self._turns = False, 0
        with self._random():
            self._game = environment.make()
            self._game.begin(int(task.data["seed"]))

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        """Play a turn."""
        if name != "act":
            return await super().call(name, arguments)
        action = arguments.get("action")
        if not isinstance(action, str | int):
            return ToolOutcome('error: give {"action": "…"}', error="wrong arguments")
        if self._over:
            return ToolOutcome("error: the game is over", error="game over")
        try:
            with self._random():
                shown, self._over = self._game.act(str(action))
        except ValueError as error:
            return ToolOutcome(f"error: {error}", error="no such action")
        self._turns += 1
        return ToolOutcome(f"{shown}\nThe game is over.".strip() if self._over else shown)

    async def score(self, rollout: Rollout) -> Scored:
        """What the game gave."""
        with self._random():
            reward = self._game.reward()
        metrics: Mapping[str, float] = {"turns": float(self._turns), "finished": float(self._over)}
        return Scored(reward, metrics, solved=self._over and reward >= self.environment.solved_at)

    async def close(self) -> None:
        """Free the game."""
        self._game.close()


def _act_tool(actions: Sequence[str]) -> ToolSpec:
    action = {"type": "string", **({"enum": list(actions)} if actions else {})}
    parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
    function = {"name": "act", "description": "Play your turn, and read what comes of it.", "parameters": parameters}
    return {"type": "function", "function": function}
