"""How the model acts on a task: a single reply, or a loop of tool calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.agents.agent import Agent
from strop.agents.single_reply import SingleReply
from strop.agents.tool_loop import ToolLoop

if TYPE_CHECKING:  # settings are pydantic models, which take a fifth of a second to import
    from strop.config import AgentSettings


def make_agent(asked: AgentSettings) -> Agent:
    """The agent that a recipe names."""
    return SingleReply() if asked.kind == "single_reply" else ToolLoop(max_turns=asked.max_turns)


__all__ = ["Agent", "SingleReply", "ToolLoop", "make_agent"]
