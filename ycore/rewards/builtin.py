"""The built-in rewards by name: plain functions in TRL's shape, `(prompts, completions, **columns) -> list`.

Not here: the functions themselves (`correctness`, `shape`, `agreement`), how a name is looked up (`loading`), and
`reference_probability`, which no function of texts can give: it asks the policy (`controller.reference_scorer`).
"""

from collections.abc import Callable
from typing import NamedTuple

from ycore.rewards import agreement, correctness, shape

Reward = Callable[..., list[float | None]]

BUILTIN: dict[str, Reward] = {
    "exact_answer": correctness.exact_answer,
    "contains_answer": correctness.contains_answer,
    "numeric_answer": correctness.numeric_answer,
    "math": correctness.math,
    "gym": correctness.gym,
    "format": shape.format,
    "length": shape.length,
    "repetition": shape.repetition,
    "overlong": shape.overlong,
    "similarity": agreement.similarity,
}


class Library(NamedTuple):
    """A module that a built-in reward needs, and the command that brings it."""

    module: str
    install: str


LIBRARIES: dict[str, Library] = {
    "math": Library("math_verify", "pip install math-verify"),
    "gym": Library("reasoning_gym", "pip install 'ycore[gym]'"),
}
