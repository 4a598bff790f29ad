"""Functions that score completions, and the sandboxed worker processes in which they run. Imports nothing heavy."""
