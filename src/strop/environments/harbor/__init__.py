"""Task folders in Harbor's format (also Terminal-Bench 2's), run in sandboxes of strop; the package harbor is not needed."""

from strop.environments.harbor.environment import Harbor

__all__ = ["Harbor"]
