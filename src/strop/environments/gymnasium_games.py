"""Environments of Gymnasium that can be played in text: observations that are text, or drawn as text ("ansi")."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from strop.environments.games import Game, Games
from strop.errors import ConfigError, EnvironmentProblem

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class GymnasiumText(Games):
    """One of Gymnasium's environments, or of a package that registers its own.

    The reward of an attempt is the sum over its steps. The model acts by words: one of `actions`, or any text where the
    action space is text.

    Args:
        id: as `gymnasium.make` takes it, "module:id" included.
        actions: names of the actions of a discrete space, in their order; default "0", "1", ….
        instructions: what the model is told before the first observation.
        options: of `gymnasium.make`; `render_mode` is "ansi" where there is one, unless given.
        solved_at: sum of rewards from which an attempt counts as solved.
        max_steps: of the environment's time limit, if not its own.
        train_tasks, test_tasks: size of the splits.
        seed: another seed draws other games.

    Raises:
        EnvironmentProblem: the package is not installed, or the environment can't be made.
        ConfigError: its actions are not discrete or text, or are not as many as `actions`.
    """

    def __init__(
        self,
        id: str,
        actions: Sequence[str] = (),
        instructions: str = "",
        options: dict[str, object] | None = None,
        solved_at: float = 1.0,
        max_steps: int | None = None,
        train_tasks: int = 1000,
        test_tasks: int = 100,
        seed: int = 0,
    ) -> None:
        try:
            import gymnasium
        except ImportError as error:
            raise EnvironmentProblem(f"{error}. Install it: pip install gymnasium") from error
        self._package: Any = gymnasium
        self._options: dict[str, Any] = {} if max_steps is None else {"max_episode_steps": max_steps}
        self._options |= options or {}
        self._id = id
        if "render_mode" not in self._options and self._draws_text():
            self._options["render_mode"] = "ansi"
        first = self._made()
        names = self._names_of(first.action_space, actions)
        first.close()
        super().__init__(instructions, names, solved_at, train_tasks, test_tasks, seed)
        self._names = names
        self.name = f"gymnasium/{id}"

    def _draws_text(self) -> bool:
        bare = self._made()
        modes = bare.metadata.get("render_modes", ())
        bare.close()
        return "ansi" in modes

    def _made(self) -> Any:
        try:
            return self._package.make(self._id, **self._options)
        except Exception as error:
            raise EnvironmentProblem(f"{self._id} can't be made: {type(error).__name__}: {error}") from error

    def _names_of(self, space: Any, actions: Sequence[str]) -> tuple[str, ...]:
        spaces = self._package.spaces
        if isinstance(space, spaces.Text):
            return ()
        if not isinstance(space, spaces.Discrete):
            raise ConfigError("environment.options.id", f"its actions are {space}", "Discrete or Text actions")
        names = tuple(actions) or tuple(str(number) for number in range(int(space.n)))
        if len(names) != space.n or len(set(names)) != len(names):
            wrong = f"there are {len(names)} names for {space.n} actions"
            raise ConfigError("environment.options.actions", wrong, "One name of its own for each")
        return names

    def make(self) -> Game:
        """See `Games.make`."""
        return _Played(self._made(), self._names)


class _Played(Game):
    """An episode."""

    def __init__(self, episode: Any, names: Sequence[str]) -> None:
        self._episode = episode
        self._numbers = {name: number for number, name in enumerate(names)}
        self._total = 0.0
        self._draws = episode.render_mode == "ansi"

    def begin(self, seed: int) -> str:
        observed, _ = self._episode.reset(seed=seed)
        return self._shown(observed)

    def act(self, action: str) -> tuple[str, bool]:
        if self._numbers and action not in self._numbers:
            raise ValueError(f"the actions are {', '.join(self._numbers)}")
        start = getattr(self._episode.action_space, "start", 0)
        done = self._episode.step(self._numbers[action] + start if self._numbers else action)
        observed, reward, terminated, truncated, _ = done
        self._total += float(reward)
        return self._shown(observed), bool(terminated or truncated)

    def _shown(self, observed: Any) -> str:
        if not self._draws or isinstance(observed, str):
            return str(observed)
        return _COLOURS.sub("", str(self._episode.render())).strip("\n")

    def reward(self) -> float:
        return self._total

    def close(self) -> None:
        self._episode.close()
