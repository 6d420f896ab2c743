"""Environments of strop inside other frameworks: a verifiers environment, an inspect_ai task.

Each file is imported where its framework is installed, beside strop. How NeMo Gym gets them is in
`strop.environments.nemo_gym.server`.
"""
