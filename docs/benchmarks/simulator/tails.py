"""Simulate whole steps where the tail of a round is met: rounds ahead, streams, and completions carried over.

Steps in virtual time, of rollouts and training alone. An engine's step takes `base + per_request * n` seconds with n
requests in flight, each request grows by one token in it, and a request goes to the slot with the fewest in flight.
Training is divided evenly by the slots that train. Reading prompts again after a round, judges and syncs are left out.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from simulator.comparison import Scenario, assumed_work
from simulator.recording import Request, recorded
from simulator.simulation import SimulatedGroup, VirtualSlot
from simulator.speeds import Speed
from ycore.errors import ConfigError
from ycore.placement.placement import ROLLOUT
from ycore.round.ahead import RoundsAhead

LengthsAt = Callable[[int], Sequence[float]]
"""Tokens of each completion of the group at a position of the run's order."""

_LEAST = 1e-9  # tokens that are missing of a completion which is not whole
_MOST_DIVISIONS = 12
_EARLY = 3  # rounds in which the bias towards short completions shows


@dataclass(frozen=True, slots=True)
class Drafting(Speed):
    """The speed of an engine that drafts where that is faster: `num_drafted` tokens of each request, of which the first is
    accepted with this probability, and each further one with the same after it. A pass computes all of them."""

    num_drafted: int = 4
    accepted: float = 0.5

    def step_s(self, in_flight: float) -> float:
        """Return the seconds for one token of each request."""
        checked_s = self.base + self.per_request * in_flight * (1 + self.num_drafted)
        gained = sum(self.accepted**place for place in range(1 + self.num_drafted))
        return min(self.base + self.per_request * in_flight, checked_s / gained)


@dataclass(frozen=True, slots=True)
class Steps:
    """`need` groups a step on `num_slots`; `train_s` on all of them, `swap_s` from one use to the other and back."""

    speed: Speed
    num_slots: int
    need: int
    train_s: float
    swap_s: float
    num_steps: int = 24
    sync_s: float = 0.0  # in which a stream's engines take weights, and write nothing


@dataclass(frozen=True, slots=True)
class Played:
    """Means of a step: its seconds, and the tokens of a completion that was trained on, early and over all steps.

    `rolling`: the slots with engines, where they are not all.
    """

    name: str
    seconds: float
    early_tokens: float
    tokens: float
    rolling: int | None = None
    waits: float | None = None  # share of the time in which a stream's trainer waits for groups
    idle: float | None = None  # share of its engines' time in which they write nothing
    staleness: float | None = None  # steps by which the first token of a group is old
    dropped: float = 0.0  # groups a step that were too old


@dataclass(slots=True)
class _Group:
    lengths: Sequence[float]
    left: dict[int, float]  # tokens that are missing, by completion


def compare_tails(
    steps: Steps,
    lengths_at: LengthsAt,
    *,
    oversample: float,
    drafts: tuple[int, float] | None = None,
    max_staleness: Sequence[int] = (),
) -> list[Played]:
    """Play every strategy; those with engines apart from training by the division that is shortest. `drafts`: tokens,
    and the share of them that is accepted. `max_staleness`: of the streams."""
    together = [_play(steps, lengths_at, factor) for factor in (1.0, oversample)]
    drafting = []
    if drafts is not None:
        speed = Drafting(steps.speed.base, steps.speed.per_request, *drafts)
        played = _play(replace(steps, speed=speed), lengths_at, 1.0)
        drafting.append(replace(played, name=f"drafts of {drafts[0]}"))
    return [
        *together,
        *drafting,
        _divided(steps, lengths_at, 1.0, ahead=False),
        _divided(steps, lengths_at, 1.0, ahead=True),
        _divided(steps, lengths_at, oversample, ahead=True),
        *(_divided_stream(steps, lengths_at, limit) for limit in max_staleness),
    ]


def compare_steps(
    scenario: Scenario,
    requests: Sequence[Sequence[Request]] | None,
    train_s: float,
    *,
    oversample: float,
    drafts: tuple[int, float] | None = None,
    max_staleness: Sequence[int] = (),
    sync_s: float = 0.0,
) -> list[Played]:
    """Call `compare_tails` for a run's requests, round by round, or for assumed lengths where they are None.

    Raise ConfigError where there is no slot to divide.
    """
    if scenario.num_slots < 2:
        raise ConfigError(
            "--train-s divides slots between engines and training, and there is one; say --slots 2"
        )
    if requests is None:
        work = assumed_work(scenario)
        speed, need = Speed(*scenario.step_s), scenario.need
        lengths_at: LengthsAt = cache(lambda at: _lengths(work.group_at(at)))
    else:
        recording = recorded(requests, group_size=scenario.group_size)
        speed = recording.speeds[ROLLOUT]
        need = max(1, round(fmean(map(len, recording.rounds))))
        lengths_at = recorded_lengths(recording.rounds)
    steps = Steps(speed, scenario.num_slots, need, train_s, scenario.swap_s, sync_s=sync_s)
    return compare_tails(
        steps, lengths_at, oversample=oversample, drafts=drafts, max_staleness=max_staleness
    )


