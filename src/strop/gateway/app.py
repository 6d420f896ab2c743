"""The HTTP side: routes, keys, errors in each API's form, server-sent events, the admin scope, metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route, Router

from strop.errors import AttemptError, StropError
from strop.gateway.admin import admin_routes
from strop.gateway.attempts import Answer, Attempt, RetryMark
from strop.gateway.dialects import anthropic, chat, completions, responses
from strop.gateway.dialects.fields import Body, Events
from strop.gateway.engine import Engine, Request
from strop.gateway.errors import RequestError, as_request_error, error_body
from strop.gateway.event_stream import EventResponse
from strop.gateway.messages import plain_message, plain_tool
from strop.gateway.streaming import Listener
from strop.gateway.tokens import TokenText
from strop.rollouts import Message

_KEPT_RESPONSES = 1024  # conversations kept for `previous_response_id`
Write = Callable[[Body, list[Answer], str, str, TokenText], dict[str, Any]]
MakeEvents = Callable[[Body, str, str, TokenText], Events]


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what.

    Attributes:
        api_key: what a client without a minted key has to send; None lets every client in.
        admin_key: opens the admin scope; None closes it.
        only_attempts: whether a call that belongs to no open attempt is refused. Meant for training, where nothing
            may be sampled that nobody accounts for.
        any_model: whether clients may call the model as they like: some agents have its name built in.
    """

    api_key: str | None = None
    admin_key: str | None = None
    only_attempts: bool = False
    any_model: bool = False


#: Every client may sample; the admin scope is closed.
EVERYBODY = Access()


