"""The OpenAI Agents SDK: an agent with a function tool, over Responses, over chat completions, and streamed."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from openai import AsyncOpenAI

set_tracing_disabled(True)
name = os.environ["STROP_MODEL"]


@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


async def main() -> None:
    client = AsyncOpenAI()
    settings = ModelSettings(max_tokens=64)
    for model in (OpenAIResponsesModel(name, client), OpenAIChatCompletionsModel(name, client)):
        agent = Agent(name="Adder", instructions="Be brief.", tools=[add], model=model, model_settings=settings)
        for streamed in (False, True):
            try:
                if streamed:
                    running = Runner.run_streamed(agent, "What is 20 + 22?", max_turns=4)
                    async for _ in running.stream_events():
                        pass
                    print(running.final_output)
                else:
                    print((await Runner.run(agent, "What is 20 + 22?", max_turns=4)).final_output)
            except AgentsException as error:  # the model's own failure, a tool that isn't there for example
                print("agent failed:", type(error).__name__)


asyncio.run(main())
