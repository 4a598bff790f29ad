"""Constraints: rewards that a completion must reach, beside those that training raises (CGPO, arXiv 2409.20370).

By `gate` a completion that breaks one is worth less than any that breaks none. By `lagrangian` it costs each
constraint's weight, which grows while more completions break it than its limit, and else falls to 0 at the least.
A completion whose constraint could not be scored breaks nothing and teaches nothing: it has no reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

from ycore.config.schema import RunConfig
from ycore.rewards.loading import reward_names
from ycore.types import Group, Score


@dataclass(frozen=True, slots=True)
class Constraint:
    """`source` is its place among the reward sources; it holds where that gives `least` or more."""

    source: int
    name: str
    least: float
    limit: float  # share of the completions that may break it

    def is_broken(self, scores_R: Sequence[Score]) -> bool | None:
        """None where it could not be scored."""
        value = scores_R[self.source].value
        return None if value is None else value < self.least


def constraints_of(config: RunConfig) -> list[Constraint]:
    """The rewards that are constraints."""
    named = enumerate(zip(reward_names(config.rewards), config.rewards, strict=True))
    return [
        Constraint(source, name, spec.least, spec.limit)
        for source, (name, spec) in named
        if spec.constraint
    ]


class Constraints:
    """The constraints of a run. All ranks have the same weights, because they learn from the sums over all ranks.

    Example: `Constraints([Constraint(1, "format", 1.0, 0.05)]).compared([0.5, 1.0], scores_GR)`.

    Args:
        rate: how fast a weight grows, by round, for each completion in one that breaks the constraint beyond its limit.
        start: the weights of the first round.
    """

    def __init__(
        self,
        constraints: Sequence[Constraint],
        *,
        by: Literal["gate", "lagrangian"] = "gate",
        rate: float = 1.0,
        start: float = 0.0,
    ) -> None:
        self.held = tuple(constraints)
        self.by = by
        self.weights = [start] * len(self.held)
        self._rate = rate
        self._counts = [0] * (2 * len(self.held))

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Build from a training config; None without constraints."""
        constraints = constraints_of(config)
        if not constraints or config.algorithm == "eval":
            return None
        settings = config.constraints
        return cls(constraints, by=settings.by, rate=settings.rate, start=settings.start)

    def state_dict(self) -> list[float]:
        return list(self.weights)

    def load_state_dict(self, state: Sequence[float]) -> None:
        self.weights = list(state)

    def _broken(self, scores_R: Sequence[Score]) -> list[bool | None]:
        return [constraint.is_broken(scores_R) for constraint in self.held]

    def compared(
        self, totals_G: Sequence[float | None], scores_GR: Sequence[Sequence[Score]]
    ) -> list[float | None]:
        """Return the rewards of a group's completions as they are compared with one another."""
        worst = min((total for total in totals_G if total is not None), default=0.0) - 1.0
        rewards_G: list[float | None] = []
        for total, scores_R in zip(totals_G, scores_GR, strict=True):
            broken = self._broken(scores_R)
            if total is None:
                rewards_G.append(None)
            elif self.by == "gate" and any(broken):
                rewards_G.append(worst)
            elif None in broken:
                rewards_G.append(None)
            else:
                weights = zip(self.weights, broken, strict=True)
                rewards_G.append(
                    total - sum(weight for weight, is_broken in weights if is_broken)
                )
        return rewards_G

    def count(self, group: Group) -> None:
        for scores_R in group.scores_GR:
            for index, is_broken in enumerate(self._broken(scores_R)):
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
