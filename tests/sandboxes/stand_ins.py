"""Services of other systems, as their SDKs see them: loopback servers that speak what the real ones document, and run
what they are asked to in local sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from strop.sandboxes import ExecResult, Limits, LocalPool, LocalSandbox, Snapshot
from strop.sandboxes.elsewhere.pool import ElsewherePool
from strop.sandboxes.elsewhere.posix import PosixSandbox
from strop.sandboxes.sandbox import MIB


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[str]:
    """Serve an application on loopback; gives its URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="warning"))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 -- uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await serving


class Service:
    """The sandboxes of one service, and what it was asked: (method, path, body) of each request."""

    def __init__(self, pool: LocalPool) -> None:
        self.pool = pool
        self.boxes: dict[str, LocalSandbox] = {}
        self.asked: list[tuple[str, str, Any]] = []
        self.numbers = itertools.count(1)

    async def make(self, snapshot: Snapshot | None = None) -> str:
        name = f"box{next(self.numbers)}"
        self.boxes[name] = await self.pool.create(snapshot=snapshot)
        return name

    async def run(self, name: str, command: list[str]) -> ExecResult:
        return await self.boxes[name].exec(command, timeout=60, max_output=16 * MIB)

    async def end(self, name: str) -> None:
        await self.boxes.pop(name).destroy()

    def route(self, path: str, handler: Callable[[Request, Any], Awaitable[Response]], method: str) -> Route:
        async def handle(request: Request) -> Response:
            raw = await request.body()
            body = json.loads(raw) if raw.startswith((b"{", b"[")) else raw
            self.asked.append((method, request.url.path, body))
            return await handler(request, body)

        return Route(path, handle, methods=[method])


# ---- a system with nothing but a shell: what the protocol is made of over it ----


class ScriptSandbox(PosixSandbox):
    kind = "script"

    def __init__(self, box: LocalSandbox, **options: Any) -> None:
        super().__init__(box.id, **options)
        self.box = box

    async def _run_script(self, script: str, seconds: float) -> bytes:
        return (await self.box.exec(["/bin/sh", "-c", script], timeout=seconds, max_output=16 * MIB)).stdout

    async def _end(self) -> None:
        await self.box.destroy()


class ScriptPool(ElsewherePool[ScriptSandbox]):
    kind = "script"
    sizes = frozenset({"memory", "processes", "cpus", "disk", "inodes", "open_files"})

    def __init__(self, local: LocalPool, **rest: Any) -> None:
        super().__init__(**rest)
        self._local = local

    async def _make(
        self, snapshot: Snapshot | None, limits: Limits, env: dict[str, str], labels: dict[str, str], ttl: float
    ) -> ScriptSandbox:
        box = await self._local.create(limits=limits)
        return ScriptSandbox(box, limits=limits, env=env, labels=labels, cwd=self._cwd)


# ---- Prime Intellect: REST, and a gateway of its own for commands ----


def prime_app(service: Service) -> Starlette:
    def shown(name: str) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        return {
            "id": name, "name": name, "dockerImage": "image", "cpuCores": 1, "memoryGB": 1, "diskSizeGB": 1, "diskMountPath": "/",
            "gpuCount": 0, "status": "RUNNING", "timeoutMinutes": 60, "createdAt": now, "updatedAt": now, "vm": False,
        }  # fmt: skip

    async def create(request: Request, body: Any) -> Response:
        return JSONResponse(shown(await service.make()))

    async def get(request: Request, body: Any) -> Response:
        return JSONResponse(shown(request.path_params["name"]))

    async def statuses(request: Request, body: Any) -> Response:
        names = body.get("sandbox_ids") or body.get("sandboxIds")
        return JSONResponse({"sandboxes": [{**shown(name), "sandboxId": name, "sandbox_id": name} for name in names]})

    async def auth(request: Request, body: Any) -> Response:
        name = request.path_params["name"]
        expires = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
        where = str(request.base_url).rstrip("/")
        return JSONResponse(
            {
                "gateway_url": where,
                "user_ns": "user",
                "job_id": name,
                "token": "gate",
                "expires_at": expires,
                "is_vm": False,
            }
        )

    async def execute(request: Request, body: Any) -> Response:
        assert request.headers["authorization"] == "Bearer gate"
        name = request.path_params["name"]
        if name not in service.boxes:
            return JSONResponse({"error": "sandbox_not_found"}, 502)
        done = await service.run(name, ["/bin/sh", "-c", body["command"]])
        return JSONResponse({"stdout": done.text, "stderr": done.error_text, "exit_code": done.exit_code})

    async def delete(request: Request, body: Any) -> Response:
        await service.end(request.path_params["name"])
        return JSONResponse({})

    one = "/api/v1/sandbox/{name}"
    return Starlette(
        routes=[
            service.route("/api/v1/sandbox", create, "POST"),
            service.route("/api/v1/sandbox/statuses", statuses, "POST"),
            service.route("/api/v1/sandbox/status", statuses, "POST"),
            service.route(one, get, "GET"),
            service.route(one, delete, "DELETE"),
            service.route(one + "/auth", auth, "POST"),
            service.route("/user/{name}/exec", execute, "POST"),
        ]
    )


