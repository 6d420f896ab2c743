"""HTTP over a sampler: OpenAI chat completions, completions and responses, and Anthropic messages, each call recorded
token by token into the attempt that it belongs to. Needs `pip install "strop[gateway]"`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.errors import StropError

if TYPE_CHECKING:
    from strop.gateway.app import Access, Gateway
    from strop.gateway.attempts import Attempt, Attempts
    from strop.gateway.engine import Engine
    from strop.gateway.recording import Recording
    from strop.gateway.server import running, serve, shared

__all__ = ["Access", "Attempt", "Attempts", "Engine", "Gateway", "Recording", "running", "serve", "shared"]

_HOME = {
    "Access": "app",
    "Attempt": "attempts",
    "Attempts": "attempts",
    "Engine": "engine",
    "Gateway": "app",
    "Recording": "recording",
    "running": "server",
    "serve": "server",
    "shared": "server",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for: HTTP libraries are an extra, and importing `strop` must not need them."""
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] == "strop":
            raise
        raise StropError(
            f'The gateway needs {error.name!r}, which is missing: pip install "strop[gateway]".'
        ) from error
