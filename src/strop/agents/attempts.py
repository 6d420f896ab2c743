"""One attempt, from opening the environment to its ending: the one place where a failure of the system is told apart
from a failure of the agent. Deadlines and the taxonomy live here; retries and groups in the collector.
"""

from __future__ import annotations

import asyncio
import math
import numbers
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from strop.agents.agent import Agent
from strop.costs import Ledger
from strop.environments.environment import Environment, Session, ToolOutcome
from strop.errors import AttemptError, BudgetError, StropError
from strop.rollouts import Failed, FailureKind, Rollout, Scored, Task, derive_seed
from strop.runs.waits import Waits
from strop.sampling.conversation import Conversation
from strop.sampling.sampler import Sampler, SamplingParams

if TYPE_CHECKING:
    from renderers.base import Renderer

#: Seconds that closing a session may take. The attempt has its ending by then; what doesn't close is left behind.
CLOSE_SECONDS = 30.0


class Runner(Protocol):
    """Makes attempts at tasks; each comes back with an ending."""

    async def run(
        self,
        group_id: str,
        member: int,
        task: Task,
        seed: int,
        tries: int = 1,
        begun: Callable[[Rollout], None] = lambda rollout: None,
    ) -> Rollout:
        """See `AttemptRunner.run`."""
        ...


@dataclass(frozen=True, slots=True)
class AttemptRunner:
    """Makes attempts with one agent at tasks of one environment.

    Attributes:
        environment, agent, sampler, renderer: what an attempt needs.
        params: how its tokens are sampled; the seed is set for each call.
        seconds: deadline of ours for a whole attempt.
        ledger: told what each part of it waits for.
        clock: seconds since the run began.
        waits: the run's list, in which every attempt stands while it is under way.
    """

    environment: Environment
    agent: Agent
    sampler: Sampler
    renderer: Renderer
    params: SamplingParams
    seconds: float
    ledger: Ledger
    clock: Callable[[], float]
    waits: Waits = field(default_factory=Waits)

    async def run(
        self,
        group_id: str,
        member: int,
        task: Task,
        seed: int,
        tries: int = 1,
        begun: Callable[[Rollout], None] = lambda rollout: None,
    ) -> Rollout:
        """Make one attempt; it always comes back, with an ending.

        Args:
            group_id: its rollout id is this and the member's number.
            member: number within the group.
            task: what to attempt.
            seed: of the run; the attempt's own derives from it and the rollout id, and is the same at every try.
            tries: which try this is, counted from 1.
            begun: given the rollout before anything happens, for who wants to know how far it came if it is cancelled.

        Raises:
            asyncio.CancelledError: it was cancelled; it has no ending then.
            StropError: what no retry would mend: a prompt longer than the context, a budget that is spent.
        """
        rollout = Rollout(f"{group_id}/{member}", task.id, task.environment, member, 0, tries=tries)
        rollout.seed = derive_seed(seed, rollout.id)
        rollout.started = self.clock()
        begun(rollout)
        listed = self.waits.during(f"attempt {rollout.id}", self.seconds, lambda: _progress(rollout), watched=False)
        try:
            with listed:
                async with asyncio.timeout(self.seconds) as timeout:
                    rollout.ending = await self._act_and_score(task, rollout)
        except AttemptError as error:
            rollout.ending = Failed(error.kind, error.reason)
        except asyncio.CancelledError:
            if _asked_to_end():
                raise
            rollout.ending = Failed(FailureKind.ENVIRONMENT, "it cancelled itself, though nobody asked it to end")
        except TimeoutError as error:
            if timeout.expired():
                rollout.ending = Failed(FailureKind.TIMEOUT, f"the attempt took longer than {self.seconds:g} s")
            else:
                rollout.ending = Failed(FailureKind.ENVIRONMENT, _sentence(error))
        except StropError:
            raise
        except (Exception, SystemExit) as error:
            rollout.ending = Failed(FailureKind.ENVIRONMENT, _sentence(error))
        rollout.ended = self.clock()
        _account(rollout)
        return rollout

    async def _act_and_score(self, task: Task, rollout: Rollout) -> Scored:
        with self.ledger.activity("environment"):
            session = await self.environment.start(task, rollout.seed)
        try:
            _account_tools(session, self.ledger)
            conversation = Conversation(
                self.sampler,
                self.renderer,
                rollout,
                self.params,
                tools=task.tools,
                deadline=time.monotonic() + self.seconds,
                clock=self.clock,
            )
            with self.ledger.activity("attempts"):
                await self.agent.run(task, session, conversation)
            scoring = self.clock()
            with self.ledger.activity("scoring"):
                try:
                    scored = await session.score(rollout)
                except (AttemptError, BudgetError):
                    raise
                except (Exception, SystemExit) as error:
                    raise AttemptError(FailureKind.SCORER, _sentence(error)) from error
            rollout.seconds["scoring"] = self.clock() - scoring
            return _checked(scored)
        finally:
            await _close(session)


def _account_tools(session: Session, ledger: Ledger) -> None:
    """Let the ledger know while a tool of the session runs, whatever agent calls it."""
    call, tools = session.call, ledger.activity("tools")

    async def accounted(name: str, arguments: dict[str, object]) -> ToolOutcome:
        with tools:
            return await call(name, arguments)

    session.call = accounted  # type: ignore[method-assign]  # of this session only


async def _close(session: Session) -> None:
    """Free what the attempt held. Its ending stands by now, so whatever goes wrong here can't change it."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await session.close()
    except asyncio.CancelledError:
        if _asked_to_end():
            raise
    except (Exception, SystemExit):  # the environment's own log has the rest
        return


def _asked_to_end() -> bool:
    """Whether somebody cancelled the present task (and no code of its own raised `CancelledError`)."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _progress(rollout: Rollout) -> str:
    return f"{len(rollout.calls)} replies, {rollout.sampled_tokens} tokens so far"


def _checked(scored: object) -> Scored:
    """What a scorer gave, if it is a score: plain finite numbers, as they are stored."""
    if not isinstance(scored, Scored):
        raise AttemptError(FailureKind.SCORER, f"the scorer gave {scored!r} instead of a Scored")
    reward = _finite("reward", scored.reward)
    return replace(
        scored, reward=reward, metrics={name: _finite(name, value) for name, value in scored.metrics.items()}
    )


def _finite(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise AttemptError(FailureKind.SCORER, f"the scorer gave {value!r} as {name}, which is no finite number")
    return float(value)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _account(rollout: Rollout) -> None:
    """What the model, the tools and the scorer did not take is the environment's and the agent's own time."""
    known = sum(rollout.seconds.get(part, 0.0) for part in ("sampler", "tools", "scoring"))
    rollout.seconds["environment"] = max(0.0, rollout.ended - rollout.started - known)