# ---- E2B: REST for sandboxes, and envd's Connect service for commands, with the SDK's own message types ----


def e2b_app(service: Service) -> Starlette:
    from e2b.envd.process import process_connect, process_pb
    from protobuf import Oneof

    snapshots: dict[str, Snapshot] = {}

    async def create(request: Request, body: Any) -> Response:
        name = await service.make(snapshots.get(body["templateID"]))
        answer = {"templateID": body["templateID"], "sandboxID": name, "clientID": "c", "envdVersion": "0.5.0"}
        return JSONResponse({**answer, "envdAccessToken": "envd"}, 201)

    async def delete(request: Request, body: Any) -> Response:
        await service.end(request.path_params["name"])
        return Response(status_code=204)

    async def snapshot(request: Request, body: Any) -> Response:
        name = f"snapshot{next(service.numbers)}"
        snapshots[name] = await service.boxes[request.path_params["name"]].snapshot()
        return JSONResponse({"snapshotID": name, "names": [name]}, 201)

    async def delete_template(request: Request, body: Any) -> Response:
        await snapshots.pop(request.path_params["name"]).delete()
        return Response(status_code=204)

    class Commands(process_connect.Process):
        async def start(self, request: Any, ctx: Any) -> AsyncIterator[Any]:
            event = process_pb.ProcessEvent
            name = ctx.request_headers["e2b-sandbox-id"]
            yield process_pb.StartResponse(event=event(event=Oneof("start", event.StartEvent(pid=7))))
            done = await service.run(name, [request.process.cmd, *request.process.args])
            data = event.DataEvent(output=Oneof("stdout", done.stdout))
            yield process_pb.StartResponse(event=event(event=Oneof("data", data)))
            end = event.EndEvent(exit_code=done.exit_code, exited=True, status=f"exit status {done.exit_code}")
            yield process_pb.StartResponse(event=event(event=Oneof("end", end)))

    one = "/sandboxes/{name}"
    commands = process_connect.ProcessASGIApplication(Commands())
    return Starlette(
        routes=[
            service.route("/v2/sandboxes", create, "POST"),
            service.route(one, delete, "DELETE"),
            service.route(one + "/snapshots", snapshot, "POST"),
            service.route("/templates/{name}", delete_template, "DELETE"),
            Mount("/", app=commands),
        ]
    )


# ---- Daytona: REST for sandboxes, and the toolbox of each for commands ----


def daytona_app(service: Service) -> Starlette:
    def shown(request: Request, name: str) -> dict[str, Any]:
        where = str(request.base_url).rstrip("/")
        return {
            "id": name, "organizationId": "o", "name": name, "user": "root", "env": {}, "labels": {}, "public": False,
            "networkBlockAll": True, "kvm": False, "target": "t", "cpu": 1, "gpu": 0, "memory": 1, "disk": 1, "state": "started",
            "toolboxProxyUrl": f"{where}/toolbox",
        }  # fmt: skip

    async def create(request: Request, body: Any) -> Response:
        return JSONResponse(shown(request, await service.make()))

    async def get(request: Request, body: Any) -> Response:
        return JSONResponse(shown(request, request.path_params["name"]))

    async def delete(request: Request, body: Any) -> Response:
        name = request.path_params["name"]
        await service.end(name)
        return JSONResponse({**shown(request, name), "state": "destroyed"})

    async def execute(request: Request, body: Any) -> Response:
        name = request.path_params["name"]
        if name not in service.boxes:
            return JSONResponse({"message": "sandbox not found", "statusCode": 404}, 404)
        done = await service.run(name, ["/bin/sh", "-c", body["command"]])
        return JSONResponse({"result": done.text + done.error_text, "exitCode": done.exit_code})

    async def toolbox(request: Request, body: Any) -> Response:
        return JSONResponse({"url": f"{str(request.base_url).rstrip('/')}/toolbox"})

    return Starlette(
        routes=[
            service.route("/api/sandbox", create, "POST"),
            service.route("/api/sandbox/{name}", get, "GET"),
            service.route("/api/sandbox/{name}", delete, "DELETE"),
            service.route("/api/sandbox/{name}/toolbox-proxy-url", toolbox, "GET"),
            service.route("/toolbox/{name}/process/execute", execute, "POST"),
        ]
    )


# ---- Kubernetes: an API server that binds claims at once, and the router that carries commands into pods ----


