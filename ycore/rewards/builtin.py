"""The built-in rewards by name: plain functions in TRL's shape, `(prompts, completions, **columns) -> list`.

Not here: the functions themselves (`correctness`, `shape`), and how a name is looked up (`loading`).
"""

from collections.abc import Callable
from typing import NamedTuple

from ycore.rewards import correctness, shape

Reward = Callable[..., list[float | None]]

BUILTIN: dict[str, Reward] = {
    "exact_answer": correctness.exact_answer,
    "contains_answer": correctness.contains_answer,
    "math": correctness.math,
    "gym": correctness.gym,
    "format": shape.format,
    "length": shape.length,
    "repetition": shape.repetition,
    "overlong": shape.overlong,
}


class Library(NamedTuple):
    """A module that a built-in reward needs, and the command that brings it."""

    module: str
    install: str


LIBRARIES: dict[str, Library] = {
    "math": Library("math_verify", "pip install math-verify"),
    "gym": Library("reasoning_gym", "pip install 'ycore[gym]'"),
}
