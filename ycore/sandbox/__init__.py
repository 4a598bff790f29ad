"""Confined processes: where reward functions and programs that a model wrote run."""
