"""A gateway over a sampler that plays a script, reached without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from strop.gateway import Access, Attempt, Engine, Gateway
from strop.rollouts import Rollout
from strop.sampling.rendering import renderer_for


@dataclass
class Place:
    """A gateway, what it samples from, and a client."""

    sampler: Any
    engine: Engine
    gateway: Gateway
    client: httpx.AsyncClient

    def open(self, name: str = "group/0", **options: Any) -> Attempt:
        """Open an attempt and let the client hold its key."""
        rollout = Rollout(name, "task", "environment", 0, seed=options.pop("seed", 7))
        attempt = self.engine.attempts.open(rollout, self.engine.renderer, **options)
        self.client.headers["authorization"] = f"Bearer {attempt.key}"
        return attempt

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> Any:
        """The JSON of a response that must have gone well."""
        response = await self.client.post(path, json=body, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, messages: list[Any], **fields: Any) -> dict[str, Any]:
        """The first choice of a chat completion."""
        body = {"model": "tiny", "messages": messages, **fields}
        choice: dict[str, Any] = (await self.post("/v1/chat/completions", body))["choices"][0]
        return choice


@pytest.fixture
async def make_place(scripted_sampler: Callable[..., Any]) -> AsyncIterator[Callable[..., Place]]:
    """Makes places; takes the script, and options of `Access`."""
    clients = []

    def make(script: Any, **access: Any) -> Place:
        sampler = scripted_sampler(script)
        engine = Engine(sampler, renderer_for(sampler.tokenizer, "some/folder"), sampler.tokenizer, call_seconds=20)
        gateway = Gateway(engine, "tiny", Access(**{"admin_key": "admin-key", **access}))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(gateway), base_url="http://gateway")
        clients.append(client)
        return Place(sampler, engine, gateway, client)

    yield make
    for client in clients:
        await client.aclose()
