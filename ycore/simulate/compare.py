"""Placements side by side: the same rounds under each, what they took, and which to use.

Not here: drawing (`telemetry.timeline`) and printing (the command).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ycore.placement.allocator import Allocator
from ycore.placement.hall import Hall
from ycore.placement.words import DYNAMIC, Wanted
from ycore.sampling.demand import Yield
from ycore.simulate.round import Demand, Machine, Outcome, SimulatedRound
from ycore.simulate.workload import GroupAt

GOOD_ENOUGH = 1.02
"""A plainer placement is preferred when it is within this of the shortest."""


@dataclass(frozen=True, slots=True)
class Result:
    """One placement over all rounds; the first `warm_up` of them, in which it learns, are not counted."""

    wanted: Wanted
    rounds: tuple[Outcome, ...]

    @property
    def seconds(self) -> float:
        return fmean(outcome.usage.seconds for outcome in self.rounds)

    @property
    def idle_share(self) -> float:
        return fmean(outcome.usage.idle_share for outcome in self.rounds)

    @property
    def bound_ratio(self) -> float:
        return fmean(outcome.usage.bound_ratio for outcome in self.rounds)

    @property
    def swaps(self) -> float:
        return fmean(outcome.usage.swaps for outcome in self.rounds)

    @property
    def swap_s(self) -> float:
        return fmean(sum(outcome.usage.swap_s) for outcome in self.rounds)


def simulate(
    wanted: Wanted,
    hall: Hall,
    machine: Machine,
    group_at: Callable[[int], GroupAt],
    demand: Demand,
    *,
    num_rounds: int,
    warm_up: int = 0,
    position_of: Callable[[int], int] | None = None,
    yields: Yield | None = None,
) -> Result:
    """That many counted rounds. `group_at(round)`: the groups of that round, which may drift."""
    allocator, yields = Allocator(hall, wanted), yields or Yield()
    outcomes, position = [], 0
    for number in range(warm_up + num_rounds):
        start = position if position_of is None else position_of(number)
        one = SimulatedRound(allocator, machine, group_at(number), demand, position=start, yields=yields)
        outcomes.append(one.run())
        allocator.learn(allocator.numbers())
        position = one.position
    return Result(wanted, tuple(outcomes[warm_up:]))


def splits(roles: Sequence[str], num_slots: int, *, most: int = 9) -> list[Wanted]:
    """Static splits from one end to the other, `most` of them at most; further roles share what rollouts leave."""
    others = len(roles) - 1
    if others == 0 or num_slots <= others:
        return []
    rollouts = range(1, num_slots - others + 1)
    chosen = (
        rollouts if len(rollouts) <= most else [rollouts[i * (len(rollouts) - 1) // (most - 1)] for i in range(most)]
    )
    return [Wanted("split", (first, *_even(num_slots - first, others))) for first in chosen]


def _even(num_slots: int, parts: int) -> tuple[int, ...]:
    return tuple(num_slots // parts + (index < num_slots % parts) for index in range(parts))


def candidates(roles: Sequence[str], num_slots: int) -> list[Wanted]:
    """What there is to choose from for these roles."""
    if len(roles) == 1:
        return [Wanted("split", (num_slots,))]
    return [DYNAMIC, Wanted("colocated"), *splits(roles, num_slots)]


def recommend(results: Sequence[Result]) -> Result:
    """The shortest; but `dynamic` where it is as good, since it needs no choice when lengths drift."""
    best = min(results, key=lambda result: result.seconds)
    for result in results:
        if result.wanted.kind == "dynamic" and result.seconds <= GOOD_ENOUGH * best.seconds:
            return result
    return best
