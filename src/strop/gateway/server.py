"""Running a gateway: in the background of this event loop for training, or as a program for `strop serve`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import uvicorn

from strop.errors import StropError
from strop.gateway.app import EVERYBODY, Access, Gateway
from strop.gateway.engine import Engine
from strop.serving import GuestServer

if TYPE_CHECKING:
    from renderers.base import Renderer

    from strop.sampling.sampler import Sampler

_BACKLOG = 4096  # connections that wait to be accepted: thousands of agents start at once
_ACCEPTED = 32  # of them are accepted in one pass of the event loop
_QUIET_SECONDS = 1.0  # that nobody waits for anything before a full garbage collection,
_LONGEST_SECONDS = 600.0  # and the time after which there is one all the same
_YOUNG_SECONDS = 0.1  # between collections of what is new
_GROWN = 10_000  # blocks of memory that are there since the last full collection, and were not before
_NEVER = 1 << 30  # collections of the middle generation until a full one


@contextlib.asynccontextmanager
async def running(gateway: Gateway, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve while the context is open.

    Args:
        gateway: what to serve.
        host: address to listen on.
        port: 0 takes a free one.

    Yields:
        the URL, without a slash at its end: "http://127.0.0.1:40123".

    Raises:
        StropError: the address can't be listened on.
    """
    # Named as TCP, asyncio turns Nagle's algorithm off; else each reply's second packet would wait 40 ms.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise StropError(f"The gateway can't listen on {host}, port {port}: {error}. Choose another port.") from error
    config = uvicorn.Config(
        gateway,
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=_ACCEPTED,
        ws="none",
        server_header=False,
        proxy_headers=False,
    )
    server = GuestServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    ready = asyncio.create_task(server.ready.wait())
    try:
        await asyncio.wait((serving, ready), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
            raise StropError("The gateway's server ended as soon as it was started.")
        listening.listen(_BACKLOG)  # asyncio takes one number for both
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listening.getsockname()[1]}"
    finally:
        ready.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.wait([serving])
        listening.close()


class _Shared:
    """A gateway that several attempts of this event loop use at the same time."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway, self.users = gateway, 0
        self.url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.unused = asyncio.Event()
        self.serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            async with running(self.gateway) as url:
                self.url.set_result(url)
                await self.unused.wait()
        except StropError as error:
            if self.url.done():
                raise
            self.url.set_exception(error)


_shared: dict[tuple[int, int], _Shared] = {}


@contextlib.asynccontextmanager
async def shared(sampler: Sampler, renderer: Renderer, tokenizer: Any) -> AsyncIterator[tuple[Gateway, str]]:
    """The gateway over a sampler for attempts of this process: open on loopback while anybody uses it.

    Every call must belong to an attempt, and may name the model as it likes.

    Yields:
        the gateway, and its URL.
    """
    name = (id(asyncio.get_running_loop()), id(sampler))
    entry = _shared.get(name)
    if entry is None:
        gateway = Gateway(Engine(sampler, renderer, tokenizer), "policy", Access(only_attempts=True, any_model=True))
        entry = _shared[name] = _Shared(gateway)
    entry.users += 1
    try:
        yield entry.gateway, await asyncio.shield(entry.url)
    finally:
        entry.users -= 1
        if entry.users == 0:
            del _shared[name]
            entry.unused.set()
            await entry.serving


@contextlib.asynccontextmanager
async def unhurried_collection(idle: Callable[[], bool]) -> AsyncIterator[None]:
    """Let full garbage collections wait for a quiet moment while the context is open.

    A full collection visits every token of every attempt that is open, and the event loop stands still as long: 200 ms
    were measured with 2,000 conversations of 150 tokens. What calls leave behind is freed without it, but for cycles
    that lived through the younger generations' collections. Those are made often: Python makes them by allocations
    minus deallocations, and where old attempts end while new ones begin that number hardly grows: 86,000 new objects
    were seen to wait for one, which took 110 ms. What lives as long as the process is left out of all of them.

    Args:
        idle: whether nobody waits for anything.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(before[0], before[1], _NEVER)

    async def collect() -> None:
        last = waited = time.monotonic()
        blocks = sys.getallocatedblocks()
        while True:
            await asyncio.sleep(_YOUNG_SECONDS)
            gc.collect(1)
            now = time.monotonic()
            waited = waited if idle() else now
            due = now - waited > _QUIET_SECONDS or now - last > _LONGEST_SECONDS
            if due and sys.getallocatedblocks() - blocks > _GROWN:
                gc.collect()
                last, blocks = time.monotonic(), sys.getallocatedblocks()

    collecting = asyncio.create_task(collect())
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*before)
        gc.unfreeze()


async def serve(
    sampler: Sampler,
    renderer: Renderer,
    tokenizer: Any,
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    access: Access = EVERYBODY,
    on_ready: Any = None,
) -> None:
    """Serve a model until cancelled.

    Args:
        sampler, renderer, tokenizer: the model; see `Engine`.
        model: the name that clients know it by.
        host, port: where to listen.
        access: who may do what.
        on_ready: called with the URL once connections are accepted.
    """
    gateway = Gateway(Engine(sampler, renderer, tokenizer), model, access)
    async with unhurried_collection(lambda: not gateway.engine.in_flight), running(gateway, host, port) as url:
        if on_ready is not None:
            on_ready(url)
        await asyncio.Event().wait()
