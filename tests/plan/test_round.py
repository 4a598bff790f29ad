"""Rounds in virtual time: the arithmetic where it is simple, and the same decisions as the live run's."""

import random

import pytest

from ycore.placement.allocator import Allocator
from ycore.placement.load import Speed
from ycore.placement.placement import DYNAMIC, JUDGE, ROLLOUT, Placement, SlotPool, parse_placement
from ycore.plan.comparison import candidates, recommend, simulate, splits
from ycore.plan.simulation import Assumed, Demand, Lengths, Machine, SimulatedGroup, SimulatedRound, VirtualSlot

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
    slot.start(0, ROLLOUT, 100, 0.0)
    assert slot.next_end() == (pytest.approx(0.5 + 100 * 0.011), 0, ROLLOUT)
    slot.start(1, ROLLOUT, 10, 0.5 + 0.55)  # half of the first is written
    assert slot.next_end() == (pytest.approx(1.05 + 0.5 + 10 * 0.012), 1, ROLLOUT)
    slot.end(ROLLOUT, 1.67)
    assert slot.next_end() == (pytest.approx(1.67 + 40 * 0.011), 0, ROLLOUT)


def test_one_engine_reads_while_the_other_writes() -> None:
    slot = VirtualSlot({ROLLOUT: SPEED, JUDGE: SPEED}, {JUDGE: 0.22})
    slot.start(0, ROLLOUT, 20, 0.0)
    slot.start(1, JUDGE, 1, 0.0)
    assert slot.next_end() == (pytest.approx(20 * 0.011 * 2), 0, ROLLOUT), "half a slot each"
    slot.end(ROLLOUT, 0.44)
    assert slot.next_end() == (pytest.approx(0.44 + 0.011), 1, JUDGE), "it has read meanwhile"


def test_engines_of_two_roles_share_a_slot() -> None:
    slot = VirtualSlot({ROLLOUT: SPEED, JUDGE: SPEED})
    slot.start(0, ROLLOUT, 10, 0.0)
    slot.start(1, JUDGE, 10, 0.0)
    assert slot.next_end() == (pytest.approx(10 * 0.011 * 2), 0, ROLLOUT)


def test_one_slot_colocated_is_write_swap_judge() -> None:
    allocator = Allocator(pool(1), Placement("colocated"))
    outcome = SimulatedRound(allocator, MACHINE, lambda position: alike(100, 50), Demand(4)).run()
    written, judged = 100 * SPEED.step_s(8), 50 * SPEED.step_s(8)
    assert outcome.written_s == pytest.approx(written)
    assert outcome.usage.seconds == pytest.approx(written + 3.0 + judged), "half of each role's swap"
    assert outcome.usage.swaps == 1 and outcome.drawn == 4
    assert outcome.usage.idle_share == pytest.approx(0, abs=1e-9)


def test_a_split_overlaps_and_never_swaps() -> None:
    outcome = SimulatedRound(
        Allocator(pool(2), parse_placement("split:1:1")), MACHINE, lambda position: alike(100, 50), Demand(4)
    ).run()
    assert outcome.usage.swaps == 0
    assert outcome.usage.seconds == pytest.approx(100 * SPEED.step_s(8) + 50 * SPEED.step_s(8))
    assert outcome.usage.bound_ratio == pytest.approx(2.0), "one slot idles at a time"


def test_groups_that_cannot_teach_are_replaced_by_the_live_rules() -> None:
    told = {0: False, 1: True, 2: True, 3: False, 4: True}
    asked: list[int] = []

    def group_at(position: int) -> SimulatedGroup:
        asked.append(position)
        return SimulatedGroup(({ROLLOUT: 10.0, JUDGE: 1.0},) * 2, teaches=told.get(position, True))

    outcome = SimulatedRound(Allocator(pool(2)), MACHINE, group_at, Demand(3, dynamic=True)).run()
    assert outcome.drawn == len(asked) >= 4 and asked == list(range(len(asked)))
    never = SimulatedRound(
        Allocator(pool(2)),
        MACHINE,
        lambda position: SimulatedGroup(({ROLLOUT: 10.0, JUDGE: 1.0},) * 2, teaches=False),
        Demand(3, dynamic=True, max_tries=2),
    ).run()
    assert never.drawn == 6


