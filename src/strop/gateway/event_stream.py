"""Server-sent events: an answer that is sent while it is still being made. What the events say is the dialects'."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Self

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from strop.gateway.attempts import Answer
from strop.gateway.dialects.fields import Events
from strop.gateway.errors import as_request_error, error_body
from strop.gateway.streaming import Listener

Answering = Callable[[Listener], Coroutine[Any, Any, list[Answer]]]


class EventResponse(Response):
    """Sends events as they become known, and ends with the answers or with an error.

    It hears what is told of the replies (see `streaming.Listener`), and sends all that has come together since it
    sent last in one piece. If its client goes away, answering ends.
    """

    def __init__(self, http: HttpRequest, events: Events, named: bool) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]  # of an answer that is not there yet
        self._http, self._events, self._named = http, events, named
        self._written: list[bytes] = []
        self._more = asyncio.Event()
        self._begun = False
        self._answering: asyncio.Task[list[Answer]]

    @classmethod
    async def begun(cls, http: HttpRequest, events: Events, answering: Answering, *, named: bool) -> Self:
        """A response of which something can be sent.

        Args:
            http: the request.
            events: writes the events.
            answering: answers it, and tells the listener that it is given what becomes known before.
            named: whether each event has an `event:` line, and the stream no `[DONE]` at its end.

        Raises:
            Exception: what `answering` raised before anything was known: the response can still be an error.
        """
        response = cls(http, events, named)
        response._answering = asyncio.create_task(answering(response))
        response._answering.add_done_callback(lambda _: response._more.set())
        try:
            await response._more.wait()
        except asyncio.CancelledError:
            response._answering.cancel()
            raise
        if not response._begun:
            response._answering.result()
        return response

    def started(self, prompt: list[int]) -> None:
        """See `Listener`."""
        if not self._begun:
            self._begun = True
            self._write(self._events.started(prompt))

    def said(self, reply: int, text: str) -> None:
        """See `Listener`."""
        self._write(self._events.said(reply, text))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI entry point."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            while not self._answering.done():
                self._more.clear()
                await self._flush(send)
                await self._more.wait()
        except asyncio.CancelledError:
            self._answering.cancel()
            raise
        self._end()
        await self._flush(send, more=False)

    def _end(self) -> None:
        """Write the last events, or the error: with the status long sent, it can only be an event."""
        try:
            self._write(self._events.ended(self._answering.result()))
        except ClientDisconnect:
            return
        except Exception as error:
            body = error_body(self._http, as_request_error(self._http, error))
            self._write(iter([{"type": "error", **body} if self._named else body]))
            return
        if not self._named:
            self._written.append(b"data: [DONE]\n\n")

    def _write(self, events: Iterator[dict[str, Any]]) -> None:
        for event in events:
            if self._named:
                self._written += [b"event: ", event["type"].encode(), b"\n"]
            self._written += [b"data: ", orjson.dumps(event), b"\n\n"]
        self._more.set()

    async def _flush(self, send: Any, more: bool = True) -> None:
        written, self._written = b"".join(self._written), []
        if written or not more:
            await send({"type": "http.response.body", "body": written, "more_body": more})
