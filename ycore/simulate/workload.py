"""What a round has to do: how long every completion is, what its judging takes, which groups can teach.

Not here: how fast it is done (`machine`).
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ycore.placement.placement import ROLLOUT

Sizes = Mapping[str, float]
"""One completion: tokens to write under `rollout`, and the size of the request of every other role that scores it."""


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """The completions of one prompt. `after`: drawn only when so many groups of the round have ended (a recording)."""

    completions: tuple[Sizes, ...]
    teaches: bool = True
    after: int = 0


GroupAt = Callable[[int], SimulatedGroup]
"""The group at a place in the run's order: the same one however often and by whichever placement it is asked."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Completion lengths: lognormal with this mean and spread, cut off at the longest, as budgets cut them."""

    mean: float
    sigma: float
    longest: float

    def draw(self, source: random.Random) -> float:
        drawn = math.exp(source.gauss(math.log(self.mean) - self.sigma**2 / 2, self.sigma))
        return max(1.0, min(self.longest, drawn))


@dataclass(frozen=True, slots=True)
class Assumed:
    """A workload without a recording. `scoring`: the size of a request of each other role, for every completion."""

    lengths: Lengths
    scoring: Sizes
    group_size: int = 8
    teach_share: float = 1.0
    seed: int = 0

    def group_at(self, position: int) -> SimulatedGroup:
        source = random.Random(f"{self.seed}/{position}")
        completions = tuple({ROLLOUT: self.lengths.draw(source), **self.scoring} for _ in range(self.group_size))
        return SimulatedGroup(completions, teaches=source.random() < self.teach_share)
