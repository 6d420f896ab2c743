"""How results, files and errors travel as JSON between the HTTP server and its client. Bytes are base64."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from strop.errors import ConfigError
from strop.sandboxes.errors import FileProblem, ResourceExhausted, SandboxDead, SandboxFailure, SandboxStall
from strop.sandboxes.sandbox import CellResult, Chunk, ExecResult, FileInfo, Limits

Json = dict[str, Any]
_Plain = TypeVar("_Plain", ExecResult, CellResult, Chunk, FileInfo, Limits)

#: HTTP status of each error, the most special first.
STATUS: Mapping[type[Exception], int] = {
    SandboxDead: 410,
    ResourceExhausted: 503,
    SandboxStall: 504,
    SandboxFailure: 500,
    FileProblem: 422,
    ConfigError: 400,
    ValueError: 400,
}


def to_json(value: ExecResult | CellResult | Chunk | FileInfo | Limits) -> Json:
    """A plain object as JSON values."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return {name: base64.b64encode(item).decode() if isinstance(item, bytes) else item for name, item in fields.items()}


def from_json(kind: type[_Plain], data: Json) -> _Plain:
    """The object again.

    Raises:
        ValueError: fields that it does not have, or of the wrong type.
    """
    known = {field.name: field.type for field in dataclasses.fields(kind)}
    if not isinstance(data, dict) or set(data) - set(known):
        raise ValueError(f"{data!r} is no {kind.__name__}: it has {', '.join(known)}")
    try:
        fields: dict[str, Any] = {
            name: base64.b64decode(item, validate=True) if known[name] == "bytes" else item
            for name, item in data.items()
        }
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{data!r} is no {kind.__name__}: {error}") from None


def error_to_json(error: Exception) -> tuple[int, Json]:
    """(HTTP status, body) of an error that the caller should see."""
    for kind, status in STATUS.items():
        if isinstance(error, kind):
            if isinstance(error, FileProblem):
                return status, {"error": "FileProblem", "path": error.path, "reason": error.reason}
            reason = error.reason if isinstance(error, SandboxFailure) else str(error)
            return status, {"error": kind.__name__, "reason": reason}
    return 500, {"error": "SandboxFailure", "reason": f"the server failed: {type(error).__name__}"}


def error_from_json(body: Json) -> Exception:
    """The error again; anything unknown is a failure of the sandbox."""
    reason = str(body.get("reason", "no reason was given"))
    if body.get("error") == "FileProblem":
        return FileProblem(str(body.get("path", "")), reason)
    kinds: dict[str, type[SandboxFailure] | type[ValueError]] = {
        "SandboxDead": SandboxDead,
        "ResourceExhausted": ResourceExhausted,
        "SandboxStall": SandboxStall,
        "ValueError": ValueError,
        "ConfigError": ValueError,
    }
    return kinds.get(str(body.get("error")), SandboxFailure)(reason)
