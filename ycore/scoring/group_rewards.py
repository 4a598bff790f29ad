"""The reward of a completion and whether a group can teach: one rule for sampling, training and every display.

`_G` are the completions of a group, `_R` the reward sources; None is a reward that nothing gave.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING

from ycore.config.schema import RewardConfig, RunConfig
from ycore.scoring.constraints import Constraints
from ycore.types import Group, Score

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-6
"""Rewards nearer than this count as equal: sums of floats are seldom equal to the bit."""
_TRL_EPSILON = 1e-4
"""TRL adds this to a standard deviation before it divides."""

Rewards = Sequence[float | None]


def total_reward(scores_R: Sequence[Score], weights_R: Sequence[float]) -> float | None:
    """Return the weighted sum over the reward sources that gave a value; None when none did."""
    return weighted_sum([score.value for score in scores_R], weights_R)


def weighted_sum(rewards_R: Rewards, weights_R: Sequence[float]) -> float | None:
    """Return the weighted sum over the sources that gave a reward; None when none did.

    A source of weight 0 is measured only: it is no reward where the others gave none, unless there are no others.
    """
    weighs_any = any(weights_R)
    products = [
        weight * reward
        for weight, reward in zip(weights_R, rewards_R, strict=True)
        if reward is not None and (weight or not weighs_any)
    ]
    return sum(products) if products else None


def weighted_sums(rewards_NR: "Tensor", weights_R: "Tensor") -> "Tensor":
    """Return `weighted_sum` of each row, (N, R) -> (N,); NaN stands for None."""
    measured_only = (weights_R == 0) & bool(weights_R.any())
    rewards_NR = rewards_NR.masked_fill(measured_only, math.nan)
    sums_N = (rewards_NR * weights_R).nansum(dim=1)
    return sums_N.masked_fill(rewards_NR.isnan().all(dim=1), math.nan)


def rewards_differ(rewards_G: Iterable[float | None], *, min_std: float = 0.0) -> bool:
    """Whether two rewards differ by more than `TOLERANCE`, and the rewards deviate by `min_std` or more."""
    known = [reward for reward in rewards_G if reward is not None]
    if len(known) < 2:
        return False
    return max(known) - min(known) > TOLERANCE and pstdev(known) >= min_std


def normalizes_each_reward(config: RunConfig) -> bool:
    """Whether advantages are TRL's from rewards that are normalized one by one (GDPO, arXiv 2601.05242)."""
    return (
        config.trl.get("multi_objective_aggregation") == "normalize_then_sum"
        and config.uses_trl_advantages
        and not any(reward.constraint for reward in config.rewards)
    )


def normalized_sums(
    rewards_GR: Sequence[Rewards],
    weights_R: Sequence[float],
    min_stds_R: Sequence[float] | None = None,
) -> list[float | None]:
    """Return each completion's weighted sum of rewards that were normalized in their group, each source by itself.

    This is TRL's `normalize_then_sum`, but that the rewards of a source that do not differ are 0.
    """
    sums_G = [0.0] * len(rewards_GR)
    for source, weight in enumerate(weights_R):
        rewards_G = [rewards_R[source] for rewards_R in rewards_GR]
        min_std = 0.0 if min_stds_R is None else min_stds_R[source]
        if not rewards_differ(rewards_G, min_std=min_std):
            continue
        known = [reward for reward in rewards_G if reward is not None]
        mean, deviation = fmean(known), stdev(known) + _TRL_EPSILON
        for index, reward in enumerate(rewards_G):
            if reward is not None:
                sums_G[index] += weight * (reward - mean) / deviation
    is_scored = [any(reward is not None for reward in rewards_R) for rewards_R in rewards_GR]
    return [total if scored else None for total, scored in zip(sums_G, is_scored, strict=True)]


def min_stds(
    rewards: Sequence[RewardConfig], share: float, *, default_range: float = 0.0
) -> tuple[float, ...]:
    """Return the standard deviation below which each source's rewards do not teach: a share of the reward's range.

    `default_range`: of a reward that declares none.
    """
    ranges = [
        default_range if reward.range is None else reward.range[1] - reward.range[0]
        for reward in rewards
    ]
    return tuple(share * reward_range for reward_range in ranges)


def min_std_of_sum(min_stds_R: Sequence[float], weights_R: Sequence[float]) -> float:
    return math.fsum(
        abs(weight) * min_std for weight, min_std in zip(weights_R, min_stds_R, strict=True)
    )


def compared_rewards(
    group: Group, weights_R: Sequence[float], constraints: Constraints | None = None
) -> list[float | None]:
    """Return each completion's reward as it is compared with the others of its group."""
    totals = [total_reward(scores_R, weights_R) for scores_R in group.scores_GR]
    return totals if constraints is None else constraints.compared(totals, group.scores_GR)


def can_teach(
    group: Group,
    weights_R: Sequence[float],
    *,
    alone: bool = False,
    min_stds_R: Sequence[float] | None = None,
    constraints: Constraints | None = None,
    normalizes_each: bool = False,
) -> bool:
    """Whether any advantage of the group differs from zero (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).

    Args:
        alone: one scored completion is enough (`RunConfig.teaches_alone`).
        min_stds_R: rewards of a source that deviate less do not teach (`min_stds`).
        constraints: the run's, which a completion may break.
        normalizes_each: see `normalizes_each_reward`.

    Where the prompt's greedy completion is the baseline (ReMax), one completion whose reward differs from the
    baseline's is enough. Rewards of turns that differ teach too.
    """
    totals = compared_rewards(group, weights_R, constraints)
    known = [total for total in totals if total is not None]
    if group.greedy_scores_R is not None:
        baseline = total_reward(group.greedy_scores_R, weights_R)
        return baseline is not None and any(
            rewards_differ([total, baseline]) for total in known
        )
    if alone or len(known) < 2:
        return alone and bool(known)
    if normalizes_each:
        rewards_GR = [[score.value for score in scores_R] for scores_R in group.scores_GR]
        return rewards_differ(normalized_sums(rewards_GR, weights_R, min_stds_R))
    min_std = 0.0 if min_stds_R is None else min_std_of_sum(min_stds_R, weights_R)
    turn_rewards = [
        rewards
        for rewards, total in zip(group.turn_rewards, totals, strict=True)
        if total is not None
    ]
    return any(
        rewards_differ(rewards, min_std=min_std)
        for rewards in (known, *zip_longest(*turn_rewards))
    )
