"""What rounds took over what was forecast for them, by manner: a forecast is believed as far as it held.

The forecast of each round is made afterwards, from that round's own requests, so that what is measured is the error of
the forecast, not how long this round's completions were. The errors of a manner are averaged; one that has long not
been used returns to what was assumed at first, and is then tried again where that promises more.

Not here: the forecast (`forecast`), and the choice (`division`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ycore.placement.plan import MANNERS, Factors, Manner

MEMORY = 0.97
"""Weight that a round keeps when the next one comes, of whichever manner: about the last 33 count."""

FIRST: Factors = {"divided": 1.0, "held": 1.02, "phases": 1.1, "together": 1.25}
"""Assumed until measured; the forecast knows nothing of single slots that wait for each other or leave early. From
simulated rounds of 1 to 8 slots."""

_FIRST_WEIGHT = 5.0
"""Rounds that the assumption counts for."""

_LEAST, _MOST = 0.6, 1.5
"""A round outside of these was disturbed by something else."""


@dataclass(slots=True)
class Experience:
    """By manner, how many rounds count and the sum of their ratios."""

    weights: dict[Manner, float] = field(default_factory=lambda: dict.fromkeys(MANNERS, 0.0))
    sums: dict[Manner, float] = field(default_factory=lambda: dict.fromkeys(MANNERS, 0.0))

    def observe(self, manner: Manner, *, seconds: float, forecast_s: float) -> None:
        """A round of this manner took so long, and this is its forecast from its own requests."""
        for one in MANNERS:
            self.weights[one] *= MEMORY
            self.sums[one] *= MEMORY
        self.weights[manner] += 1.0
        self.sums[manner] += min(_MOST, max(_LEAST, seconds / forecast_s))

    @property
    def factors(self) -> Factors:
        return {
            one: (_FIRST_WEIGHT * FIRST[one] + self.sums[one]) / (_FIRST_WEIGHT + self.weights[one]) for one in MANNERS
        }

    def state(self) -> dict[str, list[float]]:
        """Plain JSON values."""
        return {one: [self.weights[one], self.sums[one]] for one in MANNERS}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        for one in MANNERS:
            self.weights[one], self.sums[one] = state[one]
