"""The allocator under any order of events: nothing lost, nothing idle beside work, the same on every controller."""

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.simulation import Demand, Lengths, Machine, SimulatedRound, Workload

from ycore.placement.allocator import Allocator
from ycore.placement.load import Speed
from ycore.placement.moves import Backlog
from ycore.placement.placement import (
    DYNAMIC,
    JUDGE,
    ROLLOUT,
    Action,
    Mode,
    SlotPool,
    StartRequest,
    Swap,
    parse_placement,
)

ROLES = (ROLLOUT, JUDGE)


def pool(
    num_slots: int = 2, capacity: int = 4, *, exclusive: bool = True, swap_s: float = 1.0
) -> SlotPool:
    return SlotPool(
        num_slots, ROLES, dict.fromkeys(ROLES, capacity), exclusive=exclusive, swap_s=swap_s
    )


class Play:
    """Events at random, carried out as a shell would; notes what is where."""

    def __init__(
        self, allocator: Allocator, *, swap_s: float = 1.0, check: bool = False
    ) -> None:
        self.allocator = allocator
        self.now = 0.0
        self.flying: dict[int, tuple[str, int]] = {}
        self.swapping: list[tuple[float, int]] = []
        self.roles: dict[int, str] = {}
        self.answered = 0
        self.actions: list[Action] = []
        self._swap_s = swap_s

    def ask(self, role: str) -> None:
        number = len(self.roles)
        self.roles[number] = role
        self.allocator.ask(number, role)
        self.act()

    def act(self) -> None:
        for action in self.allocator.decide(self.now):
            self.actions.append(action)
            if isinstance(action, Swap):
                if self.allocator.pool.exclusive:
                    assert all(slot != action.slot for _, slot in self.flying.values()), (
                        "swapped with work in flight"
                    )
                self.swapping.append((self.now + self._swap_s, action.slot))
            else:
                assert action.slot not in [slot for _, slot in self.swapping], (
                    "asked while it swaps"
                )
                role = self.roles[action.request]
                assert (
                    self.allocator.mode == "shared" or self.allocator.awake[action.slot] == role
                )
                self.flying[action.request] = (role, action.slot)

    def step(self, source: random.Random) -> None:
        self.now += source.uniform(0.01, 1.0)
        due = [(when, slot) for when, slot in self.swapping if when <= self.now]
        if due:
            self.swapping.remove(due[0])
            self.allocator.swapped(due[0][1], self.now)
        elif self.flying:
            number = source.choice(sorted(self.flying))
            role, _ = self.flying.pop(number)
            self.allocator.ended(number, self.now, size=source.uniform(1, 100))
            self.answered += 1
            if role == ROLLOUT:
                self.act()
                self.ask(JUDGE)
        self.act()

    def run_out(self, source: random.Random) -> None:
        for _ in range(10_000):
            if self.allocator.is_idle and not self.swapping:
                return
            self.step(source)
        raise AssertionError("some request was never answered")


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["dynamic", "colocated", "split:1:1", "split:2:1", "split:1:3"]),
    st.integers(1, 30),
    st.booleans(),
    st.floats(0, 5),
    st.integers(0, 10**6),
)
def test_every_request_is_answered_whatever_the_placement(
    words: str, rollouts: int, exclusive: bool, swap_s: float, seed: int
) -> None:
    wanted = parse_placement(words)
    slots = sum(wanted.shares) or random.Random(seed).randrange(1, 5)
    allocator = Allocator(pool(slots, exclusive=exclusive, swap_s=swap_s), wanted)
    source = random.Random(seed)
    play = Play(allocator, swap_s=swap_s)
    for _ in range(3):
        allocator.begin_round(play.now)
        for _ in range(rollouts):
            play.ask(ROLLOUT)
        play.run_out(source)
        usage = allocator.end_round(play.now)
        assert 0 <= usage.idle_share <= 1 and usage.bound_ratio >= 1 - 1e-9
        allocator.learn(allocator.measurements())
    assert play.answered == 6 * rollouts
    if wanted.kind == "split":
        assert not any(isinstance(action, Swap) for action in play.actions)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(4, 40), st.floats(0.01, 5), st.integers(0, 10**6))
def test_no_slot_is_idle_while_a_backlog_is_worth_a_swap(
    num_slots: int, rollouts: int, swap_s: float, seed: int
) -> None:
    allocator = Allocator(pool(num_slots, swap_s=swap_s))
    source = random.Random(seed)
    play = Play(allocator, swap_s=swap_s)
    for number in range(3):
        allocator.begin_round(play.now)
        for _ in range(rollouts):
            play.ask(ROLLOUT)
        while not (allocator.is_idle and not play.swapping):
            play.step(source)
            if number and allocator.mode in ("divided", "together"):
                assert_nobody_wastes(allocator, play)
        allocator.learn(allocator.measurements())


