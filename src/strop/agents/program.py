"""An outside program as the agent: any command that speaks an OpenAI- or Anthropic-style API. It gets a base URL and a
key in its environment and runs unmodified; the gateway records every token that is sampled for it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from strop.agents.places import HostPlace, Place, SandboxPlace
from strop.environments.environment import ProgramResult, Session
from strop.errors import AttemptError, ConfigError, ModelError
from strop.gateway import shared
from strop.gateway.attempts import Attempt
from strop.rollouts import FailureKind, Task
from strop.sampling.conversation import Conversation

_NOT_FOUND = (126, 127)  # how shells say that a command can't be run, or isn't there


@dataclass(frozen=True, slots=True)
class Program:
    """Runs a command for each attempt.

    In its environment the program finds `OPENAI_BASE_URL` and `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and
    `ANTHROPIC_API_KEY`, `STROP_MODEL`, and `STROP_TASK`: the path of a JSON file with the task's id, messages and
    tools. Nothing of this process's own environment reaches it. It starts in an empty folder.

    An attempt ends when the program does, or when its time is over; a program that ends with an error, or runs out
    of its budget, has failed the task and not the system, so it is scored as it is.

    Attributes:
        command: a line for /bin/sh. `{prompt}` stands for the text of the task's last message, quoted.
        where: "sandbox", the one that the environment's session gives; "host" runs it on this machine, unprotected,
            and has to be said.
        seconds: how long it may run; then it is stopped and scored.
        token_budget: most tokens that may be sampled for it; None for no limit.
        variables: further environment variables.
        files: paths, relative to its working directory, that go to the scorer if they are there.
        dropped_reasoning: "fork" or "keep", see `strop.gateway.Recording`.
        allow_constrained: whether the agent may ask for schemas, which change the distribution that is sampled from.
    """

    command: str
    where: Literal["sandbox", "host"] = "sandbox"
    seconds: float = 600.0
    token_budget: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    dropped_reasoning: Literal["fork", "keep"] = "fork"
    allow_constrained: bool = False

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise ConfigError("agent.command", "it is empty", "Give the command that starts the agent.")
        if not self.seconds > 0:
            raise ConfigError("agent.seconds", f"it is {self.seconds:g}", "It must be more than 0.")
        if self.token_budget is not None and self.token_budget < 1:
            raise ConfigError("agent.token_budget", f"it is {self.token_budget}", "It must be at least 1.")

    async def run(self, task: Task, session: Session, conversation: Conversation) -> None:
        """See `Agent.run`."""
        rollout = conversation.rollout
        tokenizer = tokenizer_of(conversation.renderer)
        async with shared(conversation.sampler, conversation.renderer, tokenizer) as (gateway, url):
            attempt = gateway.engine.attempts.open(
                rollout,
                conversation.renderer,
                name=f"{rollout.id}-{secrets.token_hex(4)}",
                params=conversation.params,
                token_budget=self.token_budget,
                deadline=conversation.deadline,
                dropped_reasoning=self.dropped_reasoning,
                allow_constrained=self.allow_constrained,
                clock=conversation.clock,
            )
            try:
                result = await self._act(task, session, attempt, url, gateway.model)
            finally:
                gateway.engine.attempts.close(attempt)
        if result.exit_code in _NOT_FOUND and not rollout.calls:
            said = (result.stderr or result.stdout).strip()[-300:]
            raise AttemptError(FailureKind.AGENT, f"the agent's program could not be run: {said}")
        ended = "was stopped" if result.exit_code is None else f"ended with exit code {result.exit_code}"
        rollout.transcript.append({"role": "note", "content": f"The program {ended} after {result.seconds:.1f} s."})
        await session.program_ended(result)

    async def _act(self, task: Task, session: Session, attempt: Attempt, url: str, model: str) -> ProgramResult:
        """Run the program to its end, or to that of its time, or of the system's patience."""
        async with self._place(session) as place:
            reachable = await place.reach(url)
            task_file = await place.put("task.json", json.dumps(_shown(task), ensure_ascii=False).encode())
            variables = {
                "OPENAI_BASE_URL": f"{reachable}/v1",
                "OPENAI_API_BASE": f"{reachable}/v1",
                "OPENAI_API_KEY": attempt.key,
                "ANTHROPIC_BASE_URL": reachable,
                "ANTHROPIC_API_KEY": attempt.key,
                "STROP_MODEL": model,
                "STROP_TASK": task_file,
                **self.variables,
            }
            command = self.command.replace("{prompt}", shlex.quote(_prompt(task)))
            started = time.monotonic()
            running = asyncio.create_task(place.run(command, variables, self.seconds))
            broken = asyncio.create_task(attempt.failed.wait())
            try:
                await asyncio.wait((running, broken), return_when=asyncio.FIRST_COMPLETED)
            finally:
                attempt.freeze()  # before its last children, or anything else, can say more
                broken.cancel()
                if not running.done():
                    running.cancel()
                    await asyncio.wait([running])
            if attempt.failure is not None:
                raise attempt.failure
            exit_code, stdout, stderr = running.result()
            files = {path: content for path in self.files if (content := await place.get(path)) is not None}
            return ProgramResult(exit_code, stdout, stderr, files, time.monotonic() - started)

    def _place(self, session: Session) -> Place:
        if self.where == "host":
            return HostPlace()
        if session.sandbox is None:
            raise ConfigError(
                "agent.where",
                f"{type(session).__name__} gives an attempt no sandbox",
                'Use an environment with sandboxes, or "host" if the program may do what it likes on this machine.',
            )
        return SandboxPlace(session.sandbox)


def _shown(task: Task) -> dict[str, object]:
    """What the agent may know of a task: its `data` is the scorer's."""
    return {"id": task.id, "messages": list(task.messages), "tools": list(task.tools)}


def _prompt(task: Task) -> str:
    return str(task.messages[-1].get("content") or "") if task.messages else ""


def tokenizer_of(renderer: object) -> object:
    """The tokenizer that a renderer was made with. Raises ModelError if it hides it."""
    tokenizer = getattr(renderer, "tokenizer", None) or getattr(renderer, "_tokenizer", None)
    if tokenizer is None:
        raise ModelError(f"{type(renderer).__name__} does not give its tokenizer, which the gateway needs.")
    return tokenizer
