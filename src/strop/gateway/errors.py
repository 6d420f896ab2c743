"""The error that a request ends in when the caller, not the system, got something wrong, and what the client is told of
any error, in the form of the API that it called.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from strop.errors import AttemptError, StropError

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

_log = logging.getLogger("strop.gateway")


class RequestError(StropError):
    """A request can't be answered as it was asked.

    Args:
        message: what is wrong and what would be right, for the reader of the client's log.
        status: HTTP status.
        code: short stable name, as OpenAI's API has them ("context_length_exceeded", …).
        parameter: the part of the request that is wrong, for example "messages[3].content".
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_value", parameter: str = "") -> None:
        self.message, self.status, self.code, self.parameter = message, status, code, parameter
        super().__init__(message)


def refused(parameter: str, why: str) -> RequestError:
    """A parameter asks for what can't be done here; answering as if it weren't there would be a lie."""
    return RequestError(f"{parameter}: {why}", code="unsupported_parameter", parameter=parameter)


def as_request_error(http: HttpRequest, error: Exception) -> RequestError:
    """What a client is told of whatever went wrong; a bug goes to the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, AttemptError):  # of the system: the attempt is lost, and asking again is no use
        return RequestError(str(error), status=503, code="system_failure")
    _log.error("a request to %s met a bug", http.url.path, exc_info=error)
    return RequestError("The gateway met a bug; its log says more.", status=500, code="internal_error")


def error_body(http: HttpRequest, error: RequestError) -> dict[str, Any]:
    """An error in the form of the API that was called."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    if http.url.path.endswith(("/messages", "/count_tokens")):
        names = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        name = names.get(error.status, kind if error.status < 500 else "api_error")
        return {"type": "error", "error": {"type": name, "message": error.message}}
    fields = {"message": error.message, "type": kind, "param": error.parameter or None, "code": error.code}
    return {"error": fields}
