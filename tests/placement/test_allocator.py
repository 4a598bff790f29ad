"""The allocator under any order of events: nothing lost, nothing idle beside work, the same on every controller."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ycore.placement.allocator import Allocator, usage_metrics
from ycore.placement.placement import (
    DYNAMIC,
    JUDGE,
    ROLLOUT,
    Action,
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
            self.allocator.ended(number, self.now)
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


@settings(max_examples=80)
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
        metrics = usage_metrics(usage)
        assert metrics["ycore/idle_share"] <= 1 and metrics["ycore/bound_ratio"] >= 1 - 1e-9
        allocator.learn(allocator.measurements())
    assert play.answered == 6 * rollouts
    if wanted.kind == "split":
        assert not any(isinstance(action, Swap) for action in play.actions)


@settings(max_examples=40)
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
            for values in zip(
                *(controller.measurements() for controller in controllers), strict=True
            )
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


def test_an_idle_slot_goes_where_the_backlog_is_worth_the_swap() -> None:
    """Two slots: the rollouts are done, and eleven verdicts of ten seconds wait behind six."""
    for swap_s, num_swaps in ((1.0, 1), (200.0, 0)):
        allocator = Allocator(pool(2, 64, swap_s=swap_s))
        allocator.restore(
            {
                "work": {ROLLOUT: [4.0, 40.0, 10.0], JUDGE: [12.0, 120.0, 120.0]},
                "division": {ROLLOUT: 1, JUDGE: 1},
                "mode": "moving",
                "swap_s": swap_s,
            }
        )
        allocator.begin_round(0.0)
        for request in range(12):
            allocator.ask(request, JUDGE)
        actions = allocator.decide(0.0)
        assert sum(isinstance(action, StartRequest) for action in actions) == 6, "half wait"
        assert [action for action in actions if isinstance(action, Swap)] == [
            Swap(0, ROLLOUT, JUDGE)
        ] * num_swaps


def test_the_last_slot_of_a_role_stays_while_work_for_it_is_to_come() -> None:
    allocator = Allocator(pool(2, 64))
    allocator.restore(
        {
            "work": {ROLLOUT: [8.0, 80.0, 80.0], JUDGE: [8.0, 8.0, 8.0]},
            "division": {ROLLOUT: 1, JUDGE: 1},
            "mode": "moving",
            "swap_s": 0.1,
        }
    )
    allocator.begin_round(0.0)
    for request in range(80):
        allocator.ask(request, ROLLOUT)
    assert not any(isinstance(action, Swap) for action in allocator.decide(0.0))


def test_a_role_without_a_slot_gets_the_first_that_is_free() -> None:
    play = Play(Allocator(pool(1, 8)))
    for _ in range(3):
        play.ask(ROLLOUT)
    play.run_out(random.Random(1))
    kinds = ["swap" if isinstance(action, Swap) else "start" for action in play.actions]
    assert kinds.count("swap") >= 1 and play.answered == 6


def test_shared_slots_take_a_verdict_at_once_beside_what_is_being_written() -> None:
    allocator = Allocator(pool(2, 8, exclusive=False, swap_s=0.0))
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
    allocator = Allocator(pool(1, 2, exclusive=False, swap_s=0.0))
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


def test_who_gives_up_leaves_nothing_behind() -> None:
    allocator = Allocator(pool(1, 1), DYNAMIC)
    for number in range(3):
        allocator.ask(number, ROLLOUT)
    assert allocator.decide(0.0) == [StartRequest(0, 0)]
    allocator.withdraw(1, 0.5)
    allocator.withdraw(0, 1.0)
    assert allocator.decide(1.0) == [StartRequest(2, 0)]
    allocator.ended(2, 2.0)
    assert allocator.is_idle
    assert allocator.end_round(2.0)[1] == pytest.approx(2.0)


def test_a_division_becomes_slots_in_order() -> None:
    awake = Allocator(pool(3), parse_placement("split:2:1")).awake
    assert awake == [ROLLOUT, ROLLOUT, JUDGE]
    assert awake.count(JUDGE) == 1
