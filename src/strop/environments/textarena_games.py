"""Single-player games of the package textarena, by name, for example "GuessTheNumber-v0"."""

from __future__ import annotations

from typing import Any

from strop.environments.games import Game, Games
from strop.errors import ConfigError, EnvironmentProblem

_PLAYER = 0


class TextArena(Games):
    """One of textarena's single-player games.

    Args:
        game: its name in textarena's registry, without the suffix of a wrapped variant.
        options: of the game's class, for example {"max_number": 50}.
        train_tasks, test_tasks: size of the splits.
        seed: another seed draws other games.

    Raises:
        EnvironmentProblem: the package is not installed, or the game can't be made.
        ConfigError: there is no such game, or it is for several players.
    """

    def __init__(
        self,
        game: str,
        options: dict[str, object] | None = None,
        train_tasks: int = 1000,
        test_tasks: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__("", (), 1.0, train_tasks, test_tasks, seed)
        try:
            import textarena
        except ImportError as error:
            raise EnvironmentProblem(f"{error}. Install it: pip install textarena") from error
        self.name, self._options = f"textarena/{game}", dict(options or {})
        self._package: Any = textarena
        self._raw = f"{game}-raw"
        known = textarena.envs.registration.ENV_REGISTRY
        if self._raw not in known:
            names = sorted(name.removesuffix("-raw") for name in known if name.endswith("-raw"))
            near = ", ".join(name for name in names if name.lower().startswith(game[:3].lower())) or ", ".join(
                names[:20]
            )
            raise ConfigError("environment.options.game", f"textarena has no game {game!r}", f"For example {near}")
        try:
            self.make().begin(0)
        except Exception as error:
            wrong = f"a game of {game!r} can't be begun by one player: {type(error).__name__}: {error}"
            raise ConfigError(
                "environment.options.game", wrong, "A single-player game, and options that it has"
            ) from error

    def make(self) -> Game:
        """See `Games.make`."""
        made = self._package.make(self._raw, **self._options)
        return _Played(self._package.wrappers.ActionFormattingWrapper(made))


class _Played(Game):
    """The raw game: what is shown is what is new, since the conversation has all that was shown before."""

    def __init__(self, game: Any) -> None:
        self._game = game
        self._over = False
        self._rewards: dict[int, float] = {}

    def begin(self, seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._shown()

    def act(self, action: str) -> tuple[str, bool]:
        self._over, _ = self._game.step(action=action)
        shown = self._shown()
        if self._over:
            rewards, _ = self._game.close()
            self._rewards = dict(rewards or {})
        return shown, self._over

    def _shown(self) -> str:
        _, seen = self._game.get_observation()
        return "\n".join(str(message) for sender, message, *_ in seen if sender != _PLAYER)

    def reward(self) -> float:
        return float(self._rewards.get(_PLAYER, 0.0))