def recorded_lengths(rounds: Sequence[Sequence[SimulatedGroup]]) -> LengthsAt:
    """Take the lengths of a recorded run's groups, in their order, over and over."""
    groups = [_lengths(group) for groups in rounds for group in groups]
    return lambda position: groups[position % len(groups)]


def _lengths(group: SimulatedGroup) -> list[float]:
    return [sizes[ROLLOUT] for sizes in group.completions]


def _play(steps: Steps, lengths_at: LengthsAt, oversample: float) -> Played:
    """Play steps in which all slots write, and then all train."""
    rounds, lengths = _rounds(steps, lengths_at, steps.num_slots, oversample)
    name = "as it is" if oversample == 1 else f"--oversample {oversample:g}"
    seconds = fmean(rounds) + steps.train_s + steps.swap_s
    return Played(name, seconds, fmean(lengths[: _EARLY * steps.need]), fmean(lengths))


def _divided(steps: Steps, lengths_at: LengthsAt, oversample: float, *, ahead: bool) -> Played:
    """Let some slots write and the others train: in turn, or with `ahead` both at once."""
    played = []
    for rolling in _divisions(steps.num_slots):
        rounds, lengths = _rounds(steps, lengths_at, rolling, oversample)
        train_s = steps.train_s * steps.num_slots / (steps.num_slots - rolling)
        step_seconds = [
            max(round_s, train_s) if ahead else round_s + train_s for round_s in rounds
        ]
        name = "both" if oversample > 1 else "--max-staleness 1" if ahead else "apart, in turn"
        played.append(
            Played(
                name,
                fmean(step_seconds),
                fmean(lengths[: _EARLY * steps.need]),
                fmean(lengths),
                rolling,
            )
        )
    return min(played, key=lambda division: division.seconds)


