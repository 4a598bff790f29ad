"""Rounds in virtual time: the arithmetic where it is simple, and the same decisions as the live run's."""

import random

import pytest
from simulator.comparison import simulate
from simulator.simulation import (
    Demand,
    Lengths,
    Machine,
    Outcome,
    SimulatedGroup,
    SimulatedRound,
    VirtualSlot,
    Workload,
    of_engines,
)
from simulator.speeds import Speed

from ycore.placement.allocator import Allocator
from ycore.placement.placement import (
    DYNAMIC,
    JUDGE,
    ROLLOUT,
    Placement,
    SlotPool,
    parse_placement,
)

ROLES = (ROLLOUT, JUDGE)
SPEED = Speed(0.01, 0.001)
MACHINE = Machine({ROLLOUT: SPEED, JUDGE: SPEED}, {ROLLOUT: 4.0, JUDGE: 2.0})


def pool(num_slots: int, *, exclusive: bool = True) -> SlotPool:
    return SlotPool(num_slots, ROLES, {ROLLOUT: 64, JUDGE: 64}, exclusive=exclusive, swap_s=3.0)


def alike(rollout: float, judge: float, *, group_size: int = 2) -> SimulatedGroup:
    return SimulatedGroup(({ROLLOUT: rollout, JUDGE: judge},) * group_size)


def test_a_slot_batches_as_its_engine_does() -> None:
    slot = VirtualSlot({ROLLOUT: SPEED})
    slot.start(0, ROLLOUT, 100, 0.0)
    assert slot.next_end() == (pytest.approx(100 * 0.011), 0, ROLLOUT)
    slot.start(1, ROLLOUT, 10, 0.55)  # half of the first is done; from here on steps take 12 ms
    assert slot.next_end() == (pytest.approx(0.55 + 10 * 0.012), 1, ROLLOUT)
    slot.end(ROLLOUT, 0.67)
    assert slot.next_end() == (pytest.approx(0.67 + 40 * 0.011), 0, ROLLOUT)


def test_while_a_prompt_is_read_the_others_wait() -> None:
    slot = VirtualSlot({ROLLOUT: SPEED}, {ROLLOUT: 0.5})
    slot.start(0, ROLLOUT, 101, 0.0)  # the reading gives the first token
    assert slot.next_end() == (pytest.approx(0.5 + 100 * 0.011), 0, ROLLOUT)
    slot.start(1, ROLLOUT, 11, 0.5 + 0.55)  # half of the first is written
    assert slot.next_end() == (pytest.approx(1.05 + 0.5 + 10 * 0.012), 1, ROLLOUT)
    slot.end(ROLLOUT, 1.67)
    assert slot.next_end() == (pytest.approx(1.67 + 40 * 0.011), 0, ROLLOUT)


def test_prompts_are_read_one_after_the_other() -> None:
    slot = VirtualSlot({JUDGE: SPEED}, {JUDGE: 0.5})
    for request in range(3):
        slot.start(request, JUDGE, 1, 0.2)
    for request in range(3):
        assert slot.next_end() == (pytest.approx(0.2 + 0.5 * (request + 1)), request, JUDGE)
        slot.end(JUDGE, 0.2 + 0.5 * (request + 1))
    assert slot.next_end() is None


def test_one_engine_reads_while_the_other_writes() -> None:
    slot = VirtualSlot({ROLLOUT: SPEED, JUDGE: SPEED}, {JUDGE: 0.22})
    slot.start(0, ROLLOUT, 20, 0.0)
    slot.start(1, JUDGE, 2, 0.0)
    assert slot.next_end() == (pytest.approx(20 * 0.011 * 2), 0, ROLLOUT), "half a slot each"
    slot.end(ROLLOUT, 0.44)
    assert slot.next_end() == (pytest.approx(0.44 + 0.011), 1, JUDGE), "it has read meanwhile"


def test_engines_of_two_roles_share_a_slot() -> None:
    slot = VirtualSlot({ROLLOUT: SPEED, JUDGE: SPEED})
    slot.start(0, ROLLOUT, 10, 0.0)
    slot.start(1, JUDGE, 10, 0.0)
    assert slot.next_end() == (pytest.approx(10 * 0.011 * 2), 0, ROLLOUT)


def written_s(outcome: Outcome) -> float:
    """When the last completion was written."""
    return max(lane.began + lane.seconds for lane in outcome.lanes if lane.name == ROLLOUT)


