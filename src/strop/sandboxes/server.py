"""Sandboxes over HTTP: the protocol's verbs as routes, a bearer token, loopback unless told otherwise.

One server is one pool. Output streams are lines of JSON. What a client leaves behind ends by its time to live.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import ipaddress
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from strop.errors import ConfigError, StropError
from strop.sandboxes.encoding import Json, error_to_json, from_json, to_json
from strop.sandboxes.errors import SandboxDead, SandboxFailure
from strop.sandboxes.images import Image
from strop.sandboxes.pool import LocalPool
from strop.sandboxes.sandbox import MIB, Limits, Process, PythonSession, Sandbox, SandboxPool, ShellSession, Snapshot
from strop.sandboxes.tiers import Tier
from strop.serving import GuestServer

#: Largest request body: a file or an archive.
MAX_BODY = 512 * MIB
Handler = Callable[[Request], Awaitable[Response]]
_COMMAND = {"env": dict, "cwd": str, "user": (str, int), "timeout": (int, float)}
_EXEC = {**_COMMAND, "stdin": str, "max_output": int, "kill_leftovers": bool}


class _Held:
    """A sandbox and what hangs on it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.processes: dict[str, Process] = {}
        self.sessions: dict[str, ShellSession | PythonSession] = {}


class SandboxServer:
    """The routes over a pool.

    Args:
        pool: where sandboxes come from.
        token: what a client must bear.
        ttl: seconds that a sandbox lives at most, whatever its client asks for.
    """

    def __init__(self, pool: SandboxPool, token: str, ttl: float = 3600.0) -> None:
        if not token:
            raise ConfigError("token", "it is empty", "A long random string")
        self._pool, self._token, self._ttl = pool, token, ttl
        self._held: dict[str, _Held] = {}
        self._snapshots: dict[str, Snapshot] = {}
        sandbox = "/v1/sandboxes/{sandbox}"
        routes: list[tuple[str, str, Handler]] = [
            ("GET", "/v1/health", self._health),
            ("POST", "/v1/sandboxes", self._create),
            ("DELETE", sandbox, self._destroy),
            ("POST", sandbox + "/exec", self._exec),
            ("POST", sandbox + "/stream", self._stream),
            ("POST", sandbox + "/processes", self._start),
            ("GET", sandbox + "/processes/{process}/output", self._output),
            ("POST", sandbox + "/processes/{process}/stdin", self._stdin),
            ("DELETE", sandbox + "/processes/{process}/stdin", self._close_stdin),
            ("POST", sandbox + "/processes/{process}/signal", self._signal),
            ("DELETE", sandbox + "/processes/{process}", self._kill),
            ("GET", sandbox + "/processes/{process}/result", self._wait),
            ("GET", sandbox + "/file", self._get),
            ("PUT", sandbox + "/file", self._put),
            ("GET", sandbox + "/archive", self._get_archive),
            ("PUT", sandbox + "/archive", self._put_archive),
            ("GET", sandbox + "/folder", self._list),
            ("POST", sandbox + "/snapshot", self._snapshot),
            ("DELETE", "/v1/snapshots/{snapshot}", self._delete_snapshot),
            ("POST", sandbox + "/fork", self._fork),
            ("POST", sandbox + "/pause", self._pause),
            ("POST", sandbox + "/resume", self._resume),
            ("POST", sandbox + "/sessions", self._open_session),
            ("POST", sandbox + "/sessions/{session}/run", self._run_session),
            ("DELETE", sandbox + "/sessions/{session}", self._close_session),
        ]
        self.app = Starlette(
            routes=[Route(path, self._guarded(handler), methods=[method]) for method, path, handler in routes]
        )

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                return JSONResponse({"error": "Unauthorized", "reason": "the bearer token is missing or wrong"}, 401)
            try:
                return await handler(request)
            except (StropError, SandboxFailure, ValueError) as error:
                status, body = error_to_json(error)
                return JSONResponse(body, status)

        return guarded

    # ---- what requests hold ----

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                raise ValueError(f"the body is larger than {MAX_BODY} bytes")
            parts.append(part)
        return b"".join(parts)

    async def _json(self, request: Request, allowed: dict[str, Any]) -> Json:
        """The body's fields, each of an allowed name and type; None counts as absent."""
        body = json.loads(await self._body(request) or b"{}")
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")
        for name, value in body.items():
            if name not in allowed:
                raise ValueError(f"{name!r} is not known here; known: {', '.join(allowed)}")
            if value is not None and (
                not isinstance(value, allowed[name]) or (isinstance(value, bool) and allowed[name] is not bool)
            ):
                raise ValueError(f"{name!r} can't be {value!r}")
        return {name: value for name, value in body.items() if value is not None}

    def _find(self, request: Request) -> _Held:
        held = self._held.get(request.path_params["sandbox"])
        if held is None:
            raise SandboxDead(f"there is no sandbox {request.path_params['sandbox']!r}")
        return held

    def _process(self, request: Request) -> Process:
        process = self._find(request).processes.get(request.path_params["process"])
        if process is None:
            raise ValueError(f"there is no process {request.path_params['process']!r}")
        return process

    # ---- life ----

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"sandboxes": len(self._held), "snapshots": len(self._snapshots)})

    def _hold(self, sandbox: Sandbox) -> Json:
        self._held[sandbox.id] = _Held(sandbox)
        return {"id": sandbox.id, "labels": dict(sandbox.labels)}

    async def _create(self, request: Request) -> Response:
        body = await self._json(
            request, {"snapshot": str, "limits": dict, "env": dict, "labels": dict, "ttl": (int, float)}
        )
        name = body.get("snapshot")
        if name is not None and name not in self._snapshots:
            raise SandboxFailure(f"there is no snapshot {name!r}")
        sandbox = await self._pool.create(
            snapshot=None if name is None else self._snapshots[name],
            limits=from_json(Limits, body["limits"]) if "limits" in body else None,
            env=body.get("env"),
            labels=body.get("labels"),
            ttl=min(self._ttl, body.get("ttl", self._ttl)),
        )
        return JSONResponse(self._hold(sandbox), 201)

    async def _destroy(self, request: Request) -> Response:
        held = self._held.pop(request.path_params["sandbox"], None)
        if held is not None:
            await held.sandbox.destroy()
        return Response(status_code=204)

    async def _snapshot(self, request: Request) -> Response:
        name = secrets.token_hex(8)
        self._snapshots[name] = await self._find(request).sandbox.snapshot()
        return JSONResponse({"snapshot": name}, 201)

    async def _delete_snapshot(self, request: Request) -> Response:
        snapshot = self._snapshots.pop(request.path_params["snapshot"], None)
        if snapshot is not None:
            await snapshot.delete()
        return Response(status_code=204)

    async def _fork(self, request: Request) -> Response:
        count = (await self._json(request, {"count": int})).get("count", 1)
        made = await self._find(request).sandbox.fork(count)
        return JSONResponse({"sandboxes": [self._hold(sandbox) for sandbox in made]}, 201)

    async def _pause(self, request: Request) -> Response:
        await self._find(request).sandbox.pause()
        return Response(status_code=204)

    async def _resume(self, request: Request) -> Response:
        await self._find(request).sandbox.resume()
        return Response(status_code=204)

    # ---- commands ----

    async def _exec(self, request: Request) -> Response:
        sandbox = self._find(request).sandbox
        body = await self._json(request, {"command": (str, list), **_EXEC})
        if "stdin" in body:
            body["stdin"] = base64_bytes(body["stdin"])
        return JSONResponse(to_json(await sandbox.exec(_command(body), **body)))

    async def _stream(self, request: Request) -> Response:
        sandbox = self._find(request).sandbox
        body = await self._json(request, {"command": (str, list), **_COMMAND, "stdin": str})
        if "stdin" in body:
            body["stdin"] = base64_bytes(body["stdin"])
        pieces = sandbox.stream(_command(body), **body)
        first = await anext(pieces)  # so that an error of starting has a status of its own

        async def lines() -> AsyncIterator[bytes]:
            try:
                yield _line(to_json(first))
                async for piece in pieces:
                    yield _line(to_json(piece))
            except SandboxFailure as error:
                yield _line(error_to_json(error)[1])
            finally:
                if (close := getattr(pieces, "aclose", None)) is not None:
                    await close()

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _start(self, request: Request) -> Response:
        held = self._find(request)
        body = await self._json(request, {"command": (str, list), **_COMMAND})
        name = secrets.token_hex(8)
        held.processes[name] = await held.sandbox.start(_command(body), **body)
        return JSONResponse({"process": name}, 201)

    async def _output(self, request: Request) -> Response:
        process = self._process(request)

        async def lines() -> AsyncIterator[bytes]:
            async for chunk in process:
                yield _line(to_json(chunk))

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    async def _stdin(self, request: Request) -> Response:
        process = self._process(request)
        await process.write(await self._body(request))
        return Response(status_code=204)

    async def _close_stdin(self, request: Request) -> Response:
        await self._process(request).close_stdin()
        return Response(status_code=204)

    async def _signal(self, request: Request) -> Response:
        process = self._process(request)
        await process.signal((await self._json(request, {"signal": int}))["signal"])
        return Response(status_code=204)

    async def _kill(self, request: Request) -> Response:
        await self._process(request).kill()
        return Response(status_code=204)

    async def _wait(self, request: Request) -> Response:
        return JSONResponse(to_json(await self._process(request).wait()))

    # ---- sessions ----

    async def _open_session(self, request: Request) -> Response:
        held = self._find(request)
        body = await self._json(request, {"kind": str, "preload": list})
        if body.get("kind") not in ("shell", "python"):
            raise ValueError('kind must be "shell" or "python"')
        name = secrets.token_hex(8)
        is_shell = body["kind"] == "shell"
        held.sessions[name] = await (held.sandbox.shell() if is_shell else held.sandbox.python(body.get("preload", [])))
        return JSONResponse({"session": name}, 201)

    async def _run_session(self, request: Request) -> Response:
        session = self._find(request).sessions.get(request.path_params["session"])
        body = await self._json(request, {"text": str, "timeout": (int, float), "fork": bool})
        if session is None or "text" not in body:
            raise ValueError("there is no such session, or no text to run")
        text, timeout = body["text"], body.get("timeout")
        if hasattr(session, "cwd"):
            result: Any = await session.run(text, timeout=timeout)
            return JSONResponse({**to_json(result), "cwd": session.cwd})
        return JSONResponse(to_json(await session.run(text, timeout=timeout, fork=body.get("fork", False))))

    async def _close_session(self, request: Request) -> Response:
        session = self._find(request).sessions.pop(request.path_params["session"], None)
        if session is not None:
            await session.close()
        return Response(status_code=204)

    # ---- files ----

    async def _get(self, request: Request) -> Response:
        options = {"max_bytes": int(request.query_params["max_bytes"])} if "max_bytes" in request.query_params else {}
        return Response(await self._find(request).sandbox.get(request.query_params["path"], **options))

    async def _put(self, request: Request) -> Response:
        query = request.query_params
        await self._find(request).sandbox.put(
            query["path"], await self._body(request), mode=int(query.get("mode", "0o644"), 8), user=query.get("user")
        )
        return Response(status_code=204)

    async def _get_archive(self, request: Request) -> Response:
        options = {"max_bytes": int(request.query_params["max_bytes"])} if "max_bytes" in request.query_params else {}
        return Response(await self._find(request).sandbox.get_archive(request.query_params["path"], **options))

    async def _put_archive(self, request: Request) -> Response:
        query = request.query_params
        await self._find(request).sandbox.put_archive(query["path"], await self._body(request), user=query.get("user"))
        return Response(status_code=204)

    async def _list(self, request: Request) -> Response:
        return JSONResponse(
            [to_json(info) for info in await self._find(request).sandbox.list(request.query_params["path"])]
        )


