"""A question to the simulator and its answer: every placement over the same rounds, assumed or recorded.

Not here: one round (`round`), and what is printed of it (the command).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ycore.placement.allocator import Allocator
from ycore.placement.hall import Hall
from ycore.placement.load import Speed
from ycore.placement.placement import JUDGE, ROLLOUT
from ycore.placement.words import Wanted, in_order
from ycore.simulate.compare import Result, candidates, simulate
from ycore.simulate.recorded import Recorded, recorded
from ycore.simulate.requests import Request
from ycore.simulate.round import Demand, Machine, Outcome, SimulatedRound
from ycore.simulate.workload import Assumed, Lengths

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
            wanted,
            _hall(question, roles),
            machine,
            lambda number: work.group_at,
            demand,
            num_rounds=question.num_rounds,
            warm_up=question.warm_up,
            position_of=lambda number: number * _APART,
        )
        for wanted in candidates(roles, question.num_slots)
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
        Result(wanted, tuple(_replay(wanted, told, numbers, machine, _hall(question, roles))[-len(told.rounds) :]))
        for wanted in candidates(roles, question.num_slots)
    ]
    mean_s = fmean(told.seconds)
    note = (
        f"recorded: {len(told.rounds)} rounds of {mean_s:.1f} s on the mean, played again on {question.num_slots} slots"
    )
    return Played(note, results, recorded_s=mean_s)


def _replay(wanted: Wanted, told: Recorded, numbers: Sequence[int], machine: Machine, hall: Hall) -> list[Outcome]:
    """Groups are drawn after as many others as they were then, since whether they could teach was not recorded."""
    allocator, outcomes = Allocator(hall, wanted), []
    for number in numbers:
        groups = told.rounds[number]
        outcomes.append(SimulatedRound(allocator, machine, groups.__getitem__, Demand(len(groups))).run())
        allocator.learn(allocator.numbers())
    return outcomes


def _hall(question: Question, roles: tuple[str, ...]) -> Hall:
    exclusive = question.swap_s > 0
    capacity = dict.fromkeys(roles, CAPACITY) if len(roles) > 1 else None
    return Hall(question.num_slots, roles, capacity, exclusive=exclusive, first_swap_s=question.swap_s)