def kubernetes_app(service: Service) -> Starlette:
    claims: dict[str, dict[str, Any]] = {}

    async def create(request: Request, body: Any) -> Response:
        box = await service.make()
        ready = [{"type": "Ready", "status": "True", "reason": "Bound", "message": "", "observedGeneration": 1}]
        body["metadata"] |= {"uid": box, "resourceVersion": "1", "generation": 1, "namespace": "default"}
        status = {"sandbox": {"name": box, "podIPs": ["127.0.0.1"]}, "conditions": ready, "observedGeneration": 1}
        claims[body["metadata"]["name"]] = {**body, "status": status}
        return JSONResponse(body, 201)

    async def listing(request: Request, body: Any) -> Response:
        name = request.query_params.get("fieldSelector", "").removeprefix("metadata.name=")
        found = claims.get(name) or next((claim for claim in claims.values() if claim["metadata"]["uid"] == name), None)
        if "watch" not in request.query_params:
            return JSONResponse({"items": list(claims.values()), "metadata": {"resourceVersion": "1"}})
        line = "" if found is None else json.dumps({"type": "ADDED", "object": found}) + "\n"
        return Response(line, media_type="application/json")

    async def get(request: Request, body: Any) -> Response:
        claim = claims.get(request.path_params["name"])
        return JSONResponse({"code": 404, "reason": "NotFound"}, 404) if claim is None else JSONResponse(claim)

    async def delete(request: Request, body: Any) -> Response:
        claim = claims.pop(request.path_params["name"], None)
        if claim is None:
            return JSONResponse({"code": 404, "reason": "NotFound"}, 404)
        await service.end(claim["metadata"]["uid"])
        return JSONResponse({"status": "Success"})

    async def execute(request: Request, body: Any) -> Response:
        name = request.headers["x-sandbox-id"]
        if name not in service.boxes:
            return JSONResponse({"detail": "no such sandbox"}, 502)
        done = await service.run(name, shlex.split(body["command"]))
        return JSONResponse({"stdout": done.text, "stderr": done.error_text, "exit_code": done.exit_code})

    many = "/apis/{group}/{version}/namespaces/{namespace}/{plural}"
    return Starlette(
        routes=[
            service.route(many, create, "POST"),
            service.route(many, listing, "GET"),
            service.route(many + "/{name}", get, "GET"),
            service.route(many + "/{name}", delete, "DELETE"),
            service.route("/execute", execute, "POST"),
        ]
    )


# ---- Modal: gRPC, so a stand-in for the SDK itself, whose calls are held against the real signatures ----


class _Method:
    """Like a method of Modal's SDK: `.aio` is the asynchronous one. Arguments are bound to the real signature."""

    def __init__(self, signature: Any, work: Callable[..., Awaitable[Any]], bound: bool) -> None:
        self._signature, self._work, self._bound = signature, work, bound

    async def aio(self, *arguments: Any, **options: Any) -> Any:
        self._signature.bind(*([None] if self._bound else []), *arguments, **options)
        return await self._work(*arguments, **options)


def modal_sdk(service: Service) -> Any:
    """Something with the surface of the package modal."""
    import inspect

    modal = __import__("modal")

    def method(name: str, work: Callable[..., Awaitable[Any]]) -> _Method:
        real = getattr(modal.Sandbox, name)
        return _Method(inspect.signature(real.func if hasattr(real, "func") else real), work, bound=name != "create")

    def instance(name: str) -> Any:
        async def execute(*command: str, **options: Any) -> Any:
            if name not in service.boxes:
                raise modal.exception.NotFoundError(name)
            done = await service.run(name, list(command))

            async def read() -> str:
                return done.text

            async def wait() -> int:
                return done.exit_code

            return SimpleNamespace(
                stdout=SimpleNamespace(read=SimpleNamespace(aio=read)), wait=SimpleNamespace(aio=wait)
            )

        async def terminate(**options: Any) -> None:
            await service.end(name)

        async def snapshot(**options: Any) -> Any:
            return await service.boxes[name].snapshot()

        async def set_tags(tags: dict[str, str], **options: Any) -> None:
            service.asked.append(("set_tags", name, tags))

        return SimpleNamespace(
            object_id=name, exec=method("exec", execute), terminate=method("terminate", terminate),
            snapshot_filesystem=method("snapshot_filesystem", snapshot), set_tags=method("set_tags", set_tags),
        )  # fmt: skip

    async def create(*command: str, **options: Any) -> Any:
        service.asked.append(("create", shlex.join(command), options))
        image = options["image"]
        return instance(await service.make(image if not isinstance(image, str) else None))

    async def lookup(name: str, **options: Any) -> str:
        return name

    return SimpleNamespace(
        exception=modal.exception, Image=SimpleNamespace(from_registry=lambda tag: tag),
        App=SimpleNamespace(lookup=_Method(inspect.signature(modal.App.lookup), lookup, bound=False)),
        Sandbox=SimpleNamespace(create=method("create", create)),
    )  # fmt: skip
