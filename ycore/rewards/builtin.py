"""The built-in rewards by name: plain functions in TRL's shape, `(prompts, completions, **columns) -> list`.

Not here: the functions themselves (`correctness`, `shape`, `agreement`), how a name is looked up (`loading`), and
`reference_probability`, which no function of texts can give: it asks the policy (`controller.reference_scorer`).
"""

from collections.abc import Callable
from typing import NamedTuple

from ycore.rewards.agreement import similarity
from ycore.rewards.correctness import contains_answer, exact_answer, gym, math, numeric_answer
from ycore.rewards.shape import format, length, overlong, repetition

Reward = Callable[..., list[float | None]]

BUILTIN: dict[str, Reward] = {
    "exact_answer": exact_answer,
    "contains_answer": contains_answer,
    "numeric_answer": numeric_answer,
    "math": math,
    "gym": gym,
    "format": format,
    "length": length,
    "repetition": repetition,
    "overlong": overlong,
    "similarity": similarity,
}


class Library(NamedTuple):
    """A module that a built-in reward needs, and the command that brings it."""

    module: str
    install: str


LIBRARIES: dict[str, Library] = {
    "math": Library("math_verify", "pip install math-verify"),
    "gym": Library("reasoning_gym", "pip install 'ycore[gym]'"),
}
