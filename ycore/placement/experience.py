"""What rounds took over what was forecast for them, by manner: a forecast is believed as far as it held.

The forecast of each round is made afterwards, from that round's own requests, so that what is measured is the error of
the forecast, not how long this round's completions were. The errors of a manner are averaged; one that has long not
been used returns to what was assumed at first, and is then tried again where that promises more.

Not here: the forecast (`forecast`), and the choice (`division`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ycore.placement.plan import MANNERS, Factors, Manner

FORECAST_MEMORY = 0.97
"""Weight that a round keeps when the next one comes, of whichever manner: about the last 33 count."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """Factors until there are measured ones, and the rounds that they count for."""

    factors: Factors
    weight: float


ONE_AWAKE = Assumed({"divided": 1.0, "held": 1.02, "phases": 1.1, "together": 1.25, "shared": 1.0}, weight=5.0)
"""Where one engine of a slot is awake at a time. The forecast knows nothing of single slots that wait for each other or
leave early. From simulated rounds of 1 to 8 slots."""

ALL_UP = Assumed({"divided": 1.0, "held": 1.1, "phases": 1.35, "together": 1.3, "shared": 1.2}, weight=2.0)
"""Where the engines of all roles stay up: there, slots move for nothing, which batches pay for. What each manner took
over its forecast on the mean of 12 loads, in simulated rounds of 2 slots that are as fast as two cores."""

_LEAST, _MOST = 0.6, 1.5
"""A round outside of these was disturbed by something else."""


@dataclass(slots=True)
class Experience:
    """By manner, how many rounds count and the sum of their ratios."""

    assumed: Assumed = ONE_AWAKE
    weights: dict[Manner, float] = field(default_factory=lambda: dict.fromkeys(MANNERS, 0.0))
    sums: dict[Manner, float] = field(default_factory=lambda: dict.fromkeys(MANNERS, 0.0))

    def observe(self, manner: Manner, *, seconds: float, forecast_s: float) -> None:
        """A round of this manner took so long, and this is its forecast from its own requests."""
        for one in MANNERS:
            self.weights[one] *= FORECAST_MEMORY
            self.sums[one] *= FORECAST_MEMORY
        self.weights[manner] += 1.0
        self.sums[manner] += min(_MOST, max(_LEAST, seconds / forecast_s))

    @property
    def factors(self) -> Factors:
        first, weight = self.assumed.factors, self.assumed.weight
        return {one: (weight * first[one] + self.sums[one]) / (weight + self.weights[one]) for one in MANNERS}

    def state(self) -> dict[str, list[float]]:
        """Plain JSON values."""
        return {one: [self.weights[one], self.sums[one]] for one in MANNERS}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        for one in MANNERS:
            self.weights[one], self.sums[one] = state.get(one, (0.0, 0.0))
