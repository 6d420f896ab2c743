"""What is attempted and how it is scored. Nothing heavy is imported until an environment that needs it is loaded."""

from strop.environments.environment import Demonstration, Environment, ProgramResult, Session, ToolOutcome
from strop.environments.registry import BUILT_IN, load_environment

__all__ = ["BUILT_IN", "Demonstration", "Environment", "ProgramResult", "Session", "ToolOutcome", "load_environment"]
