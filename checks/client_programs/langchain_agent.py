"""LangChain: its own agent with a tool, over OpenAI's and over Anthropic's API."""

import os

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

name = os.environ["STROP_MODEL"]


@tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


for model in (ChatOpenAI(model=name, max_tokens=64), ChatAnthropic(model=name, max_tokens=64)):
    agent = create_agent(model, [add], system_prompt="Be brief.")
    try:
        result = agent.invoke({"messages": [("user", "What is 20 + 22?")]}, {"recursion_limit": 9})
        print(result["messages"][-1].content or "(nothing)")
    except Exception as error:
        if type(error).__name__ not in ("GraphRecursionError", "ToolInvocationError"):
            raise
        print("agent failed:", type(error).__name__)
