"""NeMo Gym, both ways: its resources servers as environments of strop, and strop's environments as resources servers.

Its contract is HTTP: `/seed_session`, one path per tool, `/verify`; a data set is JSON lines. The package nemo-gym is
not needed on either side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.environments.nemo_gym.environment import NemoGym
from strop.environments.nemo_gym.rows import row_of

if TYPE_CHECKING:
    from strop.environments.nemo_gym.server import resources_server


def __getattr__(name: str) -> Any:
    """What needs an HTTP server is loaded when it is asked for."""
    if name == "resources_server":
        from strop.environments.nemo_gym.server import resources_server

        return resources_server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["NemoGym", "resources_server", "row_of"]