def _divisions(num_slots: int) -> range:
    return range(1, num_slots, max(1, num_slots // _MOST_DIVISIONS))


def _divided_stream(steps: Steps, lengths_at: LengthsAt, limit: int) -> Played:
    """Play the stream (`--max-staleness` of 2 and more) by the division that is shortest."""
    played = [
        Stream(steps, lengths_at, limit, rolling).play()
        for rolling in _divisions(steps.num_slots)
    ]
    return min(played, key=lambda division: division.seconds)


@dataclass(slots=True)
class _InFlight:
    lengths: Sequence[float]
    version: int  # of its first token
    left: int  # completions that are not whole


class Stream:
    """Engines that write on while the trainer trains and that take weights between two tokens.

    As many rounds are begun ahead as in a live run (`RoundsAhead`). A sync stops the engines' clock.
    """

    def __init__(
        self, steps: Steps, lengths_at: LengthsAt, limit: int, num_rolling: int
    ) -> None:
        self._steps = steps
        self._lengths_at = lengths_at
        self._limit = limit
        self._num_rolling = num_rolling
        self._slots = [VirtualSlot({ROLLOUT: steps.speed}) for _ in range(num_rolling)]
        self._num_requests = [0] * num_rolling
        self._ends: list[tuple[float, int]] = [(math.inf, -1)] * num_rolling  # time, request
        self._groups: dict[int, _InFlight] = {}
        self._whole: list[_InFlight] = []
        self._requests: dict[int, tuple[int, int]] = {}  # slot and group
        self._num_begun = self._num_ended = 0
        self._now = 0.0  # of the engines' clock
        self._busy_s = 0.0
        self._version = 0

    def play(self) -> Played:
        """Return means over the later two thirds of the steps."""
        steps = self._steps
        train_s = steps.train_s * steps.num_slots / (steps.num_slots - self._num_rolling)
        first = steps.num_steps // 3
        rounds_ahead = RoundsAhead(self._limit)
        waits, ages, lengths, num_dropped = list[float](), list[int](), list[float](), 0
        for step in range(steps.num_steps):
            if step == first:
                began, busy_before = self._now, self._busy_s
            late = self._drop_old()
            ahead = rounds_ahead.choose(
                waits=len(self._whole) < steps.need,
                is_tight=len(self._whole) < 2 * steps.need,
                too_old=late > 0,
            )
            self._begin_up_to(steps.need * (1 + ahead))
            before = self._now
            while len(self._whole) < steps.need:
                self._next_end(math.inf)
                self._begin_up_to(steps.need * (1 + ahead))
            taken, self._whole = self._whole[: steps.need], self._whole[steps.need :]
            lengths += [fmean(group.lengths) for group in taken]
            if step >= first:
                waits.append(self._now - before)
                ages += [step - group.version for group in taken]
                num_dropped += late
            self._write_for(train_s, up_to=steps.need * ahead)
            self._version = step + 1
        num_steps = steps.num_steps - first
        engine_s = (self._now - began) / num_steps
        seconds = engine_s + steps.sync_s
        busy_s = (self._busy_s - busy_before) / num_steps / self._num_rolling
        return Played(
            f"--max-staleness {self._limit}",
            seconds,
            fmean(lengths[: _EARLY * steps.need]),
            fmean(lengths),
            self._num_rolling,
            waits=fmean(waits) / seconds,
            idle=1 - busy_s / seconds,
            staleness=fmean(ages),
            dropped=num_dropped / num_steps,
        )

    def _drop_old(self) -> int:
        young = [group for group in self._whole if self._version - group.version <= self._limit]
        num_dropped = len(self._whole) - len(young)
        self._whole = young
        return num_dropped

    def _begin_up_to(self, most: int) -> None:
        """Begin groups while fewer are in flight or whole; each request goes to the slot with the fewest."""
        while len(self._groups) + len(self._whole) < most:
            lengths = self._lengths_at(self._num_begun)
            self._groups[self._num_begun] = _InFlight(lengths, self._version, len(lengths))
            for index, length in enumerate(lengths):
                slot = self._num_requests.index(min(self._num_requests))
                request = self._num_begun * len(lengths) + index
                self._requests[request] = (slot, self._num_begun)
                self._num_requests[slot] += 1
                self._slots[slot].start(request, ROLLOUT, length, self._now)
                self._note_end(slot)
            self._num_begun += 1

    def _write_for(self, seconds: float, *, up_to: int) -> None:
        until = self._now + seconds
        while self._next_end(until):
            self._begin_up_to(up_to)

    def _next_end(self, until: float) -> bool:
        """Go to the next request's end, or to `until` where that comes first; return whether one ended."""
        at, request = min(self._ends)
        num_busy = sum(number > 0 for number in self._num_requests)
        passed_s = min(at, until) - self._now
        self._busy_s += num_busy * passed_s
        self._now += passed_s
        if at > until:
            return False
        slot, position = self._requests.pop(request)
        self._slots[slot].end(ROLLOUT, self._now)
        self._num_requests[slot] -= 1
        self._note_end(slot)
        group = self._groups[position]
        group.left -= 1
        if not group.left:
            self._whole.append(self._groups.pop(position))
        return True

    def _note_end(self, slot: int) -> None:
        end = self._slots[slot].next_end()
        self._ends[slot] = (math.inf, -1) if end is None else end[:2]


def round_seconds(steps: Steps, lengths_at: LengthsAt) -> float:
    """Return the mean seconds of a round that all slots write."""
    return fmean(_rounds(steps, lengths_at, steps.num_slots, 1.0)[0])


def _rounds(
    steps: Steps, lengths_at: LengthsAt, num_slots: int, oversample: float
) -> tuple[list[float], list[float]]:
    """Return the seconds of each round, and the mean tokens of each group trained on, in their order."""
    pool: list[_Group] = []
    seconds, trained, position = [], list[float](), 0
    for _ in range(steps.num_steps):
        while len(pool) < max(steps.need, round(steps.need * oversample)):
            lengths = lengths_at(position)
            pool.append(_Group(lengths, dict(enumerate(lengths))))
            position += 1
        seconds.append(_round(pool, steps.need, num_slots, steps.speed))
        whole = [group for group in pool if not group.left][: steps.need]
        trained += [fmean(group.lengths) for group in whole]
        trained_ids = {id(group) for group in whole}
        pool = [group for group in pool if id(group) not in trained_ids]
    return seconds, trained


def _round(pool: Sequence[_Group], need: int, num_slots: int, speed: Speed) -> float:
    """Write until `need` groups of the pool are whole; what the others have is kept. All begin at once."""
    requests = [(left, group, index) for group in pool for index, left in group.left.items()]
    slots = [
        _Slot(sorted(requests[first::num_slots], key=lambda request: request[0]), speed)
        for first in range(num_slots)
    ]
    ends = heapq.merge(*(slot.ends() for slot in slots), key=lambda end: end[0])
    done, now = sum(not group.left for group in pool), 0.0
    while done < need:
        now, group, index = next(ends)
        del group.left[index]
        done += not group.left
    for slot in slots:
        for left, group, index in slot.requests:
            if index in group.left:
                group.left[index] = max(_LEAST, left - slot.tokens_at(now))
    return now


class _Slot:
    """Requests that begin together, the shortest first."""

    def __init__(self, requests: Sequence[tuple[float, _Group, int]], speed: Speed) -> None:
        self.requests = requests
        self._speed = speed
        self._times = [0.0]
        for number, (left, _, _) in enumerate(requests):
            before = requests[number - 1][0] if number else 0.0
            self._times.append(
                self._times[-1] + (left - before) * speed.step_s(len(requests) - number)
            )

    def ends(self) -> Iterator[tuple[float, _Group, int]]:
        for at, (_, group, index) in zip(self._times[1:], self.requests, strict=True):
            yield at, group, index

    def tokens_at(self, now: float) -> float:
        """Return the tokens of each request that is not whole then."""
        ended = bisect_right(self._times, now) - 1
        before = self.requests[ended - 1][0] if ended else 0.0
        in_flight = len(self.requests) - ended
        return (
            before + (now - self._times[ended]) / self._speed.step_s(in_flight)
            if in_flight
            else before
        )
