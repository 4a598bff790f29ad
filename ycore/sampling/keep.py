"""Which groups can teach: those whose rewards differ (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

Not here: how many more to draw (`demand`).
"""

from collections.abc import Sequence

from ycore.types import Group, Score

TOLERANCE = 1e-6
"""Rewards nearer than this are equal: a reward of floats is seldom equal to the bit."""


def total_reward(scores: Sequence[Score], weights: Sequence[float]) -> float | None:
    """The weighted sum over the sources that answered; None when none did."""
    known = [weight * score.value for weight, score in zip(weights, scores, strict=True) if score.value is not None]
    return sum(known) if known else None


def can_teach(group: Group, weights: Sequence[float], *, tolerance: float = TOLERANCE) -> bool:
    """Whether any advantage of the group would be other than zero: two scored completions whose rewards differ.

    Where the prompt's greedy completion is the baseline, one completion that differs from it is enough.
    """
    totals = [total_reward(scores, weights) for scores in group.scores_GR]
    known = [total for total in totals if total is not None]
    if group.greedy_scores_R is not None:
        baseline = total_reward(group.greedy_scores_R, weights)
        return baseline is not None and any(abs(total - baseline) > tolerance for total in known)
    return len(known) > 1 and max(known) - min(known) > tolerance
