"""strop: post-training for agentic language models. Importing it loads no torch; each room is imported by name."""

__version__ = "0.1.0"