def test_the_same_rounds_under_the_same_placement_are_the_same() -> None:
    work = Assumed(Lengths(200, 0.8, 1000), {JUDGE: 80}, group_size=4, teach_share=0.7, seed=3)
    twice = [
        simulate(DYNAMIC, pool(3), MACHINE, lambda number: work.group_at, Demand(6, dynamic=True), num_rounds=3)
        for _ in range(2)
    ]
    assert [one.usage for one in twice[0].rounds] == [one.usage for one in twice[1].rounds]


def test_dynamic_is_never_far_behind_and_often_ahead() -> None:
    """A small sweep; the whole one is a benchmark."""
    ratios = []
    for judge_work in (0.2, 1.0, 4.0):
        work = Assumed(Lengths(300, 0.8, 2000), {JUDGE: 300 * judge_work}, group_size=4, seed=1)
        results = {
            str(wanted): simulate(
                wanted,
                pool(4),
                MACHINE,
                lambda number, work=work: work.group_at,  # type: ignore[misc]
                Demand(32),
                num_rounds=3,
                warm_up=2,
                position_of=lambda number: 1000 * number,
            )
            for wanted in candidates(ROLES, 4)
        }
        best = min(result.seconds for words, result in results.items() if words.startswith("split"))
        ratios.append(results["dynamic"].seconds / best)
        assert recommend(list(results.values())).seconds <= 1.02 * min(one.seconds for one in results.values())
    assert max(ratios) < 1.1, ratios


def test_where_no_split_fits_dynamic_learns_to_go_in_phases() -> None:
    """Two slots, little to judge, engines that gain little from deep batches: one judge for one writer is wasteful."""
    work = Assumed(Lengths(300, 0.8, 2000), {JUDGE: 30.0}, group_size=4, teach_share=0.7, seed=1)
    machine = Machine(dict.fromkeys(ROLES, Speed(0.01, 0.002)), dict.fromkeys(ROLES, 0.5))
    results = {
        words: simulate(
            parse_placement(words),
            pool(2),
            machine,
            lambda number: work.group_at,
            Demand(16, dynamic=True),
            num_rounds=4,
            warm_up=3,
            position_of=lambda number: 1000 * number,
        )
        for words in ("dynamic", "split:1:1", "colocated")
    }
    dynamic, split, colocated = (result.seconds for result in results.values())
    assert colocated < 0.9 * split, "a load that phases suit"
    assert dynamic < 1.02 * colocated


def test_where_verdicts_are_short_and_all_engines_stay_up_dynamic_learns_to_share_the_slots() -> None:
    work = Assumed(Lengths(96, 0.8, 512), {JUDGE: 1.0}, teach_share=0.7, seed=1)
    speed = Speed(0.04, 0.002)
    machine = Machine(dict.fromkeys(ROLES, speed), {}, {ROLLOUT: 0.08, JUDGE: 0.05})
    results = [
        simulate(
            parse_placement(words),
            pool(2, exclusive=False),
            machine,
            lambda number: work.group_at,
            Demand(8, dynamic=True),
            num_rounds=6,
            warm_up=3,
            position_of=lambda number: 1000 * number,
        )
        for words in ("dynamic", "split:1:1", "colocated")
    ]
    dynamic, split, colocated = (result.seconds for result in results)
    assert dynamic < 0.93 * min(split, colocated)
    assert results[0].bound_ratio < 1.15


def test_lengths_have_the_mean_that_is_asked() -> None:
    source, lengths = random.Random(0), Lengths(500, 0.8, 10**6)
    drawn = [lengths.draw(source) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(500, rel=0.03)
    assert max(Lengths(500, 2.0, 900).draw(source) for _ in range(500)) == 900


def test_splits_go_from_end_to_end() -> None:
    assert [str(one) for one in splits(ROLES, 4)] == ["split:1:3", "split:2:2", "split:3:1"]
    many = splits(ROLES, 512)
    assert len(many) == 9 and (many[0].shares, many[-1].shares) == ((1, 511), (511, 1))
    assert splits(ROLES, 1) == [] and splits((ROLLOUT,), 4) == []
    assert all(sum(one.shares) == 8 for one in splits((*ROLES, "reward_model"), 8))
