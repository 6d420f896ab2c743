"""How the model acts on a task: a single reply, a loop of tool calls, an outside program, an environment's own harness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.agents.agent import Agent
from strop.agents.single_reply import SingleReply
from strop.agents.tool_loop import ToolLoop

if TYPE_CHECKING:  # settings are pydantic models, which take a fifth of a second to import
    from strop.config import AgentSettings


def make_agent(asked: AgentSettings) -> Agent:
    """The agent that a recipe names.

    Raises:
        StropError: it needs the gateway, which is an extra that isn't installed.
    """
    if asked.kind == "single_reply":
        return SingleReply()
    if asked.kind == "tool_loop":
        return ToolLoop(max_turns=asked.max_turns)
    if asked.kind == "own_harness":
        from strop.agents.own_harness import OwnHarness

        return OwnHarness(asked.token_budget, asked.dropped_reasoning, asked.allow_constrained_sampling)
    from strop.agents.program import Program

    return Program(
        asked.command,
        where=asked.where,
        seconds=asked.seconds,
        token_budget=asked.token_budget,
        variables=asked.variables,
        files=tuple(asked.files),
        dropped_reasoning=asked.dropped_reasoning,
        allow_constrained=asked.allow_constrained_sampling,
    )


__all__ = ["Agent", "SingleReply", "ToolLoop", "make_agent"]
