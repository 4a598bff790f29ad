"""Every placement over the same rounds, assumed or recorded: what they take, and which to use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from simulator.recording import Request, recorded
from simulator.simulation import (
    Demand,
    GroupAt,
    Lengths,
    Machine,
    Outcome,
    SimulatedRound,
    Workload,
    of_engines,
)
from simulator.speeds import Speed
from ycore.placement.allocator import Allocator
from ycore.placement.placement import DYNAMIC, JUDGE, ROLLOUT, Placement, SlotPool, in_order
from ycore.round.sampling import MEMORY, AcceptanceRate

_APART = (
    10**6
)  # positions from round to round: each placement gets the same groups, however many it draws
GOOD_ENOUGH = 1.02  # `dynamic` is recommended within this factor of the shortest
CAPACITY = 256  # requests that a slot holds of a role at most: vLLM's own limit
_SIGMA = 0.8
_TEACH_SHARE = 0.7
# Groups that a run which knows the share of groups that teach has seen, as they count.
_KNOWN = 1 / (1 - MEMORY)


@dataclass(frozen=True, slots=True)
class Result:
    """One placement over the counted rounds; its figures are means of a round."""

    placement: Placement
    rounds: tuple[Outcome, ...]

    @property
    def seconds(self) -> float:
        return fmean(outcome.seconds for outcome in self.rounds)

    @property
    def idle_share(self) -> float:
        return fmean(outcome.metrics["ycore/idle_share"] for outcome in self.rounds)

    @property
    def bound_ratio(self) -> float:
        return fmean(outcome.metrics["ycore/bound_ratio"] for outcome in self.rounds)

    @property
    def swaps(self) -> float:
        return fmean(outcome.metrics["ycore/swaps"] for outcome in self.rounds)

    @property
    def swap_s(self) -> float:
        return fmean(outcome.metrics["ycore/swap_s"] for outcome in self.rounds)


def simulate(
    placement: Placement,
    pool: SlotPool,
    machine: Machine,
    groups_of_round: Callable[[int], GroupAt],
    demand: Demand,
    *,
    num_rounds: int,
    warm_up: int = 0,
    first: int = 0,
    num_machines: int = 1,
    ranks: int = 1,
    position_of: Callable[[int], int] | None = None,
    yields: AcceptanceRate | None = None,
) -> Result:
    """Play rounds under one placement, which learns from round to round.

    Args:
        pool: the slots of each of `num_machines`, on which `ranks` train.
        groups_of_round: a round's groups, which may drift from round to round.
        num_rounds: counted rounds, after `warm_up` rounds that only teach; those before `first` are left out.
        position_of: a round's first position; by default the rounds are far apart.
    """
    allocators, yields = (
        [Allocator(pool, placement) for _ in range(num_machines)],
        yields or AcceptanceRate(),
    )
    outcomes = []
    for number in range(first, warm_up + num_rounds):
        position = _APART * number if position_of is None else position_of(number)
        groups = groups_of_round(number)
        simulated = SimulatedRound(
            allocators, machine, groups, demand, ranks=ranks, position=position, yields=yields
        )
        outcomes.append(simulated.run())
        added = [
            sum(values)
            for values in zip(
                *(allocator.measurements() for allocator in allocators), strict=True
            )
        ]
        for allocator in allocators:
            allocator.learn(added)
    return Result(placement, tuple(outcomes[-num_rounds:]))


@dataclass(frozen=True, slots=True)
class Scenario:
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
    judge_work: float  # over the writing of a completion
    step_s: tuple[float, float]  # base and per request, of an engine's step of both roles
    seed: int
    num_machines: int = 1  # with as many slots and ranks each
    engines: int = 1  # of the policy on a slot, beside one of the judge over as many devices

    def pool(self, roles: tuple[str, ...]) -> SlotPool:
        capacity = None
        if len(roles) > 1:
            capacity = {
                role: CAPACITY * (self.engines if role == ROLLOUT else 1) for role in roles
            }
        return SlotPool(
            self.num_slots, roles, capacity, exclusive=self.swap_s > 0, swap_s=self.swap_s
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """`longest_first_s`: a round of the best placement where the lengths of all prompts are known from earlier ones."""

    note: str
    results: list[Result]
    recorded_s: float | None
    longest_first_s: float


def assumed_work(scenario: Scenario) -> Workload:
    """Assume lognormal lengths, judge requests that are all the same share of a mean completion, and under dynamic
    sampling seven groups in ten that teach."""
    mean = scenario.mean_tokens
    scoring = {JUDGE: mean * scenario.judge_work} if scenario.judge_work > 0 else {}
    teach_share = _TEACH_SHARE if scenario.dynamic else 1.0
    lengths = Lengths(mean, _SIGMA, scenario.max_tokens)
    return Workload(lengths, scoring, scenario.group_size, teach_share, scenario.seed)


def compare_assumed(scenario: Scenario) -> Comparison:
    """Play every placement over `assumed_work`."""
    roles = (ROLLOUT, JUDGE) if scenario.judge_work > 0 else (ROLLOUT,)
    speed, mean, work = Speed(*scenario.step_s), scenario.mean_tokens, assumed_work(scenario)
    group_at = cache(work.group_at)

    def play(placement: Placement, demand: Demand) -> Result:
        return simulate(
            placement,
            scenario.pool(roles),
            Machine(
                {
                    role: of_engines(speed, scenario.engines) if role == ROLLOUT else speed
                    for role in roles
                },
                dict.fromkeys(roles, scenario.swap_s),
            ),
            lambda number: group_at,
            demand,
            num_rounds=scenario.num_rounds,
            warm_up=scenario.warm_up,
            first=0 if placement == DYNAMIC else scenario.warm_up,
            num_machines=scenario.num_machines,
            ranks=scenario.num_slots * scenario.engines,
            yields=AcceptanceRate(_KNOWN * work.teach_share, _KNOWN),
        )

    note = (
        f"assumed: {scenario.need} prompts x {scenario.group_size} completions of {mean:.0f} tokens on "
        f"the mean, judge work {scenario.judge_work:g} of it, a step {speed.base * 1e3:g} ms and "
        f"{speed.per_request * 1e3:g} ms more for each request, a swap {scenario.swap_s:g} s, {scenario.num_slots} slots"
        + (f" on each of {scenario.num_machines} machines" if scenario.num_machines > 1 else "")
        + (
            f", a judge over {scenario.engines} devices and a policy on each"
            if scenario.engines > 1
            else ""
        )
    )
    return _compared(note, play, roles, scenario)


def _compared(
    note: str,
    play: Callable[[Placement, Demand], Result],
    roles: Sequence[str],
    scenario: Scenario,
    *,
    recorded_s: float | None = None,
) -> Comparison:
    """Play every placement, and the best once more with known lengths."""
    demand = Demand(scenario.need, scenario.dynamic, scenario.max_tries)
    results = [play(placement, demand) for placement in candidates(roles, scenario.num_slots)]
    again = play(recommend(results).placement, replace(demand, known_lengths=True))
    return Comparison(note, results, recorded_s, again.seconds)


def candidates(roles: Sequence[str], num_slots: int) -> list[Placement]:
    if len(roles) == 1:
        return [Placement("split", (num_slots,))]
    return [DYNAMIC, Placement("colocated"), *splits(roles, num_slots)]


def splits(roles: Sequence[str], num_slots: int, *, most: int = 9) -> list[Placement]:
    """List splits from one end to the other, at most `most`; the other roles share evenly what rollouts leave."""
    num_others = len(roles) - 1
    if num_others == 0 or num_slots <= num_others:
        return []
    firsts: Sequence[int] = range(1, num_slots - num_others + 1)
    if len(firsts) > most:
        firsts = [firsts[index * (len(firsts) - 1) // (most - 1)] for index in range(most)]
    placements = []
    for first in firsts:
        share, remainder = divmod(num_slots - first, num_others)
        placements.append(
            Placement(
                "split", (first, *(share + (index < remainder) for index in range(num_others)))
            )
        )
    return placements


def recommend(results: Sequence[Result]) -> Result:
    """Return the shortest, but `dynamic` where it is as good, since it needs no new choice when lengths drift."""
    best = min(results, key=lambda result: result.seconds)
    good = (result for result in results if result.seconds <= GOOD_ENOUGH * best.seconds)
    return next((result for result in good if result.placement.kind == "dynamic"), best)


def compare_recorded(rounds: Sequence[Sequence[Request]], scenario: Scenario) -> Comparison:
    """Play the recorded rounds under every placement; `dynamic` plays the first ones once more before, to learn from."""
    recording = recorded(rounds, group_size=scenario.group_size)
    roles, num_rounds = in_order(list(recording.speeds)), len(recording.rounds)
    machine = Machine(recording.speeds, dict.fromkeys(roles, scenario.swap_s))

    def play(placement: Placement, demand: Demand) -> Result:
        allocator, outcomes = Allocator(scenario.pool(roles), placement), []
        warm_up = recording.rounds[: scenario.warm_up if placement == DYNAMIC else 0]
        for groups in (*warm_up, *recording.rounds):
            # A trace does not say which groups could teach, so each is drawn after as many others as it was then.
            wanted = Demand(len(groups), known_lengths=demand.known_lengths)
            outcomes.append(
                SimulatedRound([allocator], machine, groups.__getitem__, wanted).run()
            )
            allocator.learn(allocator.measurements())
        return Result(placement, tuple(outcomes[-num_rounds:]))

    mean_s = fmean(recording.seconds)
    note = f"recorded: {num_rounds} rounds of {mean_s:.1f} s on the mean, played again on {scenario.num_slots} slots"
    return _compared(note, play, roles, scenario, recorded_s=mean_s)
