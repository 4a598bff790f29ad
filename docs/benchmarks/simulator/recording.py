"""A recorded run, ready to be played again: its requests' sizes, its engines' speeds, and the order of its groups.

These belong to the work and to the engines, not to the placement, so the rounds can be played under another one. Step
times follow from depth, and depth from the requests that were in flight together. Engines that were at work on one slot
at the same time had an even share of it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, islice
from pathlib import Path

from simulator.simulation import SimulatedGroup
from simulator.speeds import UNKNOWN, Reading, SlotClock, Speed, Sums
from ycore.errors import DataError
from ycore.placement.placement import ROLLOUT
from ycore.run.trace import ROUND, SWAP, Span, earlier_part, parse_event

_EDGES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192)
_ENOUGH = 3  # requests that make a point of the curve; fewer join the next point
_PASSES = 3


@dataclass(frozen=True, slots=True)
class Request:
    """A recorded request, in seconds since the epoch; `tokens` 0 where they were not counted."""

    number: int
    role: str
    slot: int
    queued: float
    began: float
    ended: float
    tokens: float = 0.0


def read_trace(path: Path) -> list[Span]:
    """Return every whole span of a trace, also of one that was cut off; none where there is no file."""
    spans = []
    for part in (earlier_part(path), path):
        text = part.read_text(encoding="utf-8", errors="replace") if part.is_file() else ""
        events = map(parse_event, text.split("\n"))
        spans += [event for event in events if isinstance(event, Span)]
    return spans


def requests_of(spans: Sequence[Span]) -> list[list[Request]]:
    """Return the requests of each round, from one rank's spans of a trace."""
    rounds = [(span.began, span.began + span.seconds) for span in spans if span.name == ROUND]
    requests = [
        Request(
            number=span.details["request"],
            role=span.name,
            slot=span.slot,
            queued=span.began - span.details["waited_s"],
            began=span.began,
            ended=span.began + span.seconds,
            tokens=span.details["tokens"],
        )
        for span in spans
        if span.name not in (ROUND, SWAP)
    ]
    return [
        [request for request in requests if begin <= request.began <= end]
        for begin, end in rounds
    ]


@dataclass(frozen=True, slots=True)
class Recording:
    speeds: Mapping[str, Speed]
    rounds: tuple[tuple[SimulatedGroup, ...], ...]
    seconds: tuple[float, ...]  # what every round took


def recorded(rounds: Sequence[Sequence[Request]], *, group_size: int) -> Recording:
    """Return the speeds and groups of recorded rounds; raise DataError where no round is whole."""
    rounds = [
        requests for requests in rounds if any(request.role == ROLLOUT for request in requests)
    ]
    if not rounds:
        raise DataError("the trace has no whole round; let the run finish a step first")
    flat = [request for requests in rounds for request in requests]
    speeds, met = _fit(flat)
    sized = (  # without counted tokens, as many as the engine made steps
        replace(
            request,
            tokens=request.tokens or max(1e-6, seconds / speeds[request.role].step_s(depth)),
        )
        for request, (seconds, depth) in zip(flat, met, strict=True)
    )
    groups = tuple(
        tuple(_groups(list(islice(sized, len(requests))), group_size)) for requests in rounds
    )
    seconds = [
        max(request.ended for request in requests) - min(request.queued for request in requests)
        for requests in rounds
    ]
    return Recording(speeds, groups, tuple(seconds))


