"""Sandboxes of another machine, over HTTP: the same surface as the local ones, served by `strop.sandboxes.server`.

What the server says went wrong comes back as the same typed error; a server that can't be reached is a
`SandboxFailure`, never a failed program.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import httpx

from strop.sandboxes.encoding import Json, error_from_json, from_json, to_json
from strop.sandboxes.errors import SandboxFailure
from strop.sandboxes.sandbox import MIB, CellResult, Chunk, Command, ExecResult, FileInfo, Limits, Snapshot

#: Seconds beyond a command's own time-out that the network may take.
SLACK = 60.0


def _given(**options: Any) -> Json:
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _listed(command: Command) -> str | list[str]:
    return command if isinstance(command, str) else list(command)


class _Link:
    """Requests with the token, errors made typed."""

    def __init__(self, url: str, token: str, transport: httpx.AsyncBaseTransport | None) -> None:
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=64)
        self.http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            transport=transport,
            limits=limits,
            timeout=httpx.Timeout(SLACK, pool=None),
        )

    async def ask(self, method: str, path: str, *, seconds: float | None = None, **request: Any) -> httpx.Response:
        try:
            response = await self.http.request(
                method, path, timeout=httpx.Timeout(SLACK, read=None if seconds is None else seconds + SLACK), **request
            )
        except httpx.HTTPError as error:
            raise SandboxFailure(f"the sandbox server could not be reached: {type(error).__name__} {error}") from None
        await _check(response)
        return response

    async def lines(self, method: str, path: str, **request: Any) -> AsyncIterator[Json]:
        try:
            async with self.http.stream(method, path, timeout=httpx.Timeout(SLACK, read=None), **request) as response:
                await _check(response)
                async for line in response.aiter_lines():
                    yield json.loads(line)
        except (httpx.HTTPError, ValueError) as error:
            if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
                raise
            raise SandboxFailure(f"the sandbox server's stream broke: {type(error).__name__} {error}") from None


async def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    body = await response.aread()
    try:
        parsed = json.loads(body)
    except ValueError:
        parsed = {}
    if response.status_code == 401 or not isinstance(parsed, dict) or "error" not in parsed:
        reason = parsed.get("reason") if isinstance(parsed, dict) else None
        raise SandboxFailure(
            f"the sandbox server refused: {response.status_code} {reason or body[:200].decode('utf-8', 'replace')}"
        )
    raise error_from_json(parsed)


class RemoteProcess:
    """See the protocol `Process`."""

    def __init__(self, link: _Link, path: str) -> None:
        self._link, self._path = link, path

    async def write(self, data: bytes) -> None:
        await self._link.ask("POST", f"{self._path}/stdin", content=data)

    async def close_stdin(self) -> None:
        await self._link.ask("DELETE", f"{self._path}/stdin")

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for line in self._link.lines("GET", f"{self._path}/output"):
            yield from_json(Chunk, line)

    async def signal(self, number: int) -> None:
        await self._link.ask("POST", f"{self._path}/signal", json={"signal": number})

    async def kill(self) -> None:
        await self._link.ask("DELETE", self._path)

    async def wait(self) -> ExecResult:
        return from_json(ExecResult, (await self._link.ask("GET", f"{self._path}/result")).json())


class RemoteShell:
    """See the protocol `ShellSession`."""

    def __init__(self, link: _Link, path: str) -> None:
        self.cwd = "/"
        self._link, self._path = link, path

    async def run(self, line: str, *, timeout: float | None = None) -> ExecResult:
        body = (
            await self._link.ask("POST", f"{self._path}/run", seconds=timeout, json=_given(text=line, timeout=timeout))
        ).json()
        self.cwd = str(body.pop("cwd"))
        return from_json(ExecResult, body)

    async def close(self) -> None:
        await self._link.ask("DELETE", self._path)


class RemotePython:
    """See the protocol `PythonSession`."""

    def __init__(self, link: _Link, path: str) -> None:
        self._link, self._path = link, path

    async def run(self, code: str, *, timeout: float | None = None, fork: bool = False) -> CellResult:
        given = _given(text=code, timeout=timeout, fork=fork)
        return from_json(
            CellResult, (await self._link.ask("POST", f"{self._path}/run", seconds=timeout, json=given)).json()
        )

    async def close(self) -> None:
        await self._link.ask("DELETE", self._path)


class RemoteSnapshot:
    """See the protocol `Snapshot`."""

    def __init__(self, link: _Link, name: str) -> None:
        self._link, self.name = link, name

    async def delete(self) -> None:
        await self._link.ask("DELETE", f"/v1/snapshots/{self.name}")


class RemoteSandbox:
    """See the protocol `Sandbox`."""

    def __init__(self, link: _Link, body: Json) -> None:
        self.id, self.labels = str(body["id"]), dict(body["labels"])
        self._link, self._path = link, f"/v1/sandboxes/{self.id}"

    async def exec(
        self,
        command: Command,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
        max_output: int | None = None,
        kill_leftovers: bool = False,
    ) -> ExecResult:
        body = _given(
            command=_listed(command), stdin=_text(stdin), env=env, cwd=cwd, user=user, timeout=timeout, max_output=max_output,
            kill_leftovers=kill_leftovers,
        )  # fmt: skip
        return from_json(
            ExecResult, (await self._link.ask("POST", f"{self._path}/exec", seconds=timeout, json=body)).json()
        )

    async def stream(
        self,
        command: Command,
        *,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk | ExecResult]:
        body = _given(command=_listed(command), stdin=_text(stdin), env=env, cwd=cwd, user=user, timeout=timeout)
        async for line in self._link.lines("POST", f"{self._path}/stream", json=body):
            if "error" in line and "reason" in line:
                raise error_from_json(line)
            yield from_json(Chunk, line) if "stream" in line else from_json(ExecResult, line)

    async def start(
        self,
        command: Command,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | int | None = None,
        timeout: float | None = None,
    ) -> RemoteProcess:
        body = _given(command=_listed(command), env=env, cwd=cwd, user=user, timeout=timeout)
        name = (await self._link.ask("POST", f"{self._path}/processes", json=body)).json()["process"]
        return RemoteProcess(self._link, f"{self._path}/processes/{name}")

    async def shell(self) -> RemoteShell:
        return RemoteShell(self._link, await self._open_session({"kind": "shell"}))

    async def python(self, preload: Sequence[str] = ()) -> RemotePython:
        return RemotePython(self._link, await self._open_session({"kind": "python", "preload": list(preload)}))

    async def _open_session(self, body: Json) -> str:
        return f"{self._path}/sessions/{(await self._link.ask('POST', f'{self._path}/sessions', json=body)).json()['session']}"

    async def get(self, path: str, *, max_bytes: int = 16 * MIB) -> bytes:
        return (
            await self._link.ask("GET", f"{self._path}/file", params={"path": path, "max_bytes": max_bytes})
        ).content

    async def put(self, path: str, data: bytes, *, mode: int = 0o644, user: str | int | None = None) -> None:
        params = _given(path=path, mode=f"{mode:o}", user=user)
        await self._link.ask("PUT", f"{self._path}/file", params=params, content=data)

    async def get_archive(self, path: str, *, max_bytes: int = 256 * MIB) -> bytes:
        return (
            await self._link.ask("GET", f"{self._path}/archive", params={"path": path, "max_bytes": max_bytes})
        ).content

    async def put_archive(self, path: str, archive: bytes, *, user: str | int | None = None) -> None:
        await self._link.ask("PUT", f"{self._path}/archive", params=_given(path=path, user=user), content=archive)

    async def list(self, path: str) -> list[FileInfo]:
        return [
            from_json(FileInfo, item)
            for item in (await self._link.ask("GET", f"{self._path}/folder", params={"path": path})).json()
        ]

    async def snapshot(self) -> RemoteSnapshot:
        return RemoteSnapshot(self._link, (await self._link.ask("POST", f"{self._path}/snapshot")).json()["snapshot"])

    async def fork(self, count: int) -> Sequence[RemoteSandbox]:
        made = (await self._link.ask("POST", f"{self._path}/fork", json={"count": count})).json()["sandboxes"]
        return [RemoteSandbox(self._link, body) for body in made]

    async def pause(self) -> None:
        await self._link.ask("POST", f"{self._path}/pause")

    async def resume(self) -> None:
        await self._link.ask("POST", f"{self._path}/resume")

    async def destroy(self) -> None:
        await self._link.ask("DELETE", self._path)


def _text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


class RemotePool:
    """A pool behind a sandbox server; see the protocol `SandboxPool`.

    Args:
        url: where it listens, for example "http://127.0.0.1:8787".
        token: what it wants to see.
        transport: another way to carry HTTP, for tests.
    """

    def __init__(self, url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self._link = _Link(url, token, transport)

    async def __aenter__(self) -> RemotePool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create(
        self,
        *,
        snapshot: Snapshot | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        ttl: float | None = None,
    ) -> RemoteSandbox:
        if snapshot is not None and not isinstance(snapshot, RemoteSnapshot):
            raise SandboxFailure("the snapshot is of another pool")
        body = _given(
            snapshot=snapshot.name if snapshot else None,
            limits=to_json(limits) if limits else None,
            env=env,
            labels=labels,
            ttl=ttl,
        )
        return RemoteSandbox(self._link, (await self._link.ask("POST", "/v1/sandboxes", json=body)).json())

    async def close(self) -> None:
        """Close the connections. Sandboxes that were not destroyed end by their time to live."""
        await self._link.http.aclose()
