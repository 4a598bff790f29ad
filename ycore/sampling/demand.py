"""How many groups to have in flight, from the share that could teach so far.

Too few and the engines run dry while another group is found wanting; too many and finished work waits for a later
round. Neither needs a setting: the yield is measured as groups end.

Not here: which groups can teach (`keep`).
"""

import math
from dataclasses import dataclass

MEMORY = 0.97
"""Weight that an observation keeps when the next one comes: about the last 33 groups count."""

LEAST = 0.05


@dataclass(slots=True)
class Yield:
    """A moving average of the share of groups that can teach; starts at all of them."""

    kept: float = 1.0
    finished: float = 1.0

    @property
    def rate(self) -> float:
        return max(LEAST, self.kept / self.finished)

    def observe(self, *, taught: bool) -> None:
        self.kept = self.kept * MEMORY + float(taught)
        self.finished = self.finished * MEMORY + 1.0


def num_to_draw(*, need: int, kept: int, in_flight: int, drawn: int, max_draws: int, rate: float) -> int:
    """Groups to start now, so that those in flight are expected to give just what is missing."""
    missing = need - kept
    if missing <= 0:
        return 0
    return max(0, min(math.ceil(missing / rate - 1e-9) - in_flight, max_draws - drawn))