def _groups(requests: Sequence[Request], group_size: int) -> list[SimulatedGroup]:
    """Return groups in the order they were drawn; scorers' requests go to completions in the order both ended."""
    rollouts = sorted(
        (request for request in requests if request.role == ROLLOUT),
        key=lambda request: request.number,
    )
    by_end = sorted(rollouts, key=lambda request: request.ended)
    sizes = {request.number: {ROLLOUT: request.tokens} for request in rollouts}
    ended = {request.number: request.ended for request in rollouts}
    for role in sorted({request.role for request in requests} - {ROLLOUT}):
        scorers = sorted(
            (request for request in requests if request.role == role),
            key=lambda request: request.number,
        )
        for place, request in enumerate(scorers):
            scored = by_end[place * len(by_end) // len(scorers)].number
            sizes[scored][role] = sizes[scored].get(role, 0.0) + request.tokens
            ended[scored] = max(ended[scored], request.ended)
    chunks = [
        rollouts[first : first + group_size] for first in range(0, len(rollouts), group_size)
    ]
    ends = [max(ended[request.number] for request in chunk) for chunk in chunks]
    return [
        SimulatedGroup(
            tuple(sizes[request.number] for request in chunk),
            after=sum(end <= chunk[0].queued for end in ends),
        )
        for chunk in chunks
    ]


@dataclass(frozen=True, slots=True)
class Steps(Speed):
    """`seconds[i]` a step with `depths[i]` in flight; beyond both ends the slope is `per_request`."""

    depths: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()

    def step_s(self, in_flight: float) -> float:
        place = bisect_left(self.depths, in_flight)
        if place == len(self.depths):
            return self.seconds[-1] + self.per_request * (in_flight - self.depths[-1])
        if place == 0:
            return max(
                min(self.base, self.seconds[0]),
                self.seconds[0] - self.per_request * (self.depths[0] - in_flight),
            )
        before, after = self.depths[place - 1], self.depths[place]
        share = (in_flight - before) / (after - before)
        return (1 - share) * self.seconds[place - 1] + share * self.seconds[place]


@dataclass(frozen=True, slots=True)
class Sample:
    tokens: float  # that one request got
    seconds: float  # of its engine
    depth: float  # requests in flight there


def curve(line: Speed, samples: Sequence[Sample]) -> Steps:
    """Fit points at the depths that were met, each the mean of the requests around it; a deeper step is never shorter.

    The last few requests, too few for a point, join the point before them.
    """
    points: list[list[Sample]] = []
    for _, of_edge in groupby(
        sorted(samples, key=lambda sample: sample.depth),
        key=lambda sample: bisect_left(_EDGES, sample.depth),
    ):
        if not points or len(points[-1]) >= _ENOUGH:
            points.append([])
        points[-1].extend(of_edge)
    if len(points) > 1 and len(points[-1]) < _ENOUGH:
        few = points.pop()
        points[-1].extend(few)
    tokens = [sum(sample.tokens for sample in point) for point in points]
    depths = [
        sum(sample.tokens * sample.depth for sample in point) / all_
        for point, all_ in zip(points, tokens, strict=True)
    ]
    steps = [
        sum(sample.seconds for sample in point) / all_
        for point, all_ in zip(points, tokens, strict=True)
    ]
    return Steps(line.base, line.per_request, tuple(depths), tuple(accumulate(steps, max)))


_Met = list[
    tuple[float, float]
]  # for each request: its engine's own seconds, and the mean depth in them


def _fit(requests: Sequence[Request]) -> tuple[dict[str, Steps], _Met]:
    speeds: dict[str, Steps] = {}
    met: _Met = []
    for _ in range(_PASSES):  # depth is counted in steps, and their length is what is fitted
        met = _met(requests, speeds)
        samples: dict[str, list[Sample]] = {}
        for request, (seconds, depth) in zip(requests, met, strict=True):
            if seconds > 0:
                samples.setdefault(request.role, []).append(
                    Sample(request.tokens or 1.0, seconds, depth)
                )
        speeds = {}
        for role, of_role in samples.items():
            sums = Sums()
            for sample in of_role:
                sums.observe(seconds=sample.seconds, depth=sample.depth, size=sample.tokens)
            speeds[role] = curve(sums.speed(), of_role)
    return speeds, met


def _met(requests: Sequence[Request], speeds: Mapping[str, Speed]) -> _Met:
    begins = [(request.began, 1, index) for index, request in enumerate(requests)]
    ends = [(request.ended, 0, index) for index, request in enumerate(requests)]
    of_role = {
        role: speeds.get(role, UNKNOWN)
        for role in dict.fromkeys(request.role for request in requests)
    }
    clocks: dict[int, SlotClock] = {}
    begun: dict[int, Reading] = {}
    met: _Met = [(0.0, 1.0)] * len(requests)
    for when, is_begin, index in sorted(begins + ends):
        request = requests[index]
        clock = clocks.setdefault(request.slot, SlotClock(of_role, when))
        if is_begin:
            begun[index] = clock.change(request.role, 1, when)
        else:
            met[index] = clock.change(request.role, -1, when).since(begun[index])[:2]
    return met
