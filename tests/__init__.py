"""The tests; a package, so that `python -m tests.chaos` runs from the repository root."""
