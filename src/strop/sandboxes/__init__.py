"""Where model-written code runs: isolated places, cheap enough for thousands at once."""
