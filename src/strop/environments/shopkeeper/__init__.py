"""Questions about a shop that need several tool calls, with tools that sometimes fail."""

from strop.environments.shopkeeper.environment import Shopkeeper

__all__ = ["Shopkeeper"]
