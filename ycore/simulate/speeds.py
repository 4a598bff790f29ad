"""An engine's step as it was measured: straight lines between depths, instead of one line through all.

At few requests in flight a step takes the time of reading the weights, and at many that of computing; one line through
both is too short for the former, where a round's last completions are written.

Not here: the line that the live run learns from sums (`placement.load`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from ycore.placement.load import Speed

_EDGES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
_ENOUGH = 3
"""Requests that make a point of the curve; fewer are told together with the next."""


@dataclass(frozen=True, slots=True)
class Steps(Speed):
    """`seconds[i]` a step with `depths[i]` in flight; beyond both ends the slope is that of the line nearest to it."""

    depths: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def step_s(self, in_flight: float) -> float:
        place = bisect_left(self.depths, in_flight)
        if place == len(self.depths):
            return self.seconds[-1] + self.each * (in_flight - self.depths[-1])
        if place == 0:
            return max(min(self.base, self.seconds[0]), self.seconds[0] - self.each * (self.depths[0] - in_flight))
        before, after = self.depths[place - 1], self.depths[place]
        share = (in_flight - before) / (after - before)
        return (1 - share) * self.seconds[place - 1] + share * self.seconds[place]


@dataclass(frozen=True, slots=True)
class Seen:
    """One request: the tokens it got, in how many of its engine's seconds, with how many in flight there."""

    tokens: float
    seconds: float
    depth: float


def curve(line: Speed, seen: Sequence[Seen]) -> Steps:
    """Points at the depths that were met, each the mean of the requests around it; a step is never shorter when deeper.

    The last few requests, too few for a point, are told with those before them.
    """
    points: list[list[Seen]] = []
    for _, of_edge in groupby(sorted(seen, key=lambda one: one.depth), key=lambda one: bisect_left(_EDGES, one.depth)):
        if not points or len(points[-1]) >= _ENOUGH:
            points.append([])
        points[-1].extend(of_edge)
    if len(points) > 1 and len(points[-1]) < _ENOUGH:
        few = points.pop()
        points[-1].extend(few)
    tokens = [sum(one.tokens for one in point) for point in points]
    depths = [sum(one.tokens * one.depth for one in point) / all_ for point, all_ in zip(points, tokens, strict=True)]
    steps = [sum(one.seconds for one in point) / all_ for point, all_ in zip(points, tokens, strict=True)]
    return Steps(line.base, line.each, tuple(depths), tuple(accumulate(steps, max)))
