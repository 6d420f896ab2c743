"""Environments that live in other processes: another Python, another virtual environment, another machine."""

from strop.environments.workers.environment import WorkerEnvironment, WorkerSession
from strop.environments.workers.pool import ModelAccess, WorkerPool

__all__ = ["ModelAccess", "WorkerEnvironment", "WorkerPool", "WorkerSession"]
