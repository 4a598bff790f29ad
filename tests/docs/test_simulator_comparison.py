"""Placements side by side: which are compared, and what dynamic learns over a few rounds."""

from simulator.comparison import candidates, recommend, simulate, splits
from simulator.simulation import (
    Demand,
    Lengths,
    Machine,
    SimulatedGroup,
    SimulatedRound,
    Workload,
)
from simulator.speeds import Speed

from ycore.placement.allocator import Allocator
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement

ROLES = (ROLLOUT, JUDGE)
SPEED = Speed(0.01, 0.001)
MACHINE = Machine({ROLLOUT: SPEED, JUDGE: SPEED}, {ROLLOUT: 4.0, JUDGE: 2.0})


def pool(num_slots: int, *, exclusive: bool = True) -> SlotPool:
    return SlotPool(num_slots, ROLES, {ROLLOUT: 64, JUDGE: 64}, exclusive=exclusive, swap_s=3.0)


def test_dynamic_is_never_far_behind_and_often_ahead() -> None:
    """A small sweep; the whole one is a benchmark."""
    ratios = []
    for judge_work in (0.2, 1.0, 4.0):
        work = Workload(
            Lengths(300, 0.8, 2000), {JUDGE: 300 * judge_work}, group_size=4, seed=1
        )
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
        best = min(
            result.seconds for words, result in results.items() if words.startswith("split")
        )
        ratios.append(results["dynamic"].seconds / best)
        assert recommend(list(results.values())).seconds <= 1.02 * min(
            result.seconds for result in results.values()
        )
    assert max(ratios) < 1.15, ratios


def test_where_a_judge_reads_long_prompts_one_after_another_dynamic_learns_to_share_them() -> (
    None
):
    """The second load of docs/placement.md, with speeds of engines on two cores and published swaps."""
    work = Workload(Lengths(48, 0.8, 384), {JUDGE: 1.0}, group_size=4, teach_share=0.7, seed=1)
    speeds = {ROLLOUT: Speed(0.019, 0.0015), JUDGE: Speed(0.016, 0.0033)}
    machine = Machine(speeds, {ROLLOUT: 1.92, JUDGE: 1.44}, {ROLLOUT: 0.02, JUDGE: 0.57})
    results = [
        simulate(
            parse_placement(words),
            SlotPool(2, ROLES, dict.fromkeys(ROLES, 256), exclusive=True, swap_s=1.68),
            machine,
            lambda number: work.group_at,
            Demand(12, dynamic=True),
            num_rounds=6,
            warm_up=2,
            position_of=lambda number: 1000 * number,
        )
        for words in ("dynamic", "split:1:1", "colocated")
    ]
    dynamic, split, colocated = (result.seconds for result in results)
    assert dynamic < 0.8 * split and dynamic < 1.02 * colocated, (dynamic, split, colocated)
    assert results[0].swaps > 0, "slots move within a round"


def test_where_verdicts_are_short_and_all_engines_stay_up_dynamic_learns_to_share_the_slots() -> (
    None
):
    work = Workload(Lengths(96, 0.8, 512), {JUDGE: 1.0}, teach_share=0.7, seed=1)
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


def test_splits_go_from_end_to_end() -> None:
    assert [str(split) for split in splits(ROLES, 4)] == ["split:1:3", "split:2:2", "split:3:1"]
    many = splits(ROLES, 512)
    assert len(many) == 9 and (many[0].shares, many[-1].shares) == ((1, 511), (511, 1))
    assert splits(ROLES, 1) == [] and splits((ROLLOUT,), 4) == []
    assert all(sum(split.shares) == 8 for split in splits((*ROLES, "reward_model"), 8))


def test_where_prompts_come_again_the_longest_are_begun_first() -> None:
    """One slot that takes two requests, and groups of one: three short ones and a long one, asked for last."""
    groups = [SimulatedGroup(({ROLLOUT: size},)) for size in (10.0, 10.0, 10.0, 30.0)]
    slots, machine = (
        SlotPool(1, (ROLLOUT,), {ROLLOUT: 2}),
        Machine({ROLLOUT: Speed(1.0, 0.0)}, {}),
    )

    def seconds(*, known: bool) -> float:
        demand = Demand(4, known_lengths=known)
        return (
            SimulatedRound([Allocator(slots)], machine, groups.__getitem__, demand)
            .run()
            .seconds
        )

    assert (seconds(known=False), seconds(known=True)) == (40.0, 30.0)
