"""`reference_probability`: how likely the policy finds the right answer after its own reasoning (RLPR, 2506.18254).

It needs no verifier, only reference answers, also those that no rule can compare. The numbers are the policy's, so it
is scored in the controller (`controller.reference_scorer`), not in a worker process.

Not here: asking the policy.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from ycore.config.schema import RewardConfig, Strict
from ycore.errors import RewardError

REFERENCE = "reference_probability"

_PLACES = ("<answer>", "\\boxed{", "</think>")


class Reference(Strict):
    """Its arguments."""

    debias: bool = True
    """Subtract what the policy gives the answer without any reasoning, and cut at 0: equation 4 of the paper."""

    bridge: str = "\nAnswer: "
    """What stands before the answer where the completion itself marks no place for it."""


def is_reference(spec: RewardConfig) -> bool:
    return spec.reward == REFERENCE


def reference_of(spec: RewardConfig) -> Reference:
    """Its arguments, checked."""
    try:
        return Reference.model_validate(spec.args)
    except ValidationError as problem:
        detail = problem.errors(include_url=False)[0]
        key = ".".join(str(part) for part in detail["loc"])
        takes = ", ".join(Reference.model_fields)
        raise RewardError(f"reward {REFERENCE!r}: argument {key}: {detail['msg']}; it takes {takes}") from None


def check_reference(spec: RewardConfig, columns: Iterable[str]) -> None:
    """RewardError where it could not score this dataset."""
    reference_of(spec)
    known = sorted(columns)
    if "answer" not in known:
        raise RewardError(
            f"reward {REFERENCE!r} asks for the column 'answer', and the dataset has {', '.join(known) or 'no columns'}"
            "; name the one that holds the right answer with --answer-column"
        )


def before_the_answer(text: str, *, bridge: str) -> str:
    """The completion up to where its answer begins: after the last `<answer>`, `\\boxed{` or `</think>`, in this order.

    Where there is none of them, the whole text is reasoning, and `bridge` asks for the answer.
    """
    for place in _PLACES:
        before, found, after = text.rpartition(place)
        if found:
            return before + found + after[: len(after) - len(after.lstrip())]
    return text + bridge


def reference_reward(logprobs: Sequence[float], bare: Sequence[float] | None) -> float:
    """The mean probability of the answer's tokens, less that without reasoning (`bare`), cut to 0 and 1.

    The mean of probabilities and not their product: one unlikely token would make an answer worthless (section 3.2).
    """
    reward = _mean_probability(logprobs)
    return reward if bare is None else min(1.0, max(0.0, reward - _mean_probability(bare)))


def as_answer(value: Any) -> str:
    """A row's right answer as it is scored: after the last `####`, as for the other rewards; empty where none is."""
    from ycore.rewards.answers import gold_of

    return gold_of(value)


def _mean_probability(logprobs: Sequence[float]) -> float:
    return math.fsum(math.exp(logprob) for logprob in logprobs) / len(logprobs)
