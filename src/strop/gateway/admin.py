"""The admin scope: pause and resume, the weight version, and opening, freezing and reading attempts from another
process. Closed unless the gateway was given an admin key; a key minted for an attempt never opens it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from strop.gateway.dialects.fields import Body, check_names, flag, number, strings, whole
from strop.gateway.errors import RequestError
from strop.rollouts import Rollout

if TYPE_CHECKING:
    from strop.gateway.app import Gateway
    from strop.gateway.attempts import Attempt

_OPEN = {"id", "task_id", "environment", "seed", "seconds", "token_budget", "sessions"}


def admin_routes(gateway: Gateway) -> list[Route]:
    """The routes of the scope."""
    admin = _Admin(gateway)
    handlers: list[tuple[str, str, Callable[[Body, str], Awaitable[Any]]]] = [
        ("POST", "/admin/pause", admin.pause),
        ("POST", "/admin/resume", admin.resume),
        ("GET", "/admin/status", admin.status),
        ("POST", "/admin/attempts", admin.open),
        ("POST", "/admin/attempts/{attempt:path}/freeze", admin.freeze),
        ("DELETE", "/admin/attempts/{attempt:path}", admin.close),
    ]
    return [Route(path, _endpoint(gateway, handler), methods=[method]) for method, path, handler in handlers]


def _endpoint(
    gateway: Gateway, handler: Callable[[Body, str], Awaitable[Any]]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    from strop.gateway.app import as_json, guarded, is_admin, read_body

    async def respond(http: HttpRequest) -> Response:
        if not is_admin(http, gateway.access):
            raise RequestError("The admin scope needs the admin key.", status=401, code="invalid_api_key")
        body: Body = await read_body(http) if http.method == "POST" and await http.body() else {}
        return as_json(await handler(body, http.path_params.get("attempt", "")))

    async def endpoint(http: HttpRequest) -> Response:
        return await guarded(http, respond)

    return endpoint


class _Admin:
    """What the admin may do."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._engine = gateway, gateway.engine

    async def pause(self, body: Body, _: str) -> Any:
        """Let calls wait; {"drain": true} returns once those in flight have ended."""
        check_names(body, {"drain"}, (), {})
        await self._engine.pause(drain=flag(body, "drain"))
        return await self.status({}, "")

    async def resume(self, body: Body, _: str) -> Any:
        """Let calls go on."""
        self._engine.resume()
        return await self.status({}, "")

    async def status(self, body: Body, _: str) -> Any:
        """What is going on."""
        return {
            "model": self._gateway.model,
            "weight_version": self._engine.sampler.version,
            "paused": self._engine.paused,
            "in_flight": self._engine.in_flight,
            "attempts": len(self._engine.attempts),
        }

    async def open(self, body: Body, _: str) -> Any:
        """Open an attempt: its key, and the base URLs that name it without the key."""
        check_names(body, _OPEN, (), {})
        identity = body.get("id")
        if not isinstance(identity, str) or not identity:
            raise RequestError("id: it is required", parameter="id")
        rollout = Rollout(
            identity, str(body.get("task_id") or ""), str(body.get("environment") or ""), 0, whole(body, "seed", 0) or 0
        )
        seconds = number(body, "seconds", 0.0)
        attempt = self._engine.attempts.open(
            rollout,
            self._engine.renderer,
            token_budget=whole(body, "token_budget", 1),
            deadline=None if seconds is None else time.monotonic() + seconds,
            sessions=strings(body, "sessions"),
        )
        return {"id": identity, "key": attempt.key, "path": f"/attempts/{identity}"}

    async def freeze(self, body: Body, identity: str) -> Any:
        """End an attempt: everything it recorded."""
        attempt = self._engine.attempts.get(identity)
        attempt.freeze()
        return _written(attempt)

    async def close(self, body: Body, identity: str) -> Any:
        """Forget an attempt."""
        self._engine.attempts.close(self._engine.attempts.get(identity))
        return {"id": identity, "closed": True}


def _written(attempt: Attempt) -> dict[str, Any]:
    rollout = attempt.rollout
    return {
        "id": attempt.id,
        "calls": [asdict(call) for call in rollout.calls],
        "leaves": rollout.leaves(),
        "forks": rollout.forks,
        "retries": attempt.retries,
        "transcript": rollout.transcript,
        "failure": None if attempt.failure is None else str(attempt.failure),
    }
