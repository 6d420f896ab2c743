"""An environment of NeMo Gym: rows of its data sets, tools and verifier of a resources server that runs somewhere.

The loop of tools acts (`strop.agents.ToolLoop`, or a single reply where there are none); the server never sees the
model. A sample that the server masks is a failure of the system, and never a reward.
"""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from strop.environments.environment import Environment, Session, ToolOutcome
from strop.environments.nemo_gym.items import items_of, written_tools
from strop.environments.nemo_gym.rows import agent_of, read_tasks
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, Rollout, Scored, Task

#: First word of NeMo Gym's kinds of failure, and whose failure that is here.
_KINDS = {
    "judge": FailureKind.SCORER,
    "verifier": FailureKind.SCORER,
    "provider": FailureKind.SANDBOX,
    "agent": FailureKind.AGENT,
    "cancelled": FailureKind.CANCELLED,
}


class NemoGym(Environment):
    """Rows, and the resources servers that judge them.

    Args:
        train, test: files of rows; a split without one has no tasks.
        url: of the resources server, for example "http://127.0.0.1:8001".
        servers: instead of `url`, if rows name agents (`agent_ref`): the resources server of each.
        solved_at: reward from which a task counts as solved.
        seconds: how long the server may take for one answer.
        name: of this environment in records.
    """

    name = "nemo_gym"

    def __init__(
        self,
        train: str | None = None,
        test: str | None = None,
        url: str | None = None,
        servers: dict[str, str] | None = None,
        solved_at: float = 1.0,
        seconds: float = 300.0,
        name: str = "nemo_gym",
    ) -> None:
        if (url is None) == (servers is None):
            raise ConfigError(
                "environment.options.url",
                "it and `servers` say the same thing",
                "Give one of the two, not both or none",
            )
        if train is None and test is None:
            raise ConfigError("environment.options.train", "no file of rows was named", "Name train, test, or both")
        if not seconds > 0:
            raise ConfigError("environment.options.seconds", f"it is {seconds}", "Seconds, more than 0")
        self.name, self.solved_at, self.seconds = name, solved_at, seconds
        self._url, self._servers = url, dict(servers or {})
        self._splits = {
            split: [] if path is None else read_tasks(Path(path), name, split)
            for split, path in (("train", train), ("test", test))
        }
        for task in (task for tasks in self._splits.values() for task in tasks):
            self.server_of(task)
        self._connections: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncHTTPTransport] = (
            weakref.WeakKeyDictionary()
        )

    def tasks(self, split: str) -> Sequence[Task]:
        """See `Environment.tasks`."""
        if split not in self._splits:
            raise ConfigError("split", f"there is no split {split!r}", 'One of "train" and "test"')
        return self._splits[split]

    def server_of(self, task: Task) -> str:
        """URL of the resources server that judges a task. Raises ConfigError if nobody named it."""
        if self._url is not None:
            return self._url.rstrip("/")
        agent = agent_of(task.data["row"])
        if agent is None or agent not in self._servers:
            raise ConfigError(
                "environment.options.servers",
                f"the row {task.id!r} names the agent {agent!r}",
                f"Name the resources server of each agent; there are {', '.join(self._servers) or 'none'}",
            )
        return self._servers[agent].rstrip("/")

    def connections(self) -> httpx.AsyncHTTPTransport:
        """Connections of this event loop, which all attempts share."""
        loop = asyncio.get_running_loop()
        if loop not in self._connections:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
            self._connections[loop] = httpx.AsyncHTTPTransport(limits=limits)
        return self._connections[loop]

    async def start(self, task: Task, seed: int) -> Session:
        """See `Environment.start`."""
        session = NemoGymSession(self, task, seed)
        await session.open()
        return session


