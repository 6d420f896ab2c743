"""Writing Python that hidden tests check, graded in a fresh sandbox."""

from strop.environments.code.environment import Code

__all__ = ["Code"]