def test_one_slot_colocated_is_write_swap_judge() -> None:
    allocator = Allocator(pool(1), Placement("colocated"))
    outcome = SimulatedRound(
        [allocator], MACHINE, lambda position: alike(100, 50), Demand(4)
    ).run()
    written, judged = 100 * SPEED.step_s(8), 50 * SPEED.step_s(8)
    assert written_s(outcome) == pytest.approx(written)
    assert outcome.seconds == pytest.approx(written + 3.0 + judged), "half of each role's swap"
    assert outcome.usage[3] == 1 and outcome.drawn == 4
    assert outcome.metrics["ycore/idle_share"] == pytest.approx(0, abs=1e-9)


def test_a_split_overlaps_and_never_swaps() -> None:
    outcome = SimulatedRound(
        [Allocator(pool(2), parse_placement("split:1:1"))],
        MACHINE,
        lambda position: alike(100, 50),
        Demand(4),
    ).run()
    assert outcome.usage[3] == 0
    assert outcome.seconds == pytest.approx(100 * SPEED.step_s(8) + 50 * SPEED.step_s(8))
    assert outcome.metrics["ycore/bound_ratio"] == pytest.approx(2.0), (
        "one slot idles at a time"
    )


def test_groups_that_cannot_teach_are_replaced_by_the_live_rules() -> None:
    teaches = {0: False, 1: True, 2: True, 3: False, 4: True}
    positions: list[int] = []

    def group_at(position: int) -> SimulatedGroup:
        positions.append(position)
        return SimulatedGroup(
            ({ROLLOUT: 10.0, JUDGE: 1.0},) * 2, teaches=teaches.get(position, True)
        )

    outcome = SimulatedRound(
        [Allocator(pool(2))], MACHINE, group_at, Demand(3, dynamic=True)
    ).run()
    assert outcome.drawn == len(positions) >= 4 and positions == list(range(len(positions)))
    never = SimulatedRound(
        [Allocator(pool(2))],
        MACHINE,
        lambda position: SimulatedGroup(({ROLLOUT: 10.0, JUDGE: 1.0},) * 2, teaches=False),
        Demand(3, dynamic=True, max_tries=2),
    ).run()
    assert never.drawn == 6


def test_the_same_rounds_under_the_same_placement_are_the_same() -> None:
    work = Workload(Lengths(200, 0.8, 1000), {JUDGE: 80}, group_size=4, teach_share=0.7, seed=3)
    twice = [
        simulate(
            DYNAMIC,
            pool(3),
            MACHINE,
            lambda number: work.group_at,
            Demand(6, dynamic=True),
            num_rounds=3,
        )
        for _ in range(2)
    ]
    assert [round_.usage for round_ in twice[0].rounds] == [
        round_.usage for round_ in twice[1].rounds
    ]


def test_lengths_have_the_mean_that_is_asked() -> None:
    source, lengths = random.Random(0), Lengths(500, 0.8, 10**6)
    drawn = [lengths.draw(source) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(500, rel=0.03)
    assert max(Lengths(500, 2.0, 900).draw(source) for _ in range(500)) == 900


def test_machines_share_a_round_and_learn_the_same() -> None:
    """Each machine's slots serve its own ranks' groups; all of them stop together, and choose the same schedule."""
    work = Workload(Lengths(200, 0.8, 1000), {JUDGE: 100.0}, 4, 0.7)
    shared = simulate(
        DYNAMIC, pool(4), MACHINE, lambda number: work.group_at, Demand(24, dynamic=True),
        num_rounds=3, num_machines=3, ranks=4,
    )  # fmt: skip
    for outcome in shared.rounds:
        assert {lane.slot for lane in outcome.lanes} == set(range(12))
        assert outcome.usage[0] == pytest.approx(12 * outcome.seconds)
        assert outcome.drawn >= 24
    alone = simulate(
        DYNAMIC,
        pool(4),
        MACHINE,
        lambda number: work.group_at,
        Demand(8, dynamic=True),
        num_rounds=3,
        ranks=4,
    )
    assert shared.seconds == pytest.approx(alone.seconds, rel=0.35), (
        "a third of the groups on a third of the slots"
    )


def test_a_slot_with_several_engines_is_as_fast_as_all_of_them() -> None:
    """A judge over four devices beside a policy on each: 40 completions take as long as 10 on one engine."""
    machine = Machine({ROLLOUT: of_engines(SPEED, 4), JUDGE: SPEED}, {})
    block = SlotPool(1, ROLES, {ROLLOUT: 256, JUDGE: 64}, exclusive=True)
    outcome = SimulatedRound(
        [Allocator(block, parse_placement("colocated"))],
        machine,
        lambda position: alike(100, 50),
        Demand(20),
    ).run()
    assert written_s(outcome) == pytest.approx(100 * SPEED.step_s(10))
    assert outcome.seconds == pytest.approx(100 * SPEED.step_s(10) + 50 * SPEED.step_s(40))
