"""Advise on a run whose reward did not rise."""

import math
from collections.abc import Sequence
from statistics import fmean, variance

from ycore.config.learner_rules import teaches_alone
from ycore.config.schema import RunConfig
from ycore.run.metrics import REWARD, Row, number

_MIN_STEPS = 12  # a third of fewer steps has no spread to speak of
_ENOUGH_TEACH = 0.1  # of the groups drawn: below this share the prompts are to blame, not the rate


def advice(metrics: Sequence[Row], config: RunConfig) -> str | None:
    """Return a sentence where the reward did not rise from the first third of the steps to the last; None where it did.

    A change counts where it is more than two standard errors of the difference of the two means. Nothing is said of
    short runs, and of runs whose rewards do not show what was learned: from a teacher; with constraints, which may cost
    reward; with a curriculum, whose prompts become harder.
    """
    rows = [row for row in metrics if number(row, *REWARD) is not None]
    is_constrained = any(reward.constraint for reward in config.rewards)
    if config.algorithm == "distill" or is_constrained or config.sampling.curriculum:
        return None
    if len(rows) < _MIN_STEPS:
        return None
    rewards = [number(row, *REWARD) or 0.0 for row in rows]
    third = len(rewards) // 3
    early, late = rewards[:third], rewards[-third:]
    change = fmean(late) - fmean(early)
    error = math.sqrt((variance(early) + variance(late)) / third)
    if change > 2 * error:
        return None
    ends = f"{fmean(early):.3f} -> {fmean(late):.3f}, first and last third of the steps"
    rate = max(number(row, "learning_rate") or 0.0 for row in rows)
    if change < -2 * error:
        way_out = f"--learning-rate {rate / 4:.1e}, or --beta 0.05 to stay near the first policy"
        return f"the reward fell ({ends}): try {way_out}"
    flat = f"the reward did not rise ({ends})"
    num_taught, num_drawn = _count_groups(rows, config)
    if num_taught < _ENOUGH_TEACH * num_drawn:
        return (
            f"{flat}: rewards differ within only {num_taught:.0f} of {num_drawn:.0f} groups; "
            "try prompts that the model solves sometimes, or a larger --group-size"
        )
    return (
        f"{flat}, although groups taught: try --learning-rate {4 * rate:.1e}, and then more --steps"
    )


def _count_groups(rows: Sequence[Row], config: RunConfig) -> tuple[float, float]:
    """Return how many groups taught, and how many were drawn; all of them where a completion teaches by itself."""
    size = config.prompts_per_step
    num_drawn = sum(number(row, "ycore/sampling/drawn") or size for row in rows)
    if teaches_alone(config):
        return num_drawn, num_drawn
    num_taught = sum(size * (1 - (number(row, "frac_reward_zero_std") or 0.0)) for row in rows)
    return num_taught, num_drawn