class Gateway:
    """An ASGI application over a sampler.

    Args:
        engine: answers requests.
        model: the name that clients know the model by; without slashes.
        access: who may do what.
    """

    def __init__(self, engine: Engine, model: str, access: Access = EVERYBODY) -> None:
        if "/" in model:
            raise StropError(f"The model's name {model!r} has a slash; clients put it into URLs, so use another.")
        self.engine, self.model, self.access = engine, model, access
        self._responses: OrderedDict[tuple[str, str], list[Message]] = OrderedDict()
        # A router and no more: endpoints answer their own errors, and each layer around it costs a call its time.
        self.app = Router([*self._routes(""), *self._routes("/attempts/{attempt:path}"), *admin_routes(self)])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI entry point."""
        await self.app(scope, receive, send)

    def _routes(self, prefix: str) -> list[Route]:
        text = self.engine.text
        completion = _Api(
            self, "completions", lambda body, mark, _: completions.read(body, mark, text), completions.write
        )
        generate = _Api(
            self,
            "generate",
            lambda body, mark, _: completions.read_generate(body, mark, text),
            completions.write_generate,
        )
        chats = _Api(self, "chat", lambda body, mark, _: chat.read(body, mark), chat.write, chat.Events)
        messages = _Api(
            self, "messages", lambda body, mark, _: anthropic.read(body, mark), anthropic.write, anthropic.Events, True
        )
        answers = _Api(self, "responses", self._read_responses, responses.write, responses.Events, True)
        completion.events = completions.Events
        post: list[tuple[str, Callable[..., Any]]] = [
            ("/v1/chat/completions", chats),
            ("/v1/messages", messages),
            ("/v1/responses", answers),
            ("/v1/completions", completion),
            ("/inference/v1/generate", generate),
            ("/v1/messages/count_tokens", _Plain(self, self._count_tokens)),
            ("/tokenize", _Plain(self, self._tokenize)),
            ("/detokenize", _Plain(self, self._detokenize)),
        ]
        get = [("/v1/models", _Plain(self, self._models)), ("/v1/models/{model}", _Plain(self, self._model))]
        routes = [Route(prefix + path, endpoint, methods=["POST"]) for path, endpoint in post]
        routes += [Route(prefix + path, endpoint, methods=["GET"]) for path, endpoint in get]
        if not prefix:
            routes += [Route("/health", _health), Route("/metrics", self._metrics)]
        return routes

    def attempt_of(self, http: HttpRequest) -> Attempt | None:
        """The attempt that a call belongs to.

        Raises:
            RequestError: the caller may not call, or what names an attempt names no open one.
        """
        key = _key(http)
        attempt = self.engine.attempts.of_call(key, http.path_params.get("attempt"), http.headers)
        if attempt is not None and key == attempt.key:
            return attempt
        if self.access.api_key is not None and not _same(key, self.access.api_key):
            raise RequestError("The API key is missing or wrong.", status=401, code="invalid_api_key")
        if attempt is None and self.access.only_attempts:
            raise RequestError("This call belongs to no attempt.", status=401, code="attempt_missing")
        return attempt

    def check_model(self, body: Body) -> None:
        """Refuse a request for another model."""
        wanted = body.get("model")
        if wanted not in (None, "", self.model) and not self.access.any_model:
            raise RequestError(
                f"The model {wanted!r} does not exist here; there is {self.model!r}.",
                status=404,
                code="model_not_found",
                parameter="model",
            )

    def _read_responses(self, body: Body, mark: RetryMark, attempt: Attempt | None) -> Request:
        owner = attempt.id if attempt else ""
        previous = body.get("previous_response_id")
        known = self._responses.get((owner, str(previous)))
        return responses.read(body, mark, {} if known is None else {str(previous): known})

    def remember(self, body: Body, request: Request, answers: list[Answer], identity: str, owner: str) -> None:
        """Keep a conversation for the request that goes on from it."""
        if body.get("store") is False:
            return
        said = request.messages[1:] if body.get("instructions") else request.messages
        self._responses[owner, f"resp_{identity}"] = [*said, answers[0].message]
        if len(self._responses) > _KEPT_RESPONSES:
            self._responses.popitem(last=False)

    async def _count_tokens(self, body: Body) -> Any:
        messages, tools = anthropic.conversation(body)
        return {"input_tokens": len(self.engine.count_tokens(messages, tools))}

    async def _tokenize(self, body: Body) -> Any:
        if isinstance(body.get("prompt"), str):
            tokens = self.engine.text.encode(body["prompt"], special=bool(body.get("add_special_tokens", True)))
        elif isinstance(body.get("messages"), list):
            messages = [plain_message(message, f"messages[{n}]") for n, message in enumerate(body["messages"])]
            tools = [plain_tool(tool, f"tools[{n}]") for n, tool in enumerate(body.get("tools") or [])]
            opened = bool(body.get("add_generation_prompt", True))
            tokens = self.engine.renderer.render_ids(messages, tools=tools or None, add_generation_prompt=opened)
        else:
            raise RequestError("prompt: expected a string, or messages beside it")
        return {"count": len(tokens), "max_model_len": self.engine.sampler.max_context, "tokens": list(tokens)}

    async def _detokenize(self, body: Body) -> Any:
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise RequestError("tokens: expected a list of token ids", parameter="tokens")
        return {"prompt": self.engine.text.decode(tokens, keep_special=True)}

    async def _models(self, body: Body) -> Any:
        return {
            "object": "list",
            "data": [self._card()],
            "has_more": False,
            "first_id": self.model,
            "last_id": self.model,
        }

    async def _model(self, body: Body) -> Any:
        self.check_model(body)
        return self._card()

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "type": "model",
            "display_name": self.model,
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "strop",
            "max_model_len": self.engine.sampler.max_context,
        }

    async def _metrics(self, http: HttpRequest) -> Response:
        return Response(self.engine.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@dataclass(slots=True)
class _Api:
    """One API that samples: an endpoint for starlette."""

    gateway: Gateway
    name: str
    read: Callable[[Body, RetryMark, Attempt | None], Request]
    write: Write
    events: MakeEvents | None = None
    named_events: bool = False  # whether each event has an `event:` line, and the stream no `[DONE]`

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI entry point."""
        started = time.perf_counter()
        response = await guarded(HttpRequest(scope, receive), self._respond)
        await response(scope, receive, send)
        metrics = self.gateway.engine.metrics
        metrics.requests.labels(self.name, str(response.status_code)).inc()
        metrics.seconds.labels(self.name).observe(time.perf_counter() - started)

    async def _respond(self, http: HttpRequest) -> Response:
        gateway = self.gateway
        await gateway.engine.turnstile.enter()
        attempt = gateway.attempt_of(http)
        body = await read_body(http)
        gateway.check_model(body)
        request = self.read(body, _mark(http), attempt)
        identity = uuid.uuid4().hex
        if not body.get("stream"):
            answers = await self._answers(http, body, request, attempt, identity)
            return as_json(self.write(body, answers, identity, gateway.model, gateway.engine.text))
        if self.events is None:
            raise RequestError("stream: this endpoint has no events", parameter="stream")
        events = self.events(body, identity, gateway.model, gateway.engine.text)

        def answering(listener: Listener) -> Coroutine[Any, Any, list[Answer]]:
            return self._answers(http, body, request, attempt, identity, listener)

        return await EventResponse.begun(http, events, answering, named=self.named_events)

    async def _answers(
        self,
        http: HttpRequest,
        body: Body,
        request: Request,
        attempt: Attempt | None,
        identity: str,
        listener: Listener | None = None,
    ) -> list[Answer]:
        """The answers to a request, counted and remembered."""
        gateway, metrics = self.gateway, self.gateway.engine.metrics
        retries = attempt.retries if attempt else 0
        try:
            answers = await _unless_disconnected(http, gateway.engine.answer(request, attempt, listener))
        except AttemptError as error:
            metrics.failures.labels(error.kind.value).inc()
            raise
        if attempt and attempt.retries > retries:
            metrics.retries.inc()
        if self.name == "responses":
            gateway.remember(body, request, answers, identity, attempt.id if attempt else "")
        return answers