def assert_nobody_wastes(allocator: Allocator, play: Play) -> None:
    """By hand: a slot with nothing to do, whose role has nothing to come either, leaves no share worth a swap."""
    flying, awake = [role for role, _ in play.flying.values()], allocator.awake
    started = {action.request for action in play.actions if isinstance(action, StartRequest)}
    waiting = {
        role: sum(kind == role and n not in started for n, kind in play.roles.items())
        for role in ROLES
    }
    swapping = {slot for _, slot in play.swapping}
    busy = {slot for _, slot in play.flying.values()}
    for slot in set(range(len(awake))) - busy - swapping:
        role, other = awake[slot], JUDGE if awake[slot] == ROLLOUT else ROLLOUT
        assert not (waiting[role] and not swapping and role == other)
        if waiting[role] or not waiting[other]:
            continue
        nothing_to_come = ROLLOUT not in flying and not waiting[ROLLOUT]
        load = allocator.loads[other]
        backlog = Backlog(waiting[other], 0, awake.count(other), load.engine_s(4))
        share = (backlog.work_s - backlog.num_slots * allocator.swap_s) / (
            backlog.num_slots + 1
        )
        if role == ROLLOUT and nothing_to_come:
            assert backlog.num_slots > 0 and share <= allocator.swap_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 5),
    st.lists(st.integers(1, 30), min_size=2, max_size=4),
    st.integers(0, 10**6),
)
def test_controllers_that_know_the_same_numbers_start_alike(
    num_slots: int, rollouts: list[int], seed: int
) -> None:
    """Each has had its own events; the sums decide, and all of them get the same sums."""
    controllers = [Allocator(pool(num_slots)) for _ in rollouts]
    for _ in range(3):
        for index, (allocator, amount) in enumerate(zip(controllers, rollouts, strict=True)):
            play = Play(allocator)
            allocator.begin_round(0.0)
            for _ in range(amount):
                play.ask(ROLLOUT)
            play.run_out(random.Random(seed + index))
        gathered = [
            sum(values)
            for values in zip(*(one.measurements() for one in controllers), strict=True)
        ]
        for allocator in controllers:
            allocator.learn(gathered)
        assert len({tuple(allocator.division.items()) for allocator in controllers}) == 1


def test_the_same_load_again_and_again_settles() -> None:
    allocator = Allocator(pool(6, 8))
    divisions = []
    for number in range(8):
        play = Play(allocator)
        allocator.begin_round(0.0)
        for _ in range(60):
            play.ask(ROLLOUT)
        play.run_out(random.Random(number))
        allocator.learn(allocator.measurements())
        divisions.append(dict(allocator.division))
    assert all(division == divisions[3] for division in divisions[3:])


def test_rollouts_alone_go_to_the_slot_with_the_fewest() -> None:
    allocator = Allocator(SlotPool(3))
    for number in range(9):
        allocator.ask(number, ROLLOUT)
    starts = [action for action in allocator.decide(0.0) if isinstance(action, StartRequest)]
    assert [start.slot for start in starts] == [0, 1, 2] * 3
    allocator.ended(4, 1.0)
    allocator.ask(9, ROLLOUT)
    assert allocator.decide(1.0) == [StartRequest(9, 1)]


def test_colocated_changes_phase_when_nothing_is_left() -> None:
    play = Play(Allocator(pool(2), parse_placement("colocated")))
    for _ in range(3):
        play.ask(ROLLOUT)
    play.run_out(random.Random(1))
    kinds = [
        "swap" if isinstance(action, Swap) else play.roles[action.request]
        for action in play.actions
    ]
    assert kinds == [ROLLOUT] * 3 + ["swap"] * 2 + [JUDGE] * 3


@pytest.mark.parametrize(("mode", "swaps"), [("held", 0), ("phases", 2)])
def test_a_learned_plan_says_how_slots_change(mode: str, swaps: int) -> None:
    """As a split, or as colocated."""
    first = Allocator(pool(2))
    play = Play(first)
    for _ in range(8):
        play.ask(ROLLOUT)
    play.run_out(random.Random(1))
    first.learn(first.measurements())
    division = {ROLLOUT: 1, JUDGE: 1} if mode == "held" else {ROLLOUT: 2, JUDGE: 0}
    second = Allocator(pool(2))
    second.restore({**first.state(), "mode": mode, "division": division})
    again = Play(second)
    second.begin_round(0.0)
    for _ in range(8):
        again.ask(ROLLOUT)
    again.run_out(random.Random(1))
    kinds = [
        "swap" if isinstance(action, Swap) else again.roles[action.request]
        for action in again.actions
    ]
    assert kinds.count("swap") == swaps
    if mode == "phases":
        assert kinds == [ROLLOUT] * 8 + ["swap"] * 2 + [JUDGE] * 8
    else:
        assert kinds.index(JUDGE) < len(kinds) - 1 - kinds[::-1].index(ROLLOUT), "side by side"


