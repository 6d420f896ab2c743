"""The loops: reinforcement learning and supervised fine-tuning, and the collector that keeps attempts in flight."""
