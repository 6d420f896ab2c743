"""Tells an environment's author what is wrong with it, in plain sentences, and shows one of its tasks.

The environment is loaded, its tasks are read twice, one is started, its tools are called and an attempt that says
nothing is scored. No model is needed; with a renderer, prompt lengths are given in tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.environments.environment import Demonstration, Environment, Session, ToolOutcome
from strop.environments.registry import load_environment
from strop.errors import AttemptError, StropError
from strop.rollouts import Rollout, Scored, Task

if TYPE_CHECKING:
    from renderers.base import Renderer

#: Tasks of each split that are looked at one by one, and that ids and questions are compared over.
_LOOKED_AT, _COMPARED = 20, 500
#: A prompt longer than this many characters (about 2,000 tokens) fills a small model's context.
_LONG = 8000
_ROLES = ("system", "developer", "user", "assistant", "tool")
#: Seconds that one step of an attempt may take here.
_PATIENCE = 60.0
#: What a step gives that failed.
_BROKE = object()


@dataclass(slots=True)
class Check:
    """What was found.

    Attributes:
        spec: the environment that was checked.
        problems: what breaks the protocol: attempts would fail, or the scores would mean nothing.
        advice: what works, but is probably not meant.
        facts: what was seen, as name and value.
        sample: a task of the training split, if one could be made.
    """

    spec: str
    problems: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    sample: Task | None = None

    @property
    def good(self) -> bool:
        """Whether the environment can be used."""
        return not self.problems


def check_environment(
    spec: str, options: Mapping[str, object] | None = None, *, renderer: Renderer | None = None
) -> Check:
    """Walk through an environment as a run would.

    Args:
        spec, options: as for `load_environment`.
        renderer: of the model it is meant for; prompt lengths are then counted in its tokens.
    """
    check = Check(spec)
    try:
        environment = load_environment(spec, options)
        again = load_environment(spec, options)
    except StropError as error:
        check.problems.append(str(error))
        return check
    if not isinstance(environment.name, str) or environment.name == Environment.name:
        check.advice.append('The environment has no name of its own: set `name = "…"` in its class.')
    splits = {split: _read(check, environment, again, split) for split in ("train", "test")}
    if all(splits.values()):
        check.sample = splits["train"][0]
        _compare_splits(check, splits)
        for split, tasks in splits.items():
            for task in tasks[:_LOOKED_AT]:
                _look_at(check, environment, split, task)
        check.facts["prompt"] = _prompt_length(check, splits["train"][:_LOOKED_AT], renderer)
        asyncio.run(_attempt(check, environment, check.sample))
        _look_at_demonstrations(check, environment)
    return check


def _read(check: Check, environment: Environment, again: Environment, split: str) -> list[Task]:
    """The first tasks of a split, if they can be read; and whether a second reading gives the same."""
    try:
        tasks, twin = environment.tasks(split), again.tasks(split)
        count = len(tasks)
        first = [tasks[index] for index in range(min(count, _COMPARED))]
        second = [twin[index] for index in range(min(count, _LOOKED_AT))]
    except Exception as error:
        check.problems.append(f"tasks({split!r}) raises {_said(error)}. It should return a sequence of Task.")
        return []
    check.facts[f"{split} tasks"] = str(count)
    if not first:
        check.problems.append(
            f"tasks({split!r}) is empty. Every environment needs tasks to train on and to be tested on."
        )
        return []
    strangers = [task for task in first if not isinstance(task, Task)]
    if strangers:
        kind = type(strangers[0]).__name__
        check.problems.append(f"tasks({split!r}) holds a {kind} where a strop.rollouts.Task is needed.")
        return []
    ids = [task.id for task in first]
    if len(set(ids)) < len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        check.problems.append(f"Two tasks of {split!r} have the id {twice!r}. An id names one task, in every run.")
    if [_content(task) for task in first[:_LOOKED_AT]] != [_content(task) for task in second]:
        check.problems.append(
            f"tasks({split!r}) differs from one reading to the next. Draw from a seed of your own, "
            "random.Random(seed), and never from the time, the global random module or hash()."
        )
    return first


def _compare_splits(check: Check, splits: Mapping[str, list[Task]]) -> None:
    train, test = splits["train"], splits["test"]
    if same := {task.id for task in train} & {task.id for task in test}:
        check.problems.append(f"The id {min(same)!r} is in both splits. A test task must never be trained on.")
    asked = {_question(task) for task in train}
    shared = [task for task in test if _question(task) in asked]
    if shared:
        check.problems.append(
            f"{len(shared)} of the first {len(test)} test tasks ask what a training task asks, for example "
            f"{shared[0].id!r}. Held-out scores would measure memory: keep the splits disjoint."
        )


def _look_at(check: Check, environment: Environment, split: str, task: Task) -> None:
    """What can be wrong with one task. Each kind of problem is told once."""

    def tell(problem: str, into: list[str] = check.problems) -> None:
        if not any(known.split(": ", 1)[-1] == problem for known in into):
            into.append(f"Task {task.id!r} ({split}): {problem}")

    if task.environment != environment.name:
        tell(f"its environment is {task.environment!r}, but the environment's name is {environment.name!r}.")
    if not task.messages:
        tell("it has no messages, so the agent has nothing to read.")
    message: Any
    for message in task.messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES or "content" not in message:
            tell('a message is not of the form {"role": "user", "content": "…"}.')
    for name, value in (("messages", task.messages), ("data", dict(task.data)), ("tools", task.tools)):
        if trouble := _not_json(value):
            tell(f"its {name} can't be stored as JSON: {trouble}.")
    if any(not isinstance(value, str) for value in dict(task.labels).values()):
        tell("its labels must be strings.")
    for tool in task.tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            tell('a tool is not of the form {"type": "function", "function": {"name": …, "parameters": {…}}}.')
    if leaked := _leaked(task):
        tell(f"its answer ({leaked!r}, in data) can be read in its messages.", check.advice)


def _leaked(task: Task) -> str | None:
    """An answer of the data that the messages already hold. Short ones are anywhere by chance."""
    said = " ".join(str(message.get("content")) for message in task.messages if isinstance(message, dict))
    for name, value in dict(task.data).items():
        text = str(value)
        if ("answer" in name.lower() or "solution" in name.lower()) and len(text) >= 4 and text in said:
            return text
    return None


def _prompt_length(check: Check, tasks: Sequence[Task], renderer: Renderer | None) -> str:
    try:
        if renderer is not None:
            lengths = [
                len(
                    renderer.render_ids(list(task.messages), tools=list(task.tools) or None, add_generation_prompt=True)
                )
                for task in tasks
            ]
            long, unit = 2048, "tokens"
        else:
            lengths = [len(json.dumps([list(task.messages), list(task.tools)], ensure_ascii=False)) for task in tasks]
            long, unit = _LONG, "characters"
    except Exception as error:
        check.problems.append(f"The messages of a task can't be rendered: {_said(error)}.")
        return "unknown"
    if max(lengths) > long:
        check.advice.append(
            f"A prompt has {max(lengths)} {unit}. Shorter prompts leave more room and cost less at every reply."
        )
    return f"{min(lengths)} to {max(lengths)} {unit}"


async def _attempt(check: Check, environment: Environment, task: Task) -> None:
    """Start an attempt, call what can be called, and score an attempt that says nothing useful."""
    session = await _step(check, "start(task, seed)", lambda: environment.start(task, 0))
    if session is _BROKE:
        return
    if not isinstance(session, Session):
        check.problems.append(f"start(task, seed) gives a {type(session).__name__}; it must give a Session.")
        return
    for name in [_tool_name(tool) for tool in task.tools] + ["no_such_tool"]:
        outcome = await _step(check, f"session.call({name!r}, {{}})", lambda name=name: session.call(name, {}))  # type: ignore[misc]
        if outcome is not _BROKE and not isinstance(outcome, ToolOutcome):
            check.problems.append(
                f"session.call({name!r}, …) gives a {type(outcome).__name__}; it must give a ToolOutcome, also for "
                "wrong arguments: what the agent reads is how it learns to do better."
            )
        if name == "no_such_tool" and isinstance(outcome, ToolOutcome) and outcome.error is None:
            check.advice.append("A call of a tool that does not exist comes back without an error. Set `error`.")
    rollout = Rollout(id="check/0", task_id=task.id, environment=environment.name, member=0, seed=0)
    rollout.transcript = [*task.messages, {"role": "assistant", "content": "I don't know."}]
    scored = await _step(check, "score of an attempt that says “I don't know.”", lambda: session.score(rollout))
    if scored is not _BROKE:
        _look_at_score(check, scored)
    await _step(check, "session.close()", session.close)


async def _step(check: Check, what: str, make: Callable[[], Awaitable[Any]]) -> Any:
    """Await one step of an attempt; `_BROKE`, and a problem, if it fails."""
    try:
        async with asyncio.timeout(_PATIENCE):
            return await make()
    except TimeoutError:
        check.problems.append(f"{what} took more than {_PATIENCE:g} s.")
    except AttemptError as error:
        check.problems.append(f"{what} fails as a fault of the system ({error}). Every attempt would be thrown away.")
    except Exception as error:
        check.problems.append(f"{what} raises {_said(error)}.")
    return _BROKE


def _look_at_score(check: Check, scored: object) -> None:
    if not isinstance(scored, Scored):
        check.problems.append(f"score gives a {type(scored).__name__}; it must give a strop.rollouts.Scored.")
        return
    numbers = {"reward": scored.reward, **scored.metrics}
    for name, value in numbers.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or value != value
            or abs(value) == float("inf")
        ):
            check.problems.append(f"score gives {value!r} as {name}; it must be a finite number.")
    check.facts["reward of “I don't know.”"] = f"{scored.reward}"
    if scored.solved:
        check.advice.append("An attempt that only says “I don't know.” counts as solved.")
    elif scored.solved is None:
        check.advice.append("score does not say whether the task is solved, so pass@k can't be computed.")


def _look_at_demonstrations(check: Check, environment: Environment) -> None:
    try:
        shown: list[Any] = list(environment.demonstrations(3, random.Random(0)))
    except Exception as error:
        check.problems.append(f"demonstrations(3, rng) raises {_said(error)}. It may return an empty list.")
        return
    check.facts["demonstrations"] = "yes" if shown else "none"
    for demonstration in shown:
        if not isinstance(demonstration, Demonstration):
            check.problems.append(f"demonstrations gives a {type(demonstration).__name__}; it must give Demonstration.")
            return
        if not any(message.get("role") == "assistant" for message in demonstration.messages):
            check.problems.append("A demonstration has no assistant message, so nothing in it would be trained on.")
            return


def show_check(check: Check) -> str:
    """The findings as text for a terminal: problems, advice, facts, and one task as the agent sees it."""
    lines = [f"{check.spec}: {'can be used' if check.good else 'can not be used yet'}"]
    for title, entries in (("Wrong", check.problems), ("Worth a look", check.advice)):
        if entries:
            lines += ["", f"{title}:", *(f"  - {entry}" for entry in entries)]
    if check.facts:
        lines += ["", *(f"  {name}: {value}" for name, value in check.facts.items())]
    if check.sample is not None:
        task = check.sample
        lines += ["", f"A task ({task.id}):", *(f"  {_line(message)}" for message in task.messages)]
        if task.tools:
            lines.append(f"  tools: {', '.join(_tool_name(tool) for tool in task.tools)}")
        lines.append(f"  hidden from the agent: {_short(str(dict(task.data)))}")
    return "\n".join(lines)


def _line(message: Any) -> str:
    if not isinstance(message, dict):
        return repr(message)
    return f"{message.get('role')}: {_short(str(message.get('content')))}"


def _short(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "?")) if isinstance(function, dict) else "?"


def _content(task: Task) -> str:
    return repr((task.id, task.messages, task.tools, dict(task.data), dict(task.labels)))


def _question(task: Task) -> str:
    """What makes two tasks the same to a model that learnt one by heart."""
    return repr((task.messages, dict(task.data)))


def _not_json(value: object) -> str | None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return str(error)
    return None if _keys_are_text(value) else "a key is not a string"


def _keys_are_text(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) and _keys_are_text(part) for name, part in value.items())
    return all(_keys_are_text(part) for part in value) if isinstance(value, (list, tuple)) else True


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
