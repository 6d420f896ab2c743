"""How the model acts on a task: a single reply, or a loop of tool calls."""

from strop.agents.agent import Agent
from strop.agents.single_reply import SingleReply
from strop.agents.tool_loop import ToolLoop

__all__ = ["Agent", "SingleReply", "ToolLoop"]
