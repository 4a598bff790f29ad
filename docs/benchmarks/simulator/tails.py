"""What whole steps take where the tail of a round is met: rounds one step ahead, and completions that are carried over.

Steps in virtual time, of rollouts and training alone. An engine's step takes `base + each * n` seconds with n requests
in flight, each request grows by one token in it, and a request goes to the slot with the fewest in flight. Training is
divided evenly by the slots that train. Reading prompts again after a round, judges and syncs are left out.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from simulator.comparison import Scenario, assumed_work
from simulator.recording import Request, recorded
from simulator.simulation import SimulatedGroup
from simulator.speeds import Speed
from ycore.errors import ConfigError
from ycore.placement.placement import ROLLOUT

LengthsAt = Callable[[int], Sequence[float]]
"""Tokens of each completion of the group at a position of the run's order."""

_LEAST = 1e-9  # tokens that are missing of a completion which is not whole
_MOST_DIVISIONS = 12
_EARLY = 3  # rounds in which the bias towards short completions shows


@dataclass(frozen=True, slots=True)
class Drafting(Speed):
    """Of an engine that drafts where that is faster: `num_drafted` tokens of each request, of which the first is
    accepted with this probability, and each further one with the same after it. A pass computes all of them."""

    num_drafted: int = 4
    accepted: float = 0.5

    def step_s(self, in_flight: float) -> float:
        """Seconds for one token of each request."""
        checked_s = self.base + self.each * in_flight * (1 + self.num_drafted)
        gained = sum(self.accepted**place for place in range(1 + self.num_drafted))
        return min(self.base + self.each * in_flight, checked_s / gained)


@dataclass(frozen=True, slots=True)
class Steps:
    """`need` groups a step on `num_slots`; `train_s` on all of them, `swap_s` from one use to the other and back."""

    speed: Speed
    num_slots: int
    need: int
    train_s: float
    swap_s: float
    num_steps: int = 24


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
) -> list[Played]:
    """Every way; those with engines apart from training by the division that is shortest. `drafts`: tokens, and the
    share of them that is accepted."""
    together = [_play(steps, lengths_at, factor) for factor in (1.0, oversample)]
    drafting = []
    if drafts is not None:
        speed = Drafting(steps.speed.base, steps.speed.each, *drafts)
        played = _play(replace(steps, speed=speed), lengths_at, 1.0)
        drafting.append(replace(played, name=f"drafts of {drafts[0]}"))
    return [
        *together,
        *drafting,
        _divided(steps, lengths_at, 1.0, ahead=False),
        _divided(steps, lengths_at, 1.0, ahead=True),
        _divided(steps, lengths_at, oversample, ahead=True),
    ]


def compare_steps(
    scenario: Scenario,
    requests: Sequence[Sequence[Request]] | None,
    train_s: float,
    *,
    oversample: float,
    drafts: tuple[int, float] | None = None,
) -> list[Played]:
    """`compare_tails` of a run's requests, round by round, or of assumed lengths where they are None.

    ConfigError where there is no slot to divide.
    """
    if scenario.num_slots < 2:
        raise ConfigError(
            "--train-s divides slots between engines and training, and there is one; say --slots 2"
        )
    if requests is None:
        work = assumed_work(scenario)
        steps = Steps(
            Speed(*scenario.step_s), scenario.num_slots, scenario.need, train_s, scenario.swap_s
        )
        return compare_tails(
            steps, lambda at: _lengths(work.group_at(at)), oversample=oversample, drafts=drafts
        )
    recording = recorded(requests, group_size=scenario.group_size)
    need = max(1, round(fmean(map(len, recording.rounds))))
    steps = Steps(recording.speeds[ROLLOUT], scenario.num_slots, need, train_s, scenario.swap_s)
    return compare_tails(
        steps, recorded_lengths(recording.rounds), oversample=oversample, drafts=drafts
    )


