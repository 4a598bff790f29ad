"""Placement learns from round to round, and a checkpoint keeps what it learned."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.simulation import Demand, Lengths, Machine, Outcome, SimulatedRound, Workload
from simulator.speeds import Speed

from ycore.placement.allocator import Allocator, divide
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement

ROLES = (ROLLOUT, JUDGE)
SPEED = Speed(0.012, 0.001)
MACHINE = Machine(dict.fromkeys(ROLES, SPEED), dict.fromkeys(ROLES, 3.0))
APART = 1000


def allocator(words: str = "dynamic", num_slots: int = 4) -> Allocator:
    capacity = dict.fromkeys(ROLES, 64)
    return Allocator(
        SlotPool(num_slots, ROLES, capacity, exclusive=True, swap_s=1.0), parse_placement(words)
    )


def play(slot_allocator: Allocator, number: int) -> Outcome:
    """Play rounds that drift, so that the division has to follow; some groups cannot teach."""
    work = Workload(
        Lengths(100 + 60 * number, 0.8, 2000), {JUDGE: 250.0}, group_size=4, teach_share=0.7
    )
    outcome = SimulatedRound(
        [slot_allocator],
        MACHINE,
        work.group_at,
        Demand(12, dynamic=True),
        position=APART * number,
    ).run()
    slot_allocator.learn(slot_allocator.measurements())
    return outcome


@pytest.mark.parametrize("words", ["dynamic", "split:3:1", "colocated"])
def test_a_run_that_goes_on_places_as_it_would_have(words: str) -> None:
    first = allocator(words)
    for number in range(4):
        play(first, number)
    second = allocator(words)
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    for number in range(4, 10):
        assert play(first, number).usage == play(second, number).usage
    assert second.state() == first.state()


def test_without_what_was_learned_it_would_not() -> None:
    """The test above looks at something."""
    first, second = allocator(), allocator()
    for number in range(4):
        play(first, number)
    assert play(first, 4).usage != play(second, 4).usage


def test_other_slots_than_then_keep_their_own_division() -> None:
    first, second = allocator(num_slots=4), allocator(num_slots=3)
    play(first, 0)
    second.restore(first.state())
    assert sum(second.division.values()) == 3
    assert play(second, 1).usage[1] > 0


def test_slots_follow_the_seconds_of_each_roles_requests() -> None:
    """Short verdicts get the least, long ones more slots than what they judge."""
    num_judges = []
    for verdict in (10.0, 250.0, 1500.0):
        slot_allocator = allocator(num_slots=8)
        work = Workload(Lengths(300, 0.3, 1000), {JUDGE: verdict}, group_size=4)
        for number in range(5):
            SimulatedRound(
                [slot_allocator], MACHINE, work.group_at, Demand(16), position=1000 * number
            ).run()
            slot_allocator.learn(slot_allocator.measurements())
        num_judges.append(slot_allocator.division[JUDGE])
    assert num_judges[0] == 1 < num_judges[1] < num_judges[2]


def test_a_division_that_is_near_the_work_stays() -> None:
    now = {ROLLOUT: 6, JUDGE: 2}
    assert divide(8, {ROLLOUT: 68.0, JUDGE: 32.0}, now) == now
    assert divide(8, {ROLLOUT: 60.0, JUDGE: 40.0}, now) == {ROLLOUT: 5, JUDGE: 3}
    assert divide(2, {ROLLOUT: 99.0, JUDGE: 1.0}, {ROLLOUT: 1, JUDGE: 1}) == {
        ROLLOUT: 1,
        JUDGE: 1,
    }


@given(
    st.integers(3, 40),
    st.lists(st.floats(0, 1e6), min_size=3, max_size=3).filter(lambda work: sum(work) > 1),
)
def test_slots_are_divided_whole_and_every_role_has_one(
    num_slots: int, amounts: list[float]
) -> None:
    work = dict(zip(("rollout", "judge", "teacher"), amounts, strict=True))
    division = divide(num_slots, work, {**dict.fromkeys(work, 1), "rollout": num_slots - 2})
    assert sum(division.values()) == num_slots and min(division.values()) >= 1


@pytest.mark.parametrize(("verdict", "mode"), [(1.0, "shared"), (200.0, "held")])
def test_where_engines_stay_awake_long_verdicts_have_slots_of_their_own(
    verdict: float, mode: str
) -> None:
    slot_allocator = Allocator(SlotPool(2, ROLES, dict.fromkeys(ROLES, 64)))
    work = Workload(Lengths(200, 0.8, 1000), {JUDGE: verdict}, group_size=4)
    SimulatedRound([slot_allocator], MACHINE, work.group_at, Demand(8)).run()
    slot_allocator.learn(slot_allocator.measurements())
    assert slot_allocator.mode == mode and slot_allocator.gathers == (mode == "shared")
