"""A scenario of the package korrel, through its own exporter to verifiers."""

import verifiers as vf
from korrel.exporters.verifiers import to_verifiers_env
from korrel.persona import Persona
from korrel.rubric import Rubric
from korrel.scenario import Scenario


def right(completion, info, **kwargs) -> float:
    return float(info["answer"] in str(completion[-1].content))


def load_environment() -> vf.Environment:
    scenario = Scenario(
        id="sum",
        system="Be brief.",
        persona=Persona(goal="know the sum"),
        opening_message="What is 20 + 22?",
        info={"answer": "42"},
        rubric=Rubric([right]),
    )
    return to_verifiers_env(scenario, persona=None)
