"""A recorded run as a workload: its requests' sizes, the engines' speeds, and which prompts were drawn after which.

Sizes and speeds belong to the work and to the engines, not to the placement, so the rounds can be played again under
another one. Depth follows from what was in flight together, and step times are fitted to it as the live run does.

Not here: reading the trace (`telemetry.trace`), and playing (`round`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ycore.errors import DataError
from ycore.placement.load import Load, Speed, Sums
from ycore.placement.placement import ROLLOUT
from ycore.placement.usage import SlotClock
from ycore.simulate.workload import SimulatedGroup

_PASSES = 3


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
    loads, depths = fit([request for requests in rounds for request in requests])
    speeds = {role: load.speed for role, load in loads.items()}
    sized = [[replace(one, tokens=_size(one, depths, speeds)) for one in requests] for requests in rounds]
    seconds = [max(one.ended for one in requests) - min(one.asked for one in requests) for requests in rounds]
    return Recorded(speeds, tuple(tuple(groups(requests, group_size)) for requests in sized), tuple(seconds))


def fit(requests: Sequence[Request]) -> tuple[dict[str, Load], dict[tuple[int, float], float]]:
    """Each role's load, and the depth that each request met, by its number and when it began."""
    loads: dict[str, Load] = {}
    depths: dict[tuple[int, float], float] = {}
    for _ in range(_PASSES):  # depth is counted by steps, whose length the fit itself tells
        depths = _depths(requests, {role: load.speed for role, load in loads.items()})
        sums: dict[str, Sums] = {}
        for one in requests:
            told = sums.setdefault(one.role, Sums(rounds=1.0))
            if one.ended > one.began:
                told.observe(seconds=one.ended - one.began, depth=depths[_key(one)], size=one.tokens or 1.0)
        loads = {role: load for role, told in sums.items() if (load := told.load()) is not None}
    return loads, depths


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


def _size(one: Request, depths: Mapping[tuple[int, float], float], speeds: Mapping[str, Speed]) -> float:
    """Its tokens; else as many steps of its engine as it lasted."""
    return one.tokens or max(1e-6, (one.ended - one.began) / speeds[one.role].step_s(depths[_key(one)]))


def _depths(requests: Sequence[Request], speeds: Mapping[str, Speed]) -> dict[tuple[int, float], float]:
    events = sorted(
        [(one.began, 1, index) for index, one in enumerate(requests)]
        + [(one.ended, 0, index) for index, one in enumerate(requests)]
    )
    clocks: dict[int, SlotClock] = {}
    at_start: dict[int, tuple[float, float]] = {}
    depths: dict[tuple[int, float], float] = {}
    for when, begins, index in events:
        one = requests[index]
        clock = clocks.setdefault(one.slot, SlotClock(Speed(1.0, 0.0), since=when))
        clock.speed = speeds.get(one.role, clock.speed)
        clock.advance(when)
        clock.in_flight += 1 if begins else -1
        if begins:
            at_start[index] = (clock.steps, clock.depth)
        else:
            steps, depth = clock.steps - at_start[index][0], clock.depth - at_start[index][1]
            depths[_key(one)] = depth / steps if steps > 0 else 1.0
    return depths


def _key(one: Request) -> tuple[int, float]:
    return one.number, one.began
