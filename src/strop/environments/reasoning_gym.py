"""Every task of the reasoning-gym package, by name and difficulty, as single replies.

Questions are drawn and scored by the package. Some of its scorers evaluate the answer as Python; what a model wrote is
never executed here, so to those only plain literals or formulas get through. Others are wrong in ways that a model
would learn to use, which is made good here.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from strop.environments.drawn import DrawnTasks
from strop.environments.environment import Environment
from strop.errors import AttemptError, ConfigError, EnvironmentProblem
from strop.rollouts import FailureKind, Rollout, Scored, Task, final_text

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
#: Entries that may be drawn where the package makes each when it is asked for.
_POOL = 2**31
_SOLVED = 0.99  # scores are 0 to 1; a wrong answer may get up to some tenths for its form

#: Scorers that pass the answer to `eval` (reasoning-gym 0.1.25), and those that pass it to sympy's parser, which does.
_EVALUATED = {"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"}
_PARSED = {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
#: Scorers that raise on an answer they can't read, instead of calling it wrong; and those that take any text for true.
_RAISING, _TRUTHY = {"boxnet", "coin_flip", "game_of_life", "prime_factorization"}, {"game_of_life_halting"}
#: "nan" and "inf" among figures: no right answer holds them, and some scorers take them for one.
_NO_NUMBER = re.compile(
    r"[\s\d.,+\-*ij()]*(nan|inf(inity)?)[\s\d.,+\-*ij()]*(nan|inf(inity)?)?[\s\d.,+\-*ij()]*", re.IGNORECASE
)
_FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)
_FORMULA = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Call, ast.Load, *_OPERATORS)


class ReasoningGym(Environment):
    """One of reasoning-gym's tasks.

    The answer is what stands in the last `<answer>…</answer>`, else the whole reply. The reward is the package's
    score, 0 to 1; solved is a full one. Each question is drawn from a seed of its own, and one that the other split
    has is drawn again.

    Args:
        task: its name, for example "chain_sum".
        difficulty: options of its configuration, for example {"min_terms": 2, "max_terms": 2}.
        suffix: added to each question.
        train_tasks, test_tasks: size of the splits.
        seed: another seed draws other tasks.

    Raises:
        ConfigError: there is no such task or option, or an option is out of its range.
        EnvironmentProblem: the package is not installed.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        task: str,
        difficulty: Mapping[str, Any] | None = None,
        suffix: str = "",
        train_tasks: int = 10_000,
        test_tasks: int = 500,
        seed: int = 0,
    ) -> None:
        self.task, self.difficulty, self.suffix = task, dict(difficulty or {}), suffix
        self.sizes, self.seed = {"train": train_tasks, "test": test_tasks}, seed
        self._dataset, self._pool = self._make_dataset()
        self._entry: Callable[[int], dict[str, Any]] = lru_cache(maxsize=512)(self._dataset.__getitem__)

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        return DrawnTasks(self._draw, split, self.sizes.get(split, 1), self.seed)

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        index = rng.randrange(self._pool)
        question = str(self._entry(index)["question"])
        task = Task(
            id="",
            environment=self.name,
            messages=({"role": "user", "content": question + (f"\n{self.suffix}" if self.suffix else "")},),
            data={"index": index},  # the entry is drawn again for its scorer: it may hold more than JSON does
            labels={"task": self.task},
        )
        return question, task

    def _make_dataset(self) -> tuple[Any, int]:
        """The package's data set, and how many entries may be drawn from it."""
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise EnvironmentProblem(
                'The environment "reasoning_gym" needs a package that is missing: pip install "strop[reasoning-gym]".'
            ) from error
        if self.task not in DATASETS:
            raise ConfigError(
                "environment.options.task", f"reasoning-gym has no {self.task!r}", f"It has: {', '.join(DATASETS)}."
            )
        options = {**self.difficulty, "seed": self.seed}
        try:
            dataset = reasoning_gym.create_dataset(self.task, **options, size=1)
            try:
                dataset[_POOL - 1]
                return dataset, _POOL  # most draw entry n from a seed of its own, whatever their size
            except IndexError:
                pool = 2 * sum(self.sizes.values())
                return reasoning_gym.create_dataset(self.task, **options, size=pool), pool
        except Exception as error:  # wrong names are TypeErrors, wrong values AssertionErrors of the package
            key = "environment.options.difficulty"
            wrong = f"{self.task} refuses {self.difficulty} ({type(error).__name__}: {error})"
            raise ConfigError(key, wrong, f"It takes: {', '.join(_option_names(DATASETS[self.task][1]))}.") from error

    async def score(self, task: Task, rollout: Rollout) -> Scored:
        """What the package's scorer gives the answer."""
        said = final_text(rollout.transcript)
        marked = _ANSWER.findall(said)
        answer = (marked[-1] if marked else said).strip()
        try:
            reward = self._score(answer, self._entry(int(task.data["index"])))
        except Exception as error:
            raise AttemptError(FailureKind.SCORER, f"{self.task}: {type(error).__name__}: {error}") from error
        return Scored(reward, {"answer_marked": float(bool(marked))}, solved=reward >= _SOLVED)

    def _score(self, answer: str, entry: dict[str, Any]) -> float:
        if self.task in _TRUTHY:
            return float(answer.lower() == str(entry["answer"]).lower())
        if not _is_safe(self.task, answer):
            return float(self._dataset.score_answer(None, entry))
        try:
            return float(self._dataset.score_answer(answer, entry))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            if self.task in _RAISING:
                return float(self._dataset.score_answer(None, entry))
            raise


def _option_names(configuration: type) -> list[str]:
    return [field.name for field in dataclasses.fields(configuration) if field.name not in ("seed", "size")]


def _is_safe(task: str, answer: str) -> bool:
    """Whether the task's scorer may see `answer`: it neither executes it nor is misled by it."""
    if _NO_NUMBER.fullmatch(answer):
        return False
    if not answer or task not in _EVALUATED | _PARSED:
        return True
    return _is_formula(answer) if task in _PARSED else _is_literal(answer)


def _is_literal(text: str) -> bool:
    """Whether `text` is a literal, or words and numbers alone, without anything that could call or look up."""
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return re.fullmatch(r"[\w\s-]*", text) is not None
    return True


def _is_formula(text: str) -> bool:
    """Whether `text` is a formula in one-letter variables that takes no time to evaluate."""
    if len(text) > 1000:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    for node in ast.walk(tree):
        if not isinstance(node, _FORMULA):
            return False
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and not node.keywords):
            return False
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS and not re.fullmatch(r"[A-Za-z]|pi", node.id):
            return False
        if isinstance(node, ast.Constant) and not _is_below(node, 1e12):
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and not _is_small_power(node):
            return False
    return True


def _is_small_power(node: ast.BinOp) -> bool:
    """Whether neither side of a power has a power or more than two numbers in it, the exponent's all below 100."""
    for side in (node.left, node.right):
        parts = list(ast.walk(side))
        numbers = [part for part in parts if isinstance(part, ast.Constant)]
        if len(numbers) > 2 or any(isinstance(part, ast.Pow) for part in parts):
            return False
        if side is node.right and not all(_is_below(number, 100) for number in numbers):
            return False
    return True


def _is_below(node: ast.Constant, limit: float) -> bool:
    return isinstance(node.value, int | float) and not isinstance(node.value, bool) and node.value < limit
