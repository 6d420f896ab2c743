"""Text games: played by a tool, each with random numbers of its own, the same again for the same task."""

from __future__ import annotations

import random

import pytest

from strop.environments import load_environment
from strop.errors import ConfigError
from strop.rollouts import Rollout

NOTHING = Rollout("r", "t", "e", 0, 1)


async def test_textarena_game_played_to_its_end() -> None:
    pytest.importorskip("textarena")
    environment = load_environment("textarena", {"game": "GuessTheNumber-v0", "train_tasks": 3})
    task = environment.tasks("train")[0]
    assert "Guess The Number" in task.messages[0]["content"]
    random.seed(7)
    expected = [random.random() for _ in range(2)]
    random.seed(7)
    found = [random.random()]
    low, high, transcript = 1, 20, []
    session = await environment.start(task, 1)
    while True:  # by halves: at most five guesses
        guess = (low + high) // 2
        shown = (await session.call("act", {"action": str(guess)})).content
        transcript.append(shown)
        if "over" in shown:
            break
        assert str(guess) not in shown.replace("[GAME]", "")  # one's own action is not shown again
        low, high = (guess + 1, high) if "higher" in shown else (low, guess - 1)
    found.append(random.random())
    assert found == expected  # the game's draws are not the process's
    scored = await session.score(NOTHING)
    assert scored.reward == 1.0 and scored.solved and scored.metrics["turns"] == len(transcript) <= 5
    assert (await session.call("act", {"action": "1"})).error == "game over"
    again = await environment.start(task, 2)
    assert (await again.call("act", {"action": "10"})).content == transcript[0]
    unfinished = await again.score(NOTHING)
    assert not unfinished.solved and unfinished.metrics["finished"] == 0.0
    with pytest.raises(ConfigError, match="GuessTheNumber-v0"):
        load_environment("textarena", {"game": "Guess"})


async def test_gymnasium_game_in_text() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    moves = ["left", "down", "right", "up"]
    options = {"id": "FrozenLake-v1", "actions": moves, "options": {"is_slippery": False}, "train_tasks": 2}
    environment = load_environment("gymnasium", options)
    task = environment.tasks("train")[0]
    assert task.messages[0]["content"].splitlines() == ["SFFF", "FHFH", "FFFH", "HFFG"]
    session = await environment.start(task, 1)
    assert (await session.call("act", {"action": "jump"})).error == "no such action"
    way = ["down", "down", "right", "right", "down", "right"]  # past the holes of the package's own map
    shown = [(await session.call("act", {"action": move})).content for move in way]
    assert "(Down)" in shown[0] and "\x1b" not in shown[0] and shown[-1].endswith("The game is over.")
    scored = await session.score(NOTHING)
    assert (scored.reward, scored.solved, scored.metrics["turns"]) == (1.0, True, 6.0)
    await session.close()
    reference = gymnasium.make("FrozenLake-v1", is_slippery=False)
    reference.reset(seed=0)
    assert [reference.step(moves.index(move))[1] for move in way] == [0, 0, 0, 0, 0, 1]
    with pytest.raises(ConfigError, match="3 names for 4"):
        load_environment("gymnasium", {**options, "actions": moves[:3]})
    with pytest.raises(ConfigError, match="Discrete or Text"):
        load_environment("gymnasium", {"id": "Pendulum-v1"})
