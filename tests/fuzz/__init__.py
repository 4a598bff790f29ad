"""Hostile input: damaged and made-up files, replies and texts, from a fixed seed. `python -m tests.fuzz --help`."""
