"""The error that a request ends in when the caller, not the system, got something wrong. How each API writes it down
is `strop.gateway.app`'s business.
"""

from __future__ import annotations

from strop.errors import StropError


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