def recorded_lengths(rounds: Sequence[Sequence[SimulatedGroup]]) -> LengthsAt:
    """Of a recorded run's groups, in their order, over and over."""
    groups = [_lengths(group) for groups in rounds for group in groups]
    return lambda position: groups[position % len(groups)]


def _lengths(group: SimulatedGroup) -> list[float]:
    return [sizes[ROLLOUT] for sizes in group.completions]


def _play(steps: Steps, lengths_at: LengthsAt, oversample: float) -> Played:
    """All slots write, and then all train."""
    rounds, lengths = _rounds(steps, lengths_at, steps.num_slots, oversample)
    name = "as it is" if oversample == 1 else f"--oversample {oversample:g}"
    seconds = fmean(rounds) + steps.train_s + steps.swap_s
    return Played(name, seconds, fmean(lengths[: _EARLY * steps.need]), fmean(lengths))


def _divided(steps: Steps, lengths_at: LengthsAt, oversample: float, *, ahead: bool) -> Played:
    """Some slots write and the others train: in turn, or with `ahead` both at once."""
    found = []
    for rolling in range(1, steps.num_slots, max(1, steps.num_slots // _MOST_DIVISIONS)):
        rounds, lengths = _rounds(steps, lengths_at, rolling, oversample)
        train_s = steps.train_s * steps.num_slots / (steps.num_slots - rolling)
        each = [max(round_s, train_s) if ahead else round_s + train_s for round_s in rounds]
        name = "both" if oversample > 1 else "--max-staleness 1" if ahead else "apart, in turn"
        found.append(
            Played(
                name,
                fmean(each),
                fmean(lengths[: _EARLY * steps.need]),
                fmean(lengths),
                rolling,
            )
        )
    return min(found, key=lambda one: one.seconds)


def _rounds(
    steps: Steps, lengths_at: LengthsAt, num_slots: int, oversample: float
) -> tuple[list[float], list[float]]:
    """Seconds of each round, and the mean tokens of each group trained on, in their order."""
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
        pool = [group for group in pool if not any(group is one for one in whole)]
    return seconds, trained


def _round(pool: Sequence[_Group], need: int, num_slots: int, speed: Speed) -> float:
    """Write until `need` groups of the pool are whole; what the others have is kept. All begin at once."""
    asked = [(left, group, index) for group in pool for index, left in group.left.items()]
    slots = [
        _Slot(sorted(asked[first::num_slots], key=lambda one: one[0]), speed)
        for first in range(num_slots)
    ]
    ends = heapq.merge(*(slot.ends() for slot in slots), key=lambda end: end[0])
    done, now = sum(not group.left for group in pool), 0.0
    while done < need:
        now, group, index = next(ends)
        del group.left[index]
        done += not group.left
    for slot in slots:
        for left, group, index in slot.asked:
            if index in group.left:
                group.left[index] = max(_LEAST, left - slot.tokens_at(now))
    return now


class _Slot:
    """Requests that begin together, the shortest first."""

    def __init__(self, asked: Sequence[tuple[float, _Group, int]], speed: Speed) -> None:
        self.asked = asked
        self._speed = speed
        self._times = [0.0]
        for number, (left, _, _) in enumerate(asked):
            before = asked[number - 1][0] if number else 0.0
            self._times.append(
                self._times[-1] + (left - before) * speed.step_s(len(asked) - number)
            )

    def ends(self) -> Iterator[tuple[float, _Group, int]]:
        for at, (_, group, index) in zip(self._times[1:], self.asked, strict=True):
            yield at, group, index

    def tokens_at(self, now: float) -> float:
        """Of each request that is not whole then."""
        ended = bisect_right(self._times, now) - 1
        before = self.asked[ended - 1][0] if ended else 0.0
        in_flight = len(self.asked) - ended
        return (
            before + (now - self._times[ended]) / self._speed.step_s(in_flight)
            if in_flight
            else before
        )
