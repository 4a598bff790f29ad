"""The library: what Python users call, and what the command calls."""