@dataclass(slots=True)
class _Plain:
    """One endpoint that samples nothing."""

    gateway: Gateway
    respond: Callable[[Body], Awaitable[Any]]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """ASGI entry point."""

        async def respond(http: HttpRequest) -> Response:
            self.gateway.attempt_of(http)
            body = await read_body(http) if http.method == "POST" else dict(http.path_params)
            self.gateway.check_model(body)
            return as_json(await self.respond(body))

        response = await guarded(HttpRequest(scope, receive), respond)
        await response(scope, receive, send)


async def guarded(http: HttpRequest, respond: Callable[[HttpRequest], Awaitable[Response]]) -> Response:
    """A response, whatever happens: errors in the form of the API that was called."""
    try:
        return await respond(http)
    except ClientDisconnect:
        return Response(status_code=499)
    except Exception as error:
        return _error(http, as_request_error(http, error), retry=False if isinstance(error, AttemptError) else None)


async def read_body(http: HttpRequest) -> Body:
    """The request's JSON object."""
    raw = await http.body()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"The body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    return body


def as_json(content: Any, status: int = 200) -> Response:
    """A JSON response."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def _unless_disconnected(http: HttpRequest, answering: Awaitable[list[Answer]]) -> list[Answer]:
    """Answer, and stop as soon as nobody is there to read it."""
    answerer = asyncio.current_task()
    assert answerer is not None  # a coroutine runs in a task
    gone = False

    async def watch() -> None:
        nonlocal gone
        await http.receive()
        gone = True
        answerer.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await answering
    except asyncio.CancelledError:
        if gone and answerer.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()


def _error(http: HttpRequest, error: RequestError, *, retry: bool | None = None) -> Response:
    response = as_json(error_body(http, error), error.status)
    if retry is not None or error.status == 409:  # OpenAI's and Anthropic's clients would try a 409 again
        response.headers["x-should-retry"] = "true" if retry else "false"
    return response


def _key(http: HttpRequest) -> str | None:
    """The key as OpenAI's clients send it, or Anthropic's."""
    authorization = http.headers.get("authorization", "")
    if authorization[:7].lower() == "bearer ":
        return authorization[7:].strip()
    return http.headers.get("x-api-key")


def _mark(http: HttpRequest) -> RetryMark:
    count = http.headers.get("x-stainless-retry-count", "0")
    return RetryMark(http.headers.get("idempotency-key"), int(count) if count.isdecimal() else 0)


def _same(given: str | None, wanted: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), wanted.encode())


def is_admin(http: HttpRequest, access: Access) -> bool:
    """Whether the caller holds the admin key."""
    return access.admin_key is not None and _same(_key(http), access.admin_key)


async def _health(http: HttpRequest) -> Response:
    return as_json({"status": "ok"})
