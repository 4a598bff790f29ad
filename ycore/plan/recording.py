"""A recorded run as a workload: its requests' sizes, the engines' speeds, and which prompts were drawn after which.

Sizes and speeds belong to the work and to the engines, not to the placement, so the rounds can be played again under
another one. Depth follows from what was in flight together, and step times from depth (`speeds`). Of engines that were
at work on one slot at once, each had its share of that time.

What a run's trace tells of its requests, round by round.

An engine's step as it was measured: straight lines between depths, instead of one line through all.

Not here: the requests of a trace (`requests`), and playing (`round`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from ycore.errors import DataError
from ycore.placement.load import UNKNOWN, Reading, SlotClock, Speed, Sums
from ycore.placement.placement import ROLLOUT
from ycore.plan.simulation import SimulatedGroup
from ycore.run.trace import ROUND, SWAP, Span


@dataclass(frozen=True, slots=True)
class Request:
    """A turn as it was recorded; `tokens` 0 where nobody counted them."""

    number: int
    role: str
    slot: int
    asked: float
    began: float
    ended: float
    tokens: float = 0.0


def requests_of(spans: Sequence[Span]) -> list[list[Request]]:
    """The turns of each round, from one rank's spans."""
    rounds = [(span.began, span.began + span.seconds) for span in spans if span.name == ROUND]
    requests = [_request(span) for span in spans if span.name not in (ROUND, SWAP)]
    return [[one for one in requests if begin <= one.began <= end] for begin, end in rounds]


def _request(span: Span) -> Request:
    return Request(
        number=span.details["request"],
        role=span.name,
        slot=span.slot,
        asked=span.began - span.details["waited_s"],
        began=span.began,
        ended=span.began + span.seconds,
        tokens=span.details["tokens"],
    )


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


_PASSES = 3

Met = dict[tuple[int, float], tuple[float, float]]
"""By a request's number and when it began: its engine's own seconds, and the mean depth in them."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run, ready to be played again: its engines' speeds, and the groups of every round."""

    speeds: Mapping[str, Speed]
    rounds: tuple[tuple[SimulatedGroup, ...], ...]
    seconds: tuple[float, ...]
    """What every round took when it was recorded."""


def recorded(rounds: Sequence[Sequence[Request]], *, group_size: int) -> Recorded:
    """From each round's requests; DataError where there are none to learn from."""
    rounds = [requests for requests in rounds if any(request.role == ROLLOUT for request in requests)]
    if not rounds:
        raise DataError("the trace has no whole round; let the run finish a step first")
    speeds, met = fit([request for requests in rounds for request in requests])
    sized = [[replace(one, tokens=_size(one, met, speeds)) for one in requests] for requests in rounds]
    seconds = [max(one.ended for one in requests) - min(one.asked for one in requests) for requests in rounds]
    return Recorded(speeds, tuple(tuple(groups(requests, group_size)) for requests in sized), tuple(seconds))


def fit(requests: Sequence[Request]) -> tuple[dict[str, Steps], Met]:
    """Each role's speed, and what each request met."""
    speeds: dict[str, Steps] = {}
    met: Met = {}
    for _ in range(_PASSES):  # depth is counted by steps, whose length the fit itself tells
        met = _met(requests, speeds)
        seen: dict[str, list[Seen]] = {}
        for one in requests:
            seconds, depth = met[_key(one)]
            if seconds > 0:
                seen.setdefault(one.role, []).append(Seen(one.tokens or 1.0, seconds, depth))
        speeds = {role: curve(_line(told), told) for role, told in seen.items()}
    return speeds, met


def _line(seen: Sequence[Seen]) -> Speed:
    sums = Sums(rounds=1.0)
    for one in seen:
        sums.observe(seconds=one.seconds, depth=one.depth, size=one.tokens)
    load = sums.load()
    assert load is not None, "something was seen"
    return load.speed


def groups(requests: Sequence[Request], group_size: int) -> list[SimulatedGroup]:
    """A round's groups in the order they were drawn; scorers' requests go to completions in the order both ended."""
    rollouts = sorted((one for one in requests if one.role == ROLLOUT), key=lambda one: one.number)
    ended = sorted(rollouts, key=lambda one: one.ended)
    scored: dict[int, list[Request]] = {one.number: [] for one in rollouts}
    for role in {one.role for one in requests} - {ROLLOUT}:
        asked = sorted((one for one in requests if one.role == role), key=lambda one: one.number)
        for place, one in enumerate(asked):
            scored[ended[place * len(ended) // len(asked)].number].append(one)
    chunks = [rollouts[first : first + group_size] for first in range(0, len(rollouts), group_size)]
    ends = [max(one.ended for own in chunk for one in (own, *scored[own.number])) for chunk in chunks]
    return [
        SimulatedGroup(
            tuple(_sizes(own, scored[own.number]) for own in chunk), after=sum(end <= chunk[0].asked for end in ends)
        )
        for chunk in chunks
    ]


def _sizes(rollout: Request, scorers: Sequence[Request]) -> dict[str, float]:
    sizes = {ROLLOUT: rollout.tokens}
    for one in scorers:
        sizes[one.role] = sizes.get(one.role, 0.0) + one.tokens
    return sizes


def _size(one: Request, met: Met, speeds: Mapping[str, Speed]) -> float:
    """Its tokens; else as many steps of its engine as it lasted."""
    seconds, depth = met[_key(one)]
    return one.tokens or max(1e-6, seconds / speeds[one.role].step_s(depth))


def _met(requests: Sequence[Request], speeds: Mapping[str, Speed]) -> Met:
    events = sorted(
        [(one.began, 1, index) for index, one in enumerate(requests)]
        + [(one.ended, 0, index) for index, one in enumerate(requests)]
    )
    roles = dict.fromkeys(one.role for one in requests)
    clocks: dict[int, SlotClock] = {}
    begun: dict[int, Reading] = {}
    met: Met = {}
    for when, begins, index in events:
        one = requests[index]
        clock = clocks.get(one.slot)
        if clock is None:
            clock = clocks[one.slot] = SlotClock({role: speeds.get(role, UNKNOWN) for role in roles}, when)
        if begins:
            begun[index] = clock.change(one.role, 1, when)
        else:
            met[_key(one)] = clock.change(one.role, -1, when).since(begun[index])
    return met


def _key(one: Request) -> tuple[int, float]:
    return one.number, one.began
