"""An environment of strop as a resources server of NeMo Gym, so that NeMo RL and others can train on it.

A session is opened by `/seed_session` with a row of `rows.row_of`, named by a cookie (or by the id that an environment
server assigns), scored by `/verify`, and freed by `/close_session` or after a while of silence. What the scorer needs
never leaves this process: rows hold the task's id, and what the model may read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from strop.environments.environment import Environment
from strop.environments.foreign import ForeignAttempt
from strop.environments.nemo_gym.items import messages_of
from strop.environments.nemo_gym.rows import IDS
from strop.errors import AttemptError, StropError
from strop.rollouts import FailureKind, Scored, Task

COOKIE = "strop_session"
_log = logging.getLogger(__name__)
#: Our kinds of failure in NeMo Gym's vocabulary (`nemo_gym.failure_kinds`); what it has no word for gets our own.
_KINDS = {
    FailureKind.SANDBOX: "provider_unavailable",
    FailureKind.SCORER: "verifier_error",
    FailureKind.CANCELLED: "cancelled",
    FailureKind.AGENT: "agent_run_error",
}


@dataclass(slots=True)
class _Open:
    """A session under way.

    Attributes:
        attempt: what is attempted.
        used: when it was last asked for, on the monotonic clock.
        verdict: what /verify answered: asked again, it answers the same.
    """

    attempt: ForeignAttempt
    used: float
    verdict: dict[str, Any] | None = None


class ResourcesServer:
    """Sessions of one environment.

    Args:
        environment: what is served.
        splits: those whose tasks may be asked for.
        idle_seconds: silence after which a session is freed.
    """

    def __init__(
        self, environment: Environment, splits: Sequence[str] = ("train", "test"), idle_seconds: float = 3600.0
    ) -> None:
        self._environment, self._idle = environment, idle_seconds
        self._tasks = {split: environment.tasks(split) for split in splits}
        self._by_id = {
            split: {task.id: number for number, task in enumerate(tasks)} for split, tasks in self._tasks.items()
        }
        self._open: dict[str, _Open] = {}

    def app(self) -> Starlette:
        """The application."""
        routes = [
            Route("/seed_session", self.seed_session, methods=["POST"]),
            Route("/verify", self.verify, methods=["POST"]),
            Route("/close_session", self.close_session, methods=["POST"]),
            Route("/aggregate_metrics", _aggregate_metrics, methods=["POST"]),
            Route("/reverify_mode", self.reverify_mode, methods=["GET"]),
            Route("/health", _health, methods=["GET"]),
            Route("/{tool}", self.tool, methods=["POST"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(self._sweep())
        try:
            yield
        finally:
            sweeping.cancel()
            for name in list(self._open):
                await self._free(name)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(60.0, self._idle / 4))
            silent = time.monotonic() - self._idle
            for name in [name for name, opened in self._open.items() if opened.used < silent]:
                await self._free(name)

    async def _free(self, name: str) -> None:
        opened = self._open.pop(name, None)
        if opened is not None:
            try:
                await opened.attempt.close()
            except Exception as error:  # its verdict stands, and nobody is there to be told
                _log.warning("a session of %s did not close: %s", opened.attempt.task.id, _sentence(error))

    async def seed_session(self, request: Request) -> Response:
        """Open an attempt; asked again under the same assigned id, it stays the one that is open."""
        body = await _body(request)
        assigned = body.get("resources_session_id")
        name = str(assigned) if assigned else uuid.uuid4().hex
        if name not in self._open:
            row = {**body, **(body.get("task_data") or {})}
            found = self._find(row)
            if isinstance(found, str):
                return _problem(404, found)
            number = row.get("_ng_rollout_index", body.get("episode_id", 0))
            try:
                attempt = await ForeignAttempt.open(self._environment, found, str(number))
            except Exception as error:
                return _problem(500, f"the session could not be opened: {_sentence(error)}")
            self._open[name] = _Open(attempt, time.monotonic())
        response = JSONResponse({"resources_session_id": name} if assigned else {})
        response.set_cookie(COOKIE, name)
        return response

    def _find(self, row: Mapping[str, Any]) -> Task | str:
        """The task that a row is of, or why there is none."""
        name = next((str(row[key]) for key in IDS if row.get(key) is not None), None)
        if name is None:
            return f"the row has none of {', '.join(IDS)}"
        asked = row.get("split")
        for split in self._tasks if asked is None else [str(asked)]:
            if split not in self._tasks:
                return f"there is no split {split!r}; there are {', '.join(self._tasks)}"
            if name in self._by_id[split]:
                return self._tasks[split][self._by_id[split][name]]
        return f"there is no task {name!r}"

    def _opened(self, request: Request) -> _Open | None:
        opened = self._open.get(request.cookies.get(COOKIE, ""))
        if opened is not None:
            opened.used = time.monotonic()
        return opened

    async def tool(self, request: Request) -> Response:
        """Run a tool; what the agent reads is the body, errors that it is meant to meet included."""
        opened = self._opened(request)
        if opened is None:
            return _problem(409, "there is no session: /seed_session first, and send its cookie back")
        try:
            content = await opened.attempt.call(request.path_params["tool"], await _body(request))
        except AttemptError as error:
            return _problem(500, str(error))
        return PlainTextResponse(content)

    async def verify(self, request: Request) -> Response:
        """Score an episode. What broke is masked, with its kind and reason, and its reward means nothing."""
        body = await _body(request)
        opened = self._opened(request)
        if opened is None:
            return JSONResponse({**body, **_masked("session_lost", "there is no session under this cookie")})
        if opened.verdict is None:
            try:
                opened.verdict = _written(await self._score(opened, body))
            except AttemptError as error:
                opened.verdict = _masked(_KINDS.get(error.kind, f"strop:{error.kind.value}"), error.reason)
            except Exception as error:
                opened.verdict = _masked("verifier_error", _sentence(error))
        return JSONResponse({**body, **opened.verdict})

    async def _score(self, opened: _Open, body: Mapping[str, Any]) -> Scored:
        said = messages_of((body.get("response") or {}).get("output"))
        return await opened.attempt.score(said, int(body.get("_ng_rollout_index") or 0))

    async def close_session(self, request: Request) -> Response:
        """Free a session, by its cookie or its assigned id; one that is not open is closed already."""
        body = await _body(request)
        assigned = str(body.get("resources_session_id") or "")
        for name in (assigned, request.cookies.get(COOKIE, "")):
            await self._free(name)
        return JSONResponse({"resources_session_id": assigned})

    async def reverify_mode(self, request: Request) -> Response:
        """Whether an episode can be scored again without its session."""
        return JSONResponse("unsupported")


def resources_server(environment: Environment, **options: Any) -> Starlette:
    """The application that serves an environment; options as of `ResourcesServer`."""
    return ResourcesServer(environment, **options).app()


async def serve(environment: Environment, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until cancelled.

    Args:
        environment: what is served.
        host, port: to listen on; port 0 takes a free one.
        ready: called with the URL once connections are taken.

    Raises:
        StropError: the address can't be listened on.
    """
    import uvicorn

    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise StropError(f"{host}, port {port} can't be listened on: {error}. Choose another port.") from error
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{listening.getsockname()[1]}")
    config = uvicorn.Config(resources_server(environment), log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving  # it closes the sessions, and says nothing of being interrupted
        raise


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _aggregate_metrics(request: Request) -> Response:
    """Means of every number over the samples that are a measurement, over all and by task."""
    body = await _body(request)
    valid = [sample for sample in body.get("verify_responses") or [] if not sample.get("mask_sample")]
    by_task: dict[Any, list[Mapping[str, Any]]] = {}
    for sample in valid:
        by_task.setdefault(sample.get("_ng_task_index"), []).append(sample)
    groups = [{"_ng_task_index": index, **_means(samples)} for index, samples in by_task.items()]
    overall = _means(valid)
    key = {name: overall[name] for name in ("mean/reward", "mean/solved") if name in overall}
    return JSONResponse({"group_level_metrics": groups, "agent_metrics": overall, "key_metrics": key})


def _means(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            if isinstance(value, int | float) and not name.startswith("_") and name != "mask_sample":
                values.setdefault(f"mean/{name}", []).append(float(value))
    return {name: statistics.fmean(numbers) for name, numbers in values.items()}


def _written(scored: Scored) -> dict[str, Any]:
    solved = {} if scored.solved is None else {"solved": float(scored.solved)}
    measured = {"reward": float(scored.reward), "mask_sample": False, "failure_kind": None, "failure_reason": None}
    return {**scored.metrics, **solved, **measured}


def _masked(kind: str, reason: str) -> dict[str, Any]:
    old = {"instance_config": {"mask_sample": True}}  # where NeMo RL looked for it before 0.7
    return {"reward": 0.0, "mask_sample": True, "failure_kind": kind, "failure_reason": reason[:2000], **old}


async def _body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _problem(status: int, reason: str) -> Response:
    return JSONResponse({"error": reason}, status_code=status)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