def learned(mode: str, one: Allocator) -> Allocator:
    """As if it had learned to go in this mode, all slots rolling out at first."""
    play = Play(one)
    for _ in range(16):
        play.ask(ROLLOUT)
    play.run_out(random.Random(1))
    one.learn(one.measurements())
    one.restore(
        {**one.state(), "mode": mode, "division": {ROLLOUT: one.pool.num_slots, JUDGE: 0}}
    )
    one.begin_round(0.0)
    return one


def test_shared_slots_take_a_verdict_at_once_beside_what_is_being_written() -> None:
    allocator = learned("shared", Allocator(pool(2, 8, exclusive=False, swap_s=0.0)))
    for number in range(8):
        allocator.ask(number, ROLLOUT)
    assert {
        start.slot for start in allocator.decide(0.0) if isinstance(start, StartRequest)
    } == {
        0,
        1,
    }
    allocator.ended(1, 1.0)
    allocator.ask(8, JUDGE)
    assert allocator.decide(1.0) == [StartRequest(8, 1)], "slot 0 has one more in flight"
    allocator.ask(9, JUDGE)
    assert allocator.decide(1.0) == [StartRequest(9, 0)], "slot 1 has a verdict to give already"
    assert allocator.in_flight()[JUDGE, 1] == (1, 1.0)


def test_a_shared_slot_holds_no_more_of_a_role_than_its_engine_can() -> None:
    allocator = learned("shared", Allocator(pool(1, 2, exclusive=False, swap_s=0.0)))
    for number, role in enumerate([ROLLOUT] * 3 + [JUDGE] * 3):
        allocator.ask(number, role)
    assert [
        action.request for action in allocator.decide(0.0) if isinstance(action, StartRequest)
    ] == [
        0,
        1,
        3,
        4,
    ]
    allocator.ended(3, 1.0)
    assert allocator.decide(1.0) == [StartRequest(5, 0)]


def test_speeds_of_engines_that_shared_a_slot_are_learned_as_they_are_alone() -> None:
    speed = Speed(0.02, 0.002)
    work = Workload(Lengths(120, 0.7, 600), {JUDGE: 40.0}, group_size=4)
    allocator = learned("shared", Allocator(pool(1, 64, exclusive=False, swap_s=0.0)))
    for number in range(6):
        one = SimulatedRound(
            [allocator], Machine(dict.fromkeys(ROLES, speed), {}), work.group_at, Demand(6)
        )
        one.position = 10 * number
        assert allocator.mode == "shared" and one.run().usage.swaps == 0
        allocator.learn(allocator.measurements())
        allocator.restore(
            {**allocator.state(), "mode": "shared", "division": {ROLLOUT: 1, JUDGE: 0}}
        )
    for role in ROLES:
        assert allocator.loads[role].speed.step_s(8) == pytest.approx(speed.step_s(8), rel=0.1)


def test_verdicts_are_gathered_where_slots_are_shared() -> None:
    for mode in get_args(Mode):
        allocator = learned(mode, Allocator(pool(2, 8, exclusive=False, swap_s=0.0)))
        assert allocator.gathers == (mode == "shared")


def test_side_by_side_a_slot_that_is_nearly_empty_helps_at_once() -> None:
    allocator = Allocator(pool(1, 8, exclusive=False, swap_s=0.0))
    for number in range(2):
        allocator.ask(number, ROLLOUT)
    allocator.decide(0.0)
    allocator.ask(2, JUDGE)
    assert allocator.decide(1.0) == [Swap(0, ROLLOUT, JUDGE)], (
        "two of eight are in flight, and are kept"
    )
    allocator.swapped(0, 1.0)
    assert allocator.decide(1.0) == [StartRequest(2, 0)]
    allocator.ended(0, 2.0)
    allocator.ended(2, 2.0)


def test_who_gives_up_leaves_nothing_behind() -> None:
    allocator = Allocator(pool(1, 1), DYNAMIC)
    for number in range(3):
        allocator.ask(number, ROLLOUT)
    assert allocator.decide(0.0) == [StartRequest(0, 0)]
    allocator.withdraw(1, ROLLOUT, 0.5)
    allocator.withdraw(0, ROLLOUT, 1.0)
    assert allocator.decide(1.0) == [StartRequest(2, 0)]
    allocator.ended(2, 2.0)
    assert allocator.is_idle
    assert allocator.end_round(2.0).busy_s == pytest.approx([2.0])


def test_a_division_becomes_slots_in_order() -> None:
    awake = Allocator(pool(3), parse_placement("split:2:1")).awake
    assert awake == (ROLLOUT, ROLLOUT, JUDGE)
    assert awake.count(JUDGE) == 1
