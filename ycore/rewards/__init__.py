"""Plain functions that score completions, and the worker processes they run in. Imports nothing heavy.

Not here: judges and reward models (they are engines), and what a round does with a score.
"""
