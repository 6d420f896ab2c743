"""Models in this process: the policy and its weights, loading and saving. The door imports nothing heavy."""
