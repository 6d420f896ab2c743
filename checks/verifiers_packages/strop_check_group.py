"""verifiers' own EnvGroup: tasks of two environments, each scored by its own rubric."""

import verifiers as vf
from strop_check_single import load_environment as single
from strop_check_tools import load_environment as tools


def load_environment() -> vf.Environment:
    return vf.EnvGroup(envs=[single(), tools()], env_names=["single", "tools"])
