"""How completions are written: turns, tools, environments and agents."""


class ToolRefused(Exception):
    """A tool or an environment cannot be used; the message says why, in one line."""
