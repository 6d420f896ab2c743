"""smolagents: its tool-calling agent and its code agent."""

import os

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.utils import AgentError


@tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    return a + b


model = OpenAIServerModel(
    os.environ["STROP_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    max_tokens=64,
)
for kind in (ToolCallingAgent, CodeAgent):
    agent = kind(tools=[add], model=model, max_steps=3, verbosity_level=0)
    try:
        print(agent.run("What is 20 + 22?"))
    except AgentError as error:  # the model's own failure
        print("agent failed:", type(error).__name__)
