"""A question to the simulator and its answer: every placement over the same rounds, assumed or recorded.

Placements side by side: the same rounds under each, what they took, and which to use.

Not here: one round (`round`), and what is printed of it (the command).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ycore.placement.allocator import Allocator
from ycore.placement.load import Speed
from ycore.placement.placement import DYNAMIC, JUDGE, ROLLOUT, Placement, SlotPool, in_order
from ycore.plan.recording import Recorded, Request, recorded
from ycore.plan.simulation import Assumed, Demand, GroupAt, Lengths, Machine, Outcome, SimulatedRound
from ycore.round.sampling import Yield

GOOD_ENOUGH = 1.02
"""A plainer placement is preferred when it is within this of the shortest."""


@dataclass(frozen=True, slots=True)
class Result:
    """One placement over all rounds; the first `warm_up` of them, in which it learns, are not counted."""

    placement: Placement
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
    placement: Placement,
    pool: SlotPool,
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
    allocator, yields = Allocator(pool, placement), yields or Yield()
    outcomes, position = [], 0
    for number in range(warm_up + num_rounds):
        start = position if position_of is None else position_of(number)
        one = SimulatedRound(allocator, machine, group_at(number), demand, position=start, yields=yields)
        outcomes.append(one.run())
        allocator.learn(allocator.numbers())
        position = one.position
    return Result(placement, tuple(outcomes[warm_up:]))


def splits(roles: Sequence[str], num_slots: int, *, most: int = 9) -> list[Placement]:
    """Static splits from one end to the other, `most` of them at most; further roles share what rollouts leave."""
    others = len(roles) - 1
    if others == 0 or num_slots <= others:
        return []
    rollouts = range(1, num_slots - others + 1)
    chosen = (
        rollouts if len(rollouts) <= most else [rollouts[i * (len(rollouts) - 1) // (most - 1)] for i in range(most)]
    )
    return [Placement("split", (first, *_even(num_slots - first, others))) for first in chosen]


def _even(num_slots: int, parts: int) -> tuple[int, ...]:
    return tuple(num_slots // parts + (index < num_slots % parts) for index in range(parts))


def candidates(roles: Sequence[str], num_slots: int) -> list[Placement]:
    """What there is to choose from for these roles."""
    if len(roles) == 1:
        return [Placement("split", (num_slots,))]
    return [DYNAMIC, Placement("colocated"), *splits(roles, num_slots)]


def recommend(results: Sequence[Result]) -> Result:
    """The shortest; but `dynamic` where it is as good, since it needs no choice when lengths drift."""
    best = min(results, key=lambda result: result.seconds)
    for result in results:
        if result.placement.kind == "dynamic" and result.seconds <= GOOD_ENOUGH * best.seconds:
            return result
    return best


CAPACITY = 256
"""Requests that a slot holds of a role at most: vLLM's own limit."""

_SIGMA = 0.8
_TEACH_SHARE = 0.7
_APART = 10**6


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; `step_s` is (base, each) of an engine's step, for both roles."""

    num_slots: int
    swap_s: float
    num_rounds: int
    warm_up: int
    group_size: int
    need: int
    dynamic: bool
    max_tries: int
    max_tokens: int
    mean_tokens: float
    judge_work: float
    step_s: tuple[float, float]
    seed: int


@dataclass(frozen=True, slots=True)
class Played:
    """The answer; `recorded_s` is the mean round of the recording, where there is one."""

    note: str
    results: list[Result]
    recorded_s: float | None = None


def play_assumed(question: Question) -> Played:
    """Lognormal lengths; a judge whose every request is a share of a mean completion; seven in ten groups teach."""
    roles = (ROLLOUT, JUDGE) if question.judge_work > 0 else (ROLLOUT,)
    speed = Speed(*question.step_s)
    lengths = Lengths(question.mean_tokens, _SIGMA, question.max_tokens)
    scoring = {JUDGE: question.mean_tokens * question.judge_work} if question.judge_work > 0 else {}
    teach_share = _TEACH_SHARE if question.dynamic else 1.0
    work = Assumed(lengths, scoring, question.group_size, teach_share, question.seed)
    machine = Machine(dict.fromkeys(roles, speed), dict.fromkeys(roles, question.swap_s))
    demand = Demand(question.need, question.dynamic, question.max_tries)
    results = [
        simulate(
            placement,
            _hall(question, roles),
            machine,
            lambda number: work.group_at,
            demand,
            num_rounds=question.num_rounds,
            warm_up=question.warm_up,
            position_of=lambda number: number * _APART,
        )
        for placement in candidates(roles, question.num_slots)
    ]
    note = (
        f"assumed: {question.need} prompts x {question.group_size} completions of {question.mean_tokens:.0f} tokens on "
        f"the mean, judge work {question.judge_work:g} of it, a step {speed.base * 1e3:g} ms and "
        f"{speed.each * 1e3:g} ms more for each request, a swap {question.swap_s:g} s, {question.num_slots} slots"
    )
    return Played(note, results)


def play_recorded(rounds: Sequence[Sequence[Request]], question: Question) -> Played:
    """The recorded rounds under every placement; the first ones are played once more before, to learn from."""
    told = recorded(rounds, group_size=question.group_size)
    roles = in_order(list(told.speeds))
    machine = Machine(told.speeds, dict.fromkeys(roles, question.swap_s))
    numbers = [*range(min(question.warm_up, len(told.rounds))), *range(len(told.rounds))]
    results = [
        Result(
            placement, tuple(_replay(placement, told, numbers, machine, _hall(question, roles))[-len(told.rounds) :])
        )
        for placement in candidates(roles, question.num_slots)
    ]
    mean_s = fmean(told.seconds)
    note = (
        f"recorded: {len(told.rounds)} rounds of {mean_s:.1f} s on the mean, played again on {question.num_slots} slots"
    )
    return Played(note, results, recorded_s=mean_s)


def _replay(
    placement: Placement, told: Recorded, numbers: Sequence[int], machine: Machine, pool: SlotPool
) -> list[Outcome]:
    """Groups are drawn after as many others as they were then, since whether they could teach was not recorded."""
    allocator, outcomes = Allocator(pool, placement), []
    for number in numbers:
        groups = told.rounds[number]
        outcomes.append(SimulatedRound(allocator, machine, groups.__getitem__, Demand(len(groups))).run())
        allocator.learn(allocator.numbers())
    return outcomes


def _hall(question: Question, roles: tuple[str, ...]) -> SlotPool:
    exclusive = question.swap_s > 0
    capacity = dict.fromkeys(roles, CAPACITY) if len(roles) > 1 else None
    return SlotPool(question.num_slots, roles, capacity, exclusive=exclusive, swap_s=question.swap_s)
