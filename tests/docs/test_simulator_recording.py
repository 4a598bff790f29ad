"""A recorded round played again: its sizes, its speeds, its seconds."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from simulator.comparison import Scenario, compare_recorded
from simulator.recording import Request, Sample, curve, read_trace, recorded, requests_of
from simulator.simulation import Demand, Lengths, Machine, SimulatedRound, Workload
from simulator.speeds import Speed

from ycore.errors import DataError
from ycore.placement.allocator import Allocator
from ycore.placement.placement import (
    JUDGE,
    REWARD_MODEL,
    ROLLOUT,
    Placement,
    SlotPool,
    parse_placement,
)
from ycore.placement.slots import Slots
from ycore.run.trace import TraceWriter

ROLES = (ROLLOUT, JUDGE)
SPEED = Speed(0.02, 0.002)
WORK = Workload(Lengths(120, 0.7, 600), {JUDGE: 40.0}, group_size=4, seed=2)
SCENARIO = Scenario(2, 0.0, 8, 2, 4, 6, False, 4, 600, 120.0, 0.3, (0.02, 0.002), 0)
LINE = Speed(0.02, 0.003)


def record(words: str, *, tokens: bool = True) -> list[list[Request]]:
    """Return the requests that a run would have written down, from rounds whose truth is known."""
    allocator = Allocator(SlotPool(2, ROLES, dict.fromkeys(ROLES, 64)), parse_placement(words))
    rounds = []
    for number in range(4):
        round_ = SimulatedRound(
            [allocator], Machine(dict.fromkeys(ROLES, SPEED), {}), WORK.group_at, Demand(6)
        )
        round_.position = 100 * number
        outcome = round_.run()
        lanes = [lane for lane in outcome.lanes if lane.name != "swap"]
        sizes = sorted(
            (size, role)
            for position in range(round_.position - outcome.drawn, round_.position)
            for completion in WORK.group_at(position).completions
            for role, size in completion.items()
        )
        assert len(sizes) == len(lanes)
        requests = _requests(lanes, round_.position - outcome.drawn, tokens=tokens)
        rounds.append([_later(request, 1000.0 * number) for request in requests])
    return rounds


def _requests(lanes: list, first: int, *, tokens: bool) -> list[Request]:  # type: ignore[type-arg]
    """Number rollouts in the order they were asked, by matching lengths to lanes that began at 0."""
    lengths = [
        completion[ROLLOUT]
        for position in range(first, first + 6)
        for completion in WORK.group_at(position).completions
    ]
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    rollouts = sorted(
        (lane for lane in lanes if lane.name == ROLLOUT), key=lambda lane: lane.seconds
    )
    numbered = [
        Request(
            index,
            ROLLOUT,
            lane.slot,
            0.0,
            lane.began,
            lane.began + lane.seconds,
            lengths[index] if tokens else 0,
        )
        for index, lane in zip(order, rollouts, strict=True)
    ]
    judged = sorted((lane for lane in lanes if lane.name == JUDGE), key=lambda lane: lane.began)
    return numbered + [
        Request(
            100 + number,
            JUDGE,
            lane.slot,
            lane.began,
            lane.began,
            lane.began + lane.seconds,
            40 if tokens else 0,
        )
        for number, lane in enumerate(judged)
    ]


def _later(request: Request, seconds: float) -> Request:
    return replace(
        request,
        queued=request.queued + seconds,
        began=request.began + seconds,
        ended=request.ended + seconds,
    )


def test_speeds_are_found_again() -> None:
    recording = recorded(record("split:1:1"), group_size=4)
    for role in ROLES:
        for depth in (8, 16, 24):  # what it met; of one request alone the rounds say little
            assert recording.speeds[role].step_s(depth) == pytest.approx(
                SPEED.step_s(depth), rel=0.05
            )
    assert len(recording.rounds) == 4 and all(len(groups) == 6 for groups in recording.rounds)


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "no tokens"])
def test_the_recorded_placement_takes_as_long_as_it_took(tokens: bool) -> None:
    played = compare_recorded(record("split:1:1", tokens=tokens), SCENARIO)
    (again,) = [
        result for result in played.results if result.placement == Placement("split", (1, 1))
    ]
    assert played.recorded_s is not None
    assert again.seconds == pytest.approx(played.recorded_s, rel=0.1)


def test_groups_that_came_later_come_later_again() -> None:
    first = [Request(n, ROLLOUT, 0, 0.0, 0.0, 1.0 + n, 10) for n in range(2)]
    second = [Request(n, ROLLOUT, 0, 2.5, 2.5, 4.0, 10) for n in (2, 3)]
    recording = recorded([[*first, *second]], group_size=2)
    assert [group.after for group in recording.rounds[0]] == [0, 1]


def test_scorers_come_in_the_same_order_in_every_process() -> None:
    roles = (ROLLOUT, REWARD_MODEL, JUDGE)
    requests = [
        Request(number, role, 0, 0.0, float(number), 9.0, 5)
        for number, role in enumerate(roles)
    ]
    ((group,),) = recorded([requests], group_size=1).rounds
    assert [list(sizes) for sizes in group.completions] == [[ROLLOUT, JUDGE, REWARD_MODEL]]


def test_an_empty_trace_is_said_to_be_one() -> None:
    with pytest.raises(DataError, match="no whole round"):
        recorded([[]], group_size=2)


def seen(*met: tuple[float, float]) -> list[Sample]:
    """Return three requests of ten tokens for each (depth, step)."""
    return [Sample(10.0, 10.0 * step, depth) for depth, step in met for _ in range(3)]


def test_points_are_what_was_met_and_lines_lie_between() -> None:
    recording = curve(LINE, seen((1, 0.05), (8, 0.06), (32, 0.14)))
    assert [recording.step_s(depth) for depth in (1, 8, 20, 32)] == pytest.approx(
        [0.05, 0.06, 0.10, 0.14]
    )


def test_beyond_the_ends_the_line_leads_on() -> None:
    recording = curve(LINE, seen((8, 0.06), (32, 0.14)))
    assert recording.step_s(42) == pytest.approx(0.17) and recording.step_s(4) == pytest.approx(
        0.048
    )
    assert curve(LINE, seen((60, 0.2))).step_s(1) == pytest.approx(0.023)
    assert curve(Speed(0.9, 0.003), seen((60, 0.2))).step_s(1) == pytest.approx(0.2), (
        "never longer than when deeper"
    )


def test_requests_count_by_their_tokens_and_few_join_others() -> None:
    recording = curve(
        LINE, [Sample(30.0, 3.0, 3.0), Sample(10.0, 2.0, 4.0), Sample(10.0, 1.0, 5.0)]
    )
    assert recording.depths == pytest.approx((3.6,)) and recording.seconds == pytest.approx(
        (0.12,)
    )
    several = curve(LINE, [*seen((2, 0.05)), Sample(10.0, 5.0, 50.0)])
    assert len(several.depths) == 1


def test_a_step_is_never_shorter_when_deeper() -> None:
    recording = curve(LINE, seen((1, 0.06), (8, 0.05), (32, 0.14)))
    assert recording.seconds == pytest.approx((0.06, 0.06, 0.14))


def test_the_trace_of_live_slots_is_read_back(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"

    async def play() -> None:
        slots = Slots(
            2,
            allocator=Allocator(SlotPool(2, ROLES), parse_placement("split:1:1")),
            trace=TraceWriter(trace),
        )
        async with slots.round():
            for role, tokens in ((ROLLOUT, 5), (JUDGE, 0)):
                async with slots.turn(role) as slot:
                    slot.num_tokens = tokens
                    await asyncio.sleep(0.01)
        await slots.end_round(list)

    asyncio.run(play())
    ((rollout, verdict),) = requests_of(read_trace(trace))
    assert (rollout.role, rollout.slot, rollout.tokens) == (ROLLOUT, 0, 5)
    assert (verdict.role, verdict.slot, verdict.tokens) == (JUDGE, 1, 0)
    assert rollout.queued <= rollout.began < rollout.ended <= verdict.ended
    assert [
        group.completions for group in recorded([[rollout, verdict]], group_size=1).rounds[0]
    ]