def _command(body: Json) -> str | list[str]:
    command = body.pop("command", None)
    if not isinstance(command, str) and not (
        isinstance(command, list) and all(isinstance(part, str) for part in command)
    ):
        raise ValueError("command must be a string or a list of strings")
    return command


def base64_bytes(text: str) -> bytes:
    """Bytes from their base64 text."""
    return base64.b64decode(text, validate=True)


def _line(value: Json) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _check_address(host: str, token: str | None) -> None:
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not token:
        raise ConfigError(
            "host", f"{host!r} can be reached from other machines", "Give a token of your own to serve there"
        )


async def serve(
    image: Image | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8787,
    token: str | None = None,
    limits: Limits | None = None,
    warm: int = 0,
    max_live: int = 4096,
    ttl: float = 3600.0,
    tier: Tier | Literal["auto"] = "auto",
    least: Tier = "rootless",
    allow_weak: bool = False,
    on_ready: Callable[[str, str], None] | None = None,
) -> None:
    """Serve sandboxes of this machine until cancelled.

    Args:
        image: their root file system; the host's own programs if None.
        host: address to listen on. One that is not loopback needs a token of the caller's.
        port: 0 takes a free one.
        token: what clients must bear; a random one if None.
        limits, warm, max_live, ttl, tier, least, allow_weak: of the pool.
        on_ready: called with (URL, token) once it listens.

    Raises:
        ConfigError: an open address without a token.
        SandboxesUnavailable: this machine can't.
    """
    _check_address(host, token)
    token = token or secrets.token_urlsafe(32)
    kinds: dict[str, Any] = {"tier": tier, "least": least, "allow_weak": allow_weak}
    async with LocalPool(image or Image.host(), limits=limits, warm=warm, max_live=max_live, **kinds) as pool:
        app = SandboxServer(pool, token, ttl).app
        server = GuestServer(
            uvicorn.Config(app, host=host, port=port, lifespan="off", log_level="warning", access_log=False)
        )
        serving = asyncio.create_task(server.serve())
        ready = asyncio.create_task(server.ready.wait())
        try:
            await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
            if server.ready.is_set() and on_ready is not None:
                shown = f"[{host}]" if ":" in host else host
                on_ready(f"http://{shown}:{server.servers[0].sockets[0].getsockname()[1]}", token)
            await asyncio.shield(serving)
        finally:
            ready.cancel()
            server.should_exit = server.force_exit = True
            with contextlib.suppress(asyncio.CancelledError):
                await serving
