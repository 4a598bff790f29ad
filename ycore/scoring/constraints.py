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
    """Those of a run. All ranks have the same weights, because they learn from the sums over all ranks.

    Example: `Constraints([Constraint(1, "format", 1.0, 0.05)]).compared([0.5, 1.0], scores_GR)`.

    Args:
        rate: how fast a weight grows, by round, for each completion in one that breaks the constraint beyond its limit.
        start: the weights of the first round.
    """

    def __init__(
        self,
        held: Sequence[Constraint],
        *,
        by: Literal["gate", "lagrangian"] = "gate",
        rate: float = 1.0,
        start: float = 0.0,
    ) -> None:
        self.held, self.by, self._rate = tuple(held), by, rate
        self.weights = [start] * len(self.held)
        self._counts = [0] * (2 * len(self.held))

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Those of a run that trains; None where it has none."""
        held = constraints_of(config)
        if not held or config.algorithm == "eval":
            return None
        settings = config.constraints
        return cls(held, by=settings.by, rate=settings.rate, start=settings.start)

    def state_dict(self) -> list[float]:
        return list(self.weights)

    def load_state_dict(self, state: Sequence[float]) -> None:
        self.weights = list(state)

    def _broken(self, scores_R: Sequence[Score]) -> list[bool | None]:
        return [one.is_broken(scores_R) for one in self.held]

    def compared(
        self, totals_G: Sequence[float | None], scores_GR: Sequence[Sequence[Score]]
    ) -> list[float | None]:
        """The rewards of a group's completions as they are compared with one another."""
        known = [total for total in totals_G if total is not None]
        worst = min(known, default=0.0) - 1.0
        found: list[float | None] = []
        for total, scores_R in zip(totals_G, scores_GR, strict=True):
            broken = self._broken(scores_R)
            if self.by == "gate" and any(broken):
                found.append(None if total is None else worst)
            elif total is None or None in broken:
                found.append(None)
            else:
                found.append(
                    total
                    - sum(weight for weight, one in zip(self.weights, broken, strict=True) if one)
                )
        return found

    # -- over the rounds ---------------------------------------------------------------------------------------------

    def count(self, group: Group) -> None:
        for scores_R in group.scores_GR:
            for place, broken in enumerate(self._broken(scores_R)):
                self._counts[2 * place] += broken is True
                self._counts[2 * place + 1] += broken is not None

    def take(self) -> Sequence[float]:
        """The completions of this rank since the last call that broke each constraint, and those that it was asked
        of."""
        counts, self._counts = self._counts, [0] * len(self._counts)
        return counts

    def metrics(self, sums: Sequence[float]) -> Mapping[str, float]:
        """Of each constraint the share of completions that broke it, and the weight that this round is trained with.

        The weights learn here, once a round, from the sums over all ranks.
        """
        found = {}
        for place, one in enumerate(self.held):
            broken, asked = sums[2 * place], sums[2 * place + 1]
            if asked:
                found[f"ycore/violations/{one.name}"] = broken / asked
            if self.by == "lagrangian":
                moved = (
                    self.weights[place] + self._rate * (broken / asked - one.limit)
                    if asked
                    else 0.0
                )
                self.weights[place] = max(0.0, moved)
                found[f"ycore/constraint_weight/{one.name}"] = self.weights[place]
        return found
