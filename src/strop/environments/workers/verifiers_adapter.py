"""Packages of verifiers < 0.4 (`load_environment`) in a worker: their harness acts through the gateway, unmodified.

Runs in the environment's own Python, beside `worker.py`; strop is not installed there. Their rubric turns an exception
in a reward function into 0.0: here it is noticed, and fails the attempt.
"""

import contextvars
import functools
import json
from collections.abc import Mapping
from typing import Any

import verifiers as vf
from openai import AsyncOpenAI
from strop_worker import Failure
from verifiers.clients import OpenAIChatCompletionsClient
from verifiers.rubrics.rubric import Rubric
from verifiers.utils.async_utils import maybe_await

#: What reward functions of this attempt raised, by their names; those of weight 0, which are metrics, apart.
_raised: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("raised")
_unmeasured: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("unmeasured")

#: Errors of the model's own making: the environment's score stands.
_OF_THE_MODEL = {"EmptyModelResponseError", "InvalidModelResponseError", "OverlongPromptError", "ToolParseError"}
#: Which part of the system an error is of; anything else is of the environment.
_KINDS = {"SandboxError": "sandbox", "BrowserSandboxError": "sandbox", "ModelError": "sampler", "ToolCallError": "tool"}
_LONG = 600.0  # seconds for one model call; the gateway ends it sooner


class VerifiersAdapter:
    """One environment of verifiers.

    Args:
        name: as `vf.load_environment` knows it.
        options: its arguments.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        _notice_exceptions()
        self.environment = vf.load_environment(name, **options)
        if self.environment.requires_group_rollouts:
            raise ValueError(f"{name} scores attempts against each other, which is not supported")
        # A rubric's rewards have no scale of their own; its functions give 1 at most, by custom.
        self.full = sum(weight for weight in self.environment.rubric._get_reward_weights() if weight > 0)
        train = None if self.environment.dataset_source is None else self.environment.get_dataset()
        self.environment.build_eval_dataset()
        self.rows = {"train": train, "test": self.environment.eval_dataset}
        self.sizes = {split: 0 if rows is None else len(rows) for split, rows in self.rows.items()}

    def task(self, split: str, index: int) -> dict[str, Any]:
        """A row as strop shows it."""
        row = self.rows[split][index]
        prompt = row["prompt"]
        messages = [_plain(message) for message in ([_said(prompt)] if isinstance(prompt, str) else prompt)]
        return {"id": f"{split}-{row.get('example_id', index)}", "messages": messages, "labels": _labels(row)}

    async def attempt(self, split: str, index: int, model: dict[str, Any], seed: int) -> dict[str, Any]:
        """Let the environment act on a row, and score it."""
        raised: dict[str, str] = {}
        unmeasured: dict[str, str] = {}
        _raised.set(raised)
        _unmeasured.set(unmeasured)
        async with AsyncOpenAI(base_url=f"{model['url']}/v1", api_key=model["key"], timeout=_LONG) as http:
            output = await self.environment.run_rollout(
                dict(self.rows[split][index]),
                OpenAIChatCompletionsClient(http),
                model["name"],
                {"temperature": model["temperature"], "max_tokens": model["max_tokens"]},
            )
        if raised:
            raise Failure("scorer", next(iter(raised.values())))
        if output.get("error"):
            _check_error(output["error"])
        found = {name: value for name, value in (output.get("metrics") or {}).items() if name not in unmeasured}
        metrics = {name: float(value) for name, value in found.items() if value is not None}
        reward = output["reward"]
        return {"reward": reward, "metrics": metrics, "solved": reward is not None and reward >= self.full - 1e-6}


def _notice_exceptions() -> None:
    """Keep what reward functions raise, which the rubric only logs."""
    call = Rubric._call_individual_reward_func
    if hasattr(call, "noticing"):
        return

    async def noticing(self: Rubric, func: Any, state: Any) -> float:
        counts = any(weight for other, weight in zip(self.funcs, self.weights, strict=False) if other is func)
        kept = _raised if counts else _unmeasured

        @functools.wraps(func)
        async def noticed(*arguments: Any, **options: Any) -> float:
            try:
                return float(await maybe_await(func, *arguments, **options))
            except Exception as error:
                name = getattr(func, "__name__", repr(func))
                kept.get()[name] = f"the reward function {name} raised {type(error).__name__}: {error}"[:500]
                raise

        return float(await call(self, noticed, state))

    noticing.noticing = True  # type: ignore[attr-defined]
    Rubric._call_individual_reward_func = noticing


def _check_error(error: Any) -> None:
    """Raise Failure if the error is not of the model's own making."""
    name = str(error.get("error") if isinstance(error, Mapping) else error)
    if name not in _OF_THE_MODEL:
        reason = json.dumps(error, default=str) if isinstance(error, Mapping) else str(error)
        raise Failure(_KINDS.get(name, "environment"), reason[:500])


def _said(prompt: str) -> dict[str, Any]:
    return {"role": "user", "content": prompt}


def _plain(message: Any) -> dict[str, Any]:
    kept = message if isinstance(message, Mapping) else message.model_dump(exclude_none=True)
    return {name: value for name, value in kept.items() if value is not None}


def _labels(row: Mapping[str, Any]) -> dict[str, str]:
    return {"task": row["task"]} if isinstance(row.get("task"), str) else {}
