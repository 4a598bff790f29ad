"""The reward of a completion and whether a group can teach: one rule for sampling, training and every display.

`_G` are the completions of a group, `_R` the reward sources; None is a reward that nothing gave.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING, NamedTuple, Self

from ycore.advantages import TOLERANCE
from ycore.config.schema import ConstraintSettings, RunConfig, ScoredConfig
from ycore.rewards.loading import reward_names
from ycore.types import Group, Score

if TYPE_CHECKING:
    from torch import Tensor

_TRL_EPSILON = 1e-4
"""TRL adds this to a standard deviation before it divides."""

_LEAST_KEPT = 1e-30
"""The gated reward of what breaks no constraint, where its sigmoid would be 0."""

Rewards = Sequence[float | None]


class Constraint(NamedTuple):
    """`source` is its place among the reward sources; it holds where that gives `least` or more."""

    source: int
    name: str
    least: float
    limit: float  # share of the completions that may break it

    def is_broken(self, rewards_R: Rewards) -> bool | None:
        """None where it could not be scored."""
        value = rewards_R[self.source]
        # The trainer's rewards are in float32.
        return None if value is None else value < self.least - TOLERANCE * max(1, abs(value))


def constraints_of(config: RunConfig) -> list[Constraint]:
    """The rewards that are constraints."""
    named = enumerate(zip(reward_names(config.rewards), config.rewards, strict=True))
    return [
        Constraint(source, name, spec.least, spec.limit)
        for source, (name, spec) in named
        if spec.constraint
    ]


class Constraints:
    """The constraints of a run (CGPO, arXiv 2409.20370): rewards that a completion must reach, beside the others.

    By `gate` a completion that breaks one is worth less than any that breaks none. By `lagrangian` it costs each
    constraint's weight, which grows while more completions break it than its limit, and else falls to 0 at the least.
    A completion whose constraint could not be scored breaks nothing and teaches nothing: it has no reward. All ranks
    have the same weights, because they learn from the sums over all ranks.

    Example: `Constraints([Constraint(1, "format", 1.0, 0.05)], settings).compared([0.5, 1.0], group.rewards_GR)`.
    """

    def __init__(self, constraints: Sequence[Constraint], settings: ConstraintSettings) -> None:
        self.held = tuple(constraints)
        self.by = settings.by
        self.weights = [settings.start] * len(self.held)
        self._rate = settings.rate
        self._counts = [0] * (2 * len(self.held))

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Build from a training config; None without constraints."""
        constraints = constraints_of(config)
        if not constraints or config.algorithm == "eval":
            return None
        return cls(constraints, config.constraints)

    def state_dict(self) -> list[float]:
        return list(self.weights)

    def load_state_dict(self, state: Sequence[float]) -> None:
        self.weights = list(state)

    def _broken(self, rewards_R: Rewards) -> list[bool | None]:
        return [constraint.is_broken(rewards_R) for constraint in self.held]

    def compared(self, totals_G: Rewards, rewards_GR: Sequence[Rewards]) -> list[float | None]:
        """Return the rewards of a group's completions as they are compared with one another, and trained with.

        By `gate` that is sigmoid(r - mean r), or 0 for what breaks a constraint (eqs. 5 and 8).
        """
        known = without_none(totals_G)
        baseline = fmean(known) if known else 0.0
        rewards_G: list[float | None] = []
        for total, rewards_R in zip(totals_G, rewards_GR, strict=True):
            broken = self._broken(rewards_R)
            if total is None:
                rewards_G.append(None)
            elif self.by == "gate" and any(broken):
                rewards_G.append(0.0)
            elif None in broken:
                rewards_G.append(None)
            elif self.by == "gate":
                rewards_G.append((1 + math.tanh((total - baseline) / 2)) / 2 or _LEAST_KEPT)
            else:
                weights = zip(self.weights, broken, strict=True)
                rewards_G.append(
                    total - sum(weight for weight, is_broken in weights if is_broken)
                )
        return rewards_G

    def count(self, group: Group) -> None:
        for rewards_R in group.rewards_GR:
            for index, is_broken in enumerate(self._broken(rewards_R)):
                self._counts[2 * index] += is_broken is True
                self._counts[2 * index + 1] += is_broken is not None

    def take(self) -> Sequence[float]:
        """Return this rank's completions since the last call: for each constraint how many broke it, of how many."""
        counts = self._counts
        self._counts = [0] * len(counts)
        return counts

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Return each constraint's share of completions that broke it, and the weight that this round is trained with.

        The weights learn here, once a round, from the sums over all ranks.
        """
        metrics = {}
        for index, constraint in enumerate(self.held):
            num_broken, num_scored = sums[2 * index : 2 * index + 2]
            weight = 0.0
            if num_scored:
                share = num_broken / num_scored
                metrics[f"ycore/violations/{constraint.name}"] = share
                weight = self.weights[index] + self._rate * (share - constraint.limit)
            if self.by == "lagrangian":
                self.weights[index] = max(0.0, weight)
                metrics[f"ycore/constraint_weight/{constraint.name}"] = self.weights[index]
        return metrics


def without_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


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
    known = without_none(rewards_G)
    if len(known) < 2:
        return False
    return max(known) - min(known) > TOLERANCE and pstdev(known) >= min_std


def normalizes_each_reward(config: RunConfig) -> bool:
    """Whether advantages are TRL's from rewards that are normalized one by one (GDPO, arXiv 2601.05242)."""
    return (
        config.trl.get("multi_objective_aggregation") == "normalize_then_sum"
        and config.uses_trl_advantages
        and not config.has_constraints
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
        known = without_none(rewards_G)
        mean = fmean(known)
        deviation = stdev(known) + _TRL_EPSILON
        for index, reward in enumerate(rewards_G):
            if reward is not None:
                sums_G[index] += weight * (reward - mean) / deviation
    is_scored = [any(reward is not None for reward in rewards_R) for rewards_R in rewards_GR]
    return [total if scored else None for total, scored in zip(sums_G, is_scored, strict=True)]


def min_stds(config: ScoredConfig, *, default_range: float = 0.0) -> tuple[float, ...]:
    """Return the standard deviation below which each source's rewards do not teach: a share of the reward's range.

    `default_range`: of a reward that declares none.
    """
    ranges = [reward.range or (0.0, default_range) for reward in config.rewards]
    return tuple(config.sampling.std_threshold * (most - least) for least, most in ranges)


def min_std_of_sum(min_stds_R: Sequence[float], weights_R: Sequence[float]) -> float:
    return math.fsum(
        abs(weight) * min_std for weight, min_std in zip(weights_R, min_stds_R, strict=True)
    )


def compared_rewards(
    group: Group, weights_R: Sequence[float], constraints: Constraints | None = None
) -> list[float | None]:
    """Return each completion's reward as it is compared with the others of its group."""
    totals = [weighted_sum(rewards_R, weights_R) for rewards_R in group.rewards_GR]
    return totals if constraints is None else constraints.compared(totals, group.rewards_GR)


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
    known = without_none(totals)
    if group.greedy_scores_R is not None:
        baseline = total_reward(group.greedy_scores_R, weights_R)
        return baseline is not None and any(
            rewards_differ([total, baseline]) for total in known
        )
    if alone or len(known) < 2:
        return alone and bool(known)
    if normalizes_each:
        return rewards_differ(normalized_sums(group.rewards_GR, weights_R, min_stds_R))
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
