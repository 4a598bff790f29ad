"""The tool of the recipe `agent-quickstart`."""


def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: The first number.
        y: The second number.
    """
    return x + y
