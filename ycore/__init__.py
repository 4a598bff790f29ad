"""ycore: reinforcement learning for language models from one command. Imports nothing heavy."""

__version__ = "0.1.0"
