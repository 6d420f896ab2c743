"""verifiers' own ReasoningGymEnv over one of reasoning-gym's tasks."""

import verifiers as vf
from verifiers.legacy.envs.integrations.reasoninggym_env import ReasoningGymEnv


def load_environment(gym: str = "basic_arithmetic", examples: int = 10) -> vf.Environment:
    return ReasoningGymEnv(gym=gym, num_train_examples=examples, num_eval_examples=examples)
