"""The allocator that ranks share: who gets which slot, what waits for whom, what a lost rank gives back. No process."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ycore.placement.allocator import Allocator, Queue
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement
from ycore.placement.service import SharedAllocator, home_rank

ROLES = (ROLLOUT, JUDGE)


class Rank:
    """Notes what the allocator has it do."""

    def __init__(self, events: list[tuple[Any, ...]], number: int) -> None:
        self.events = events
        self.number = number

    def start(self, request: int, slot: int) -> None:
        self.events.append((self.number, "start", request, slot))

    def swap(self, slot: int, asleep: str, awake: str) -> None:
        self.events.append((self.number, "swap", slot, asleep, awake))

    def queues(
        self,
        waiting: Mapping[str, int],
        in_flight: Mapping[str, int],
        oldest_s: Mapping[str, float],
    ) -> None:
        self.events.append((self.number, "queues", dict(waiting), dict(in_flight)))


class Machine:
    """Ranks, their shared allocator, and a clock that stands still."""

    def __init__(
        self,
        num_ranks: int,
        words: str = "split:1:1",
        *,
        num_slots: int = 2,
        capacity: int = 2,
        exclusive: bool = False,
    ) -> None:
        slots = SlotPool(num_slots, ROLES, dict.fromkeys(ROLES, capacity), exclusive=exclusive)
        self.shared = SharedAllocator(Allocator(slots, parse_placement(words)), num_ranks)
        self.events: list[tuple[Any, ...]] = []
        for rank in range(num_ranks):
            self.shared.listen(Rank(self.events, rank), rank)

    async def begin(self) -> "Machine":
        ranks = range(self.shared.num_ranks)
        await asyncio.gather(*(self.shared.begin_round(None) for _ in ranks))
        for _ in ranks:
            self.shared.engines_awake()
        await self.decided()
        return self

    async def decided(self) -> list[tuple[Any, ...]]:
        """Return what the ranks were told since the last call."""
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        events, self.events[:] = list(self.events), []
        return events

    async def started(self) -> list[int]:
        return [event[2] for event in await self.decided() if event[1] == "start"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("ycore.placement.service.time.perf_counter", lambda: now[0])
    return now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def test_ranks_take_turns_and_each_is_served_in_its_own_order() -> None:
    queue = Queue()
    for request, rank in [(0, 0), (2, 0), (4, 0), (6, 0), (1, 1), (3, 1), (5, 2)]:
        queue.put(request, rank)
    assert [queue.take() for _ in range(7)] == [0, 1, 5, 2, 3, 4, 6] and len(queue) == 0


def test_who_asks_again_at_once_waits_behind_the_others() -> None:
    queue, order = Queue(), []
    for rank in (0, 1):
        queue.put(rank, rank)
    for number in range(8):
        request = queue.take()
        order.append(request % 2)
        queue.put(request + 2 + 2 * number, request % 2)
    assert order == [0, 1] * 4


def test_of_a_ranks_own_the_longest_is_served_first_and_of_equals_the_first() -> None:
    queue = Queue()
    for request, rank, length in [
        (0, 0, 5.0),
        (2, 0, 9.0),
        (1, 1, 1.0),
        (4, 0, 9.0),
        (3, 1, 2.0),
        (6, 0, 7.0),
    ]:
        queue.put(request, rank, length)
    queue.remove(4, 0)
    assert [queue.take() for _ in range(5)] == [2, 3, 6, 1, 0] and len(queue) == 0
    queue.put(8, 0, 1.0)
    assert queue.take() == 8


def test_what_is_likely_long_starts_first_where_slots_are_full() -> None:
    async def work() -> list[int]:
        machine = await Machine(1, capacity=1).begin()
        for request, length in [(0, 1.0), (1, 4.0), (2, 9.0)]:
            machine.shared.ask(request, ROLLOUT, length)
        order = await machine.started()
        for _ in range(2):
            machine.shared.ended(order[-1])
            order += await machine.started()
        return order

    assert run(work()) == [2, 1, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_nobody_waits_for_more_than_one_turn_of_each_other_rank(
    events: list[tuple[int, bool]],
) -> None:
    queue, passed = Queue(), Counter[int]()
    waiting: dict[int, int] = Counter()
    for number, (rank, takes) in enumerate(events):
        if takes and queue:
            taken = queue.take() % 4
            waiting[taken] -= 1
            passed[taken] = 0
            for other in range(4):
                if waiting[other] and other != taken:
                    passed[other] += 1
                    assert passed[other] <= 3
        else:
            queue.put(4 * number + rank, rank)
            waiting[rank] += 1


def test_a_ranks_long_tail_does_not_block_the_groups_of_another() -> None:
    """Rank 0 has asked for a hundred; rank 1 comes last and gets every second place that becomes free."""

    async def work() -> list[int]:
        machine = await Machine(2, capacity=4).begin()
        for number in range(100):
            machine.shared.ask(2 * number, ROLLOUT, 0.0)
        running = await machine.started()
        for number in range(3):
            machine.shared.ask(2 * number + 1, ROLLOUT, 0.0)
        order = []
        for _ in range(6):
            machine.shared.ended(running.pop(0))
            running += await machine.started()
            order.append(running[-1] % 2)
        return order

    assert run(work()) == [0, 1, 0, 1, 0, 1]


def test_a_start_goes_to_who_asked_and_a_swap_to_the_home_of_the_slot() -> None:
    async def work() -> None:
        machine = await Machine(2, "colocated", exclusive=True).begin()
        machine.shared.ask(1, JUDGE, 0.0)
        swaps = [(home_rank(slot, 2), "swap", slot, ROLLOUT, JUDGE) for slot in range(2)]
        assert await machine.decided() == swaps
        for slot in range(2):
            machine.shared.swapped(slot)
        assert await machine.decided() == [(1, "start", 1, 0)]

    run(work())


def test_a_round_begins_when_all_have_come_and_its_requests_when_all_are_awake() -> None:
    async def work() -> None:
        machine = Machine(3)
        first = [asyncio.create_task(machine.shared.begin_round(None)) for _ in range(2)]
        await machine.decided()
        assert not any(task.done() for task in first)
        last = await machine.shared.begin_round(None)
        assert [await task for task in first] == [last] * 2 == [([ROLLOUT, JUDGE], False)] * 2
        machine.shared.ask(0, ROLLOUT, 0.0)
        for _ in range(3):
            assert await machine.decided() == []
            machine.shared.engines_awake()
        assert await machine.decided() == [(0, "start", 0, 0)]

    run(work())


def test_a_round_ends_when_all_have_ended_and_counts_once(clock: list[float]) -> None:
    async def work() -> None:
        machine = await Machine(2).begin()
        for request, role in ((0, ROLLOUT), (1, JUDGE)):
            machine.shared.ask(request, role, 0.0)
        await machine.decided()
        clock[0] = 3.0
        for request in (0, 1):
            machine.shared.ended(request)
        first = asyncio.create_task(machine.shared.end_round())
        assert await machine.decided() == []
        clock[0] = 4.0
        measurements, usage = await machine.shared.end_round()
        assert await first == (measurements, usage) and usage == [8.0, 6.0, 0.0, 0.0]
        ((rank, kind, waiting, in_flight),) = await machine.decided()
        assert (rank, kind) == (0, "queues")
        assert {*waiting.values(), *in_flight.values()} == {0}
        state = await machine.shared.learn(measurements)
        assert state == machine.shared.allocator.state() and state["work"][JUDGE][0] == 1.0

    run(work())


def test_a_lost_rank_gives_its_requests_back() -> None:
    async def work() -> None:
        machine = await Machine(2, capacity=1).begin()
        for request in (0, 1, 2, 3):
            machine.shared.ask(request, ROLLOUT, 0.0)
        assert await machine.started() == [0]
        machine.shared.leave(0)
        assert await machine.started() == [1]
        machine.shared.ended(1)
        assert await machine.started() == [3]
        machine.shared.withdraw(3)
        assert machine.shared.allocator.is_idle

    run(work())


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(0, 10**6),
    st.sampled_from(["dynamic", "colocated", "split:2:1"]),
    st.booleans(),
)
def test_no_start_is_lost_or_given_twice(
    num_ranks: int, seed: int, words: str, exclusive: bool
) -> None:
    """Ranks ask, end, give up and vanish at random."""
    run(_random_events(num_ranks, seed, words, exclusive=exclusive))


async def _random_events(num_ranks: int, seed: int, words: str, *, exclusive: bool) -> None:
    source = random.Random(seed)
    machine = await Machine(num_ranks, words, num_slots=3, exclusive=exclusive).begin()
    shared = machine.shared
    requests: dict[int, str] = {}
    running: dict[int, int] = {}
    swapping: list[int] = []
    gone: set[int] = set()
    num_starts: Counter[int] = Counter()

    async def act() -> None:
        for rank, kind, number, *details in await machine.decided():
            if kind == "start":
                assert rank == number % num_ranks and rank not in gone
                num_starts[number] += 1
                running[number] = details[0]
            elif kind == "swap":
                assert rank == home_rank(number, num_ranks)
                swapping.append(number)

    def forget(request: int) -> None:
        requests.pop(request)
        running.pop(request, None)

    for step in range(120):
        choice = source.random()
        if choice < 0.5 and step < 80:
            rank = source.choice([rank for rank in range(num_ranks) if rank not in gone])
            request = step * num_ranks + rank
            requests[request] = source.choice(ROLES)
            shared.ask(request, requests[request], 0.0)
        elif choice < 0.6 and requests:
            request = source.choice(sorted(requests))
            shared.withdraw(request)
            forget(request)
        elif choice < 0.62 and len(gone) < num_ranks - 1:
            lost = source.choice([rank for rank in range(num_ranks) if rank not in gone])
            if all(home_rank(slot, num_ranks) != lost for slot in range(3)):
                gone.add(lost)
                shared.leave(lost)
                for request in [request for request in requests if request % num_ranks == lost]:
                    forget(request)
        elif swapping and choice < 0.8:
            shared.swapped(swapping.pop())
        elif running:
            request = source.choice(sorted(running))
            shared.ended(request)
            forget(request)
        await act()
    for _ in range(1000):  # what is left runs out
        if swapping:
            shared.swapped(swapping.pop())
        elif running:
            request = min(running)
            shared.ended(request)
            forget(request)
        else:
            break
        await act()
    assert not requests and shared.allocator.is_idle
    assert max(num_starts.values(), default=1) == 1
