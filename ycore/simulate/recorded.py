"""A recorded run as a workload: its requests' sizes, the engines' speeds, and which prompts were drawn after which.

Sizes and speeds belong to the work and to the engines, not to the placement, so the rounds can be played again under
another one. Depth follows from what was in flight together, and step times from depth (`speeds`). Of engines that were
at work on one slot at once, each had its share of that time.

Not here: the requests of a trace (`requests`), and playing (`round`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ycore.errors import DataError
from ycore.placement.load import UNKNOWN, Speed, Sums
from ycore.placement.placement import ROLLOUT
from ycore.placement.usage import EngineClock, Reading, SlotClock
from ycore.simulate.requests import Request
from ycore.simulate.speeds import Seen, Steps, curve
from ycore.simulate.workload import SimulatedGroup

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
            engines = {role: EngineClock(speeds.get(role, UNKNOWN)) for role in roles}
            clock = clocks[one.slot] = SlotClock(engines, since=when)
        if begins:
            begun[index] = clock.start(one.role, when)
        else:
            met[_key(one)] = clock.end(one.role, when).since(begun[index])
    return met


def _key(one: Request) -> tuple[int, float]:
    return one.number, one.began