class NemoGymSession(Session):
    """One attempt's session on a resources server, which a cookie names."""

    environment: NemoGym

    def __init__(self, environment: NemoGym, task: Task, seed: int) -> None:
        super().__init__(environment, task, seed)
        # Cookies are of this attempt alone; the connections below are not, so the client is never closed.
        self._http = httpx.AsyncClient(
            transport=environment.connections(),
            base_url=environment.server_of(task),
            timeout=environment.seconds,
            trust_env=False,
        )
        self._row: dict[str, Any] = {**task.data["row"], "_ng_task_index": task.data["index"]}
        self._tools = {tool["function"]["name"] for tool in task.tools}

    async def open(self) -> None:
        """Seed the session. Raises AttemptError if the server does not."""
        answer = await self._post("seed_session", self._row, FailureKind.ENVIRONMENT)
        if answer.is_error:
            raise AttemptError(FailureKind.ENVIRONMENT, _refused("seed_session", answer))

    async def call(self, name: str, arguments: dict[str, object]) -> ToolOutcome:
        """See `Session.call`. Error statuses of a tool are for the model to read, as NeMo Gym's own agent does it."""
        if name not in self._tools:  # a model that names "verify" must not reach it
            return await super().call(name, arguments)
        answer = await self._post(name, arguments, FailureKind.TOOL)
        return ToolOutcome(answer.text, f"http {answer.status_code}" if answer.is_error else None)

    async def score(self, rollout: Rollout) -> Scored:
        """See `Session.score`."""
        body = {**self._row, "_ng_rollout_index": rollout.member, "response": self._response(rollout)}
        answer = await self._post("verify", body, FailureKind.SCORER)
        if answer.is_error:
            raise AttemptError(FailureKind.SCORER, _refused("verify", answer))
        try:
            verified = answer.json()
        except ValueError:
            verified = None
        if not isinstance(verified, dict):
            raise AttemptError(FailureKind.SCORER, f"/verify answered no object: {answer.text[:200]!r}")
        return read_verdict(verified, self._row, self.environment.solved_at)

    def _response(self, rollout: Rollout) -> dict[str, Any]:
        """The episode as one response, all its items in it."""
        asked = self._row["responses_create_params"]
        said = rollout.transcript[len(self.task.messages) :]
        cut = rollout.truncated
        prompts = sum(len(call.prompt) for call in rollout.calls)
        return {
            "id": f"resp_{rollout.id}",
            "object": "response",
            "created_at": int(time.time()),
            "model": "policy",
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata") or {},
            "output": items_of(said, rollout.id.replace("/", "_")),
            "parallel_tool_calls": bool(asked.get("parallel_tool_calls", True)),
            "temperature": None,
            "top_p": None,
            "tool_choice": "auto",
            "tools": written_tools(self.task.tools),
            "usage": {
                "input_tokens": prompts,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": rollout.sampled_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompts + rollout.sampled_tokens,
            },
        }

    async def _post(self, path: str, body: Mapping[str, object], kind: FailureKind) -> httpx.Response:
        try:
            return await self._http.post(f"/{path}", json=body)
        except httpx.TimeoutException as error:
            seconds = self.environment.seconds
            raise AttemptError(kind, f"/{path} of {self._http.base_url} took more than {seconds:g} s") from error
        except httpx.HTTPError as error:
            reason = f"/{path} of {self._http.base_url}: {type(error).__name__} {error}"
            raise AttemptError(kind, reason) from error

    async def close(self) -> None:
        """Let the server free what it holds. Servers before 0.7 have no such path, and answer 404."""
        named = {"resources_session_id": f"strop-{self.seed:x}", "episode_id": f"strop-{self.seed:x}"}
        await self._post("close_session", named, FailureKind.ENVIRONMENT)


def read_verdict(verified: Mapping[str, Any], row: Mapping[str, Any], solved_at: float) -> Scored:
    """What /verify answered, as a score.

    Args:
        verified: the answer.
        row: what was sent: its fields come back, and are no metrics.
        solved_at: reward from which a task counts as solved.

    Raises:
        AttemptError: the sample is masked, or there is no reward.
    """
    nested = verified.get("instance_config")  # where servers before 0.7 write it
    masked = verified.get("mask_sample") or (isinstance(nested, Mapping) and nested.get("mask_sample"))
    if masked:
        name = str(verified.get("failure_kind") or verified.get("_ng_failure_class") or "no kind given")
        word = name.rpartition(":")[2].partition("_")[0]
        kind = FailureKind.TIMEOUT if name.endswith("timeout") else _KINDS.get(word, FailureKind.ENVIRONMENT)
        raise AttemptError(kind, f"masked by the server: {name}: {verified.get('failure_reason') or 'no reason given'}")
    reward = verified.get("reward")
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise AttemptError(FailureKind.SCORER, f"/verify gave the reward {json.dumps(reward)}")
    metrics = {
        name: float(value)
        for name, value in verified.items()
        if isinstance(value, int | float)
        and name not in row
        and name not in ("reward", "mask_sample")
        and name[0] != "_"
    }
    components = verified.get("reward_components")
    if isinstance(components, Mapping):
        metrics |= {f"reward_{name}": float(value) for name, value in components.items()}
    return Scored(float(reward), metrics, solved=reward >= solved_at)


def _refused(path: str, answer: httpx.Response) -> str:
    return f"/{path} answered {answer.status_code}: {answer.text[:300]}"
