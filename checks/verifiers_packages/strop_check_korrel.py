"""A scenario of the package korrel, through its own exporter to verifiers."""

import verifiers as vf
from korrel.exporters.verifiers import to_verifiers_env
from korrel.persona import Persona
from korrel.rubric import Rubric
from korrel.scenario import Scenario
from korrel.tools import MockTool

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


def right(completion, info, **kwargs) -> float:
    return float(info["answer"] in str(completion[-1].content))


def load_environment() -> vf.Environment:
    scenario = Scenario(
        id="sum",
        system="Use the tool.",
        persona=Persona(goal="know the sum"),
        opening_message="What is 20 + 22?",
        tools=[MockTool(name="add", schema=ADD, respond=lambda given, state: given["a"] + given["b"])],
        info={"answer": "42"},
        rubric=Rubric([right]),
    )
    return to_verifiers_env(scenario, persona=None)
