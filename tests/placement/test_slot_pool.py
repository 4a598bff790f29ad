"""The pool of a machine: who gets which turn, what waits for whom, what a lost rank gives back. No process."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ycore.placement.allocator import Allocator, Queue
from ycore.placement.placement import JUDGE, ROLLOUT, SlotPool, parse_placement
from ycore.placement.slot_pool import Letter, Pool, home_of

ROLES = (ROLLOUT, JUDGE)


def pool_of(
    num_ranks: int,
    words: str = "split:1:1",
    *,
    num_slots: int = 2,
    capacity: int = 2,
    exclusive: bool = False,
) -> Pool:
    slots = SlotPool(num_slots, ROLES, dict.fromkeys(ROLES, capacity), exclusive=exclusive)
    return Pool(Allocator(slots, parse_placement(words)), num_ranks)


def begun(pool: Pool) -> Pool:
    for what in (["begin", None], ["awake"]):
        for rank in range(pool.num_ranks):
            pool.receive(rank, what, 0.0)
    return pool


def started(letters: Sequence[Letter]) -> list[int]:
    return [letter[1] for _, letter in letters if letter[0] == "start"]


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
    pool = begun(pool_of(1, "split:1:1", capacity=1))
    for request, length in [(0, 1.0), (1, 4.0), (2, 9.0)]:
        pool.receive(0, ["ask", request, ROLLOUT, length], 1.0)
    order = started(pool.decide(1.0))
    for _ in range(2):
        pool.receive(0, ["ended", order[-1], 1.0], 2.0)
        order += started(pool.decide(2.0))
    assert order == [2, 1, 0]


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
    pool = begun(pool_of(2, "split:1:1", capacity=4))
    for number in range(100):
        pool.receive(0, ["ask", 2 * number, ROLLOUT], 1.0)
    running = started(pool.decide(1.0))
    for number in range(3):
        pool.receive(1, ["ask", 2 * number + 1, ROLLOUT], 1.0)
    order = []
    for turn in range(6):
        pool.receive(running[0] % 2, ["ended", running.pop(0), 1.0], 2.0 + turn)
        running += started(pool.decide(2.0 + turn))
        order.append(running[-1] % 2)
    assert order == [0, 1, 0, 1, 0, 1]


def test_a_turn_is_told_to_who_asked_and_a_swap_to_the_home_of_the_slot() -> None:
    pool = begun(pool_of(2, "dynamic", exclusive=True))
    pool.receive(1, ["ask", 1, JUDGE], 1.0)
    letters = pool.decide(1.0)
    assert letters == [(home_of(slot, 2), ["swap", slot, ROLLOUT, JUDGE]) for slot in (0,)]
    pool.receive(0, ["swapped", 0], 3.0)
    assert pool.decide(3.0) == [(1, ["start", 1, 0])]


def test_a_round_begins_when_all_have_come_and_its_turns_when_all_are_awake() -> None:
    pool = pool_of(3)
    assert pool.receive(2, ["begin", None], 0.0) == pool.receive(0, ["begin", None], 1.0) == []
    letters = pool.receive(1, ["begin", None], 2.0)
    assert letters == [(rank, ["begun", [ROLLOUT, JUDGE], False]) for rank in range(3)]
    pool.receive(0, ["ask", 0, ROLLOUT], 3.0)
    for rank in range(3):
        assert pool.decide(3.0) == []
        pool.receive(rank, ["awake"], 3.0)
    assert pool.decide(4.0) == [(0, ["start", 0, 0])]


def test_a_round_ends_when_all_have_ended_and_counts_once() -> None:
    pool = begun(pool_of(2))
    for request, role in ((0, ROLLOUT), (1, JUDGE)):
        pool.receive(request, ["ask", request, role], 0.0)
    pool.decide(0.0)
    for request in (0, 1):
        pool.receive(request, ["ended", request, 30.0], 3.0)
    assert pool.receive(0, ["end"], 3.0) == []
    to_first, *to_all = pool.receive(1, ["end"], 4.0)
    assert to_first[0] == 0 and to_first[1][0] == "depths"
    (_, over), (_, same) = to_all
    kind, numbers, spent = over
    assert over == same and (kind, spent) == ("over", [8.0, 6.0, 0.0, 0.0])
    ((rank, (kind, state)),) = pool.receive(0, ["learn", numbers], 5.0)
    assert (
        (rank, kind) == (0, "learned")
        and state == pool.allocator.state()
        and state["sums"][JUDGE][0] == 1.0
    )


def test_a_lost_rank_gives_its_turns_back() -> None:
    pool = begun(pool_of(2, capacity=1))
    for request in (0, 1, 2, 3):
        pool.receive(request % 2, ["ask", request, ROLLOUT], 0.0)
    assert started(pool.decide(0.0)) == [0]
    pool.lost(0, 1.0)
    assert started(pool.decide(1.0)) == [1]
    pool.receive(1, ["ended", 1, 1.0], 2.0)
    assert started(pool.decide(2.0)) == [3]
    pool.receive(1, ["withdraw", 3], 3.0)
    assert pool.allocator.is_idle


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 10**6),
    st.sampled_from(["dynamic", "colocated", "split:2:1"]),
    st.booleans(),
)
def test_no_turn_is_lost_or_given_twice(
    num_ranks: int, seed: int, words: str, exclusive: bool
) -> None:
    """Ranks ask, end, give up and vanish at random."""
    source, now, pool = (
        random.Random(seed),
        0.0,
        begun(pool_of(num_ranks, words, num_slots=3, exclusive=exclusive)),
    )
    asked: dict[int, str] = {}
    running: dict[int, int] = {}
    swapping: list[int] = []
    gone: set[int] = set()
    given_out: Counter[int] = Counter()

    def act() -> None:
        for rank, letter in pool.decide(now):
            match letter:
                case ["start", request, slot]:
                    assert rank == request % num_ranks and rank not in gone
                    given_out[request] += 1
                    running[request] = slot
                case ["swap", slot, *_]:
                    assert rank == home_of(slot, num_ranks)
                    swapping.append(slot)

    def end(request: int, message: list[Any]) -> None:
        pool.receive(request % num_ranks, message, now)
        asked.pop(request)
        running.pop(request, None)

    for step in range(120):
        now += source.random()
        choice = source.random()
        if choice < 0.5 and step < 80 and len(gone) < num_ranks:
            rank = source.choice([rank for rank in range(num_ranks) if rank not in gone])
            asked[step * num_ranks + rank] = role = source.choice(ROLES)
            pool.receive(rank, ["ask", step * num_ranks + rank, role], now)
        elif choice < 0.6 and asked:
            request = source.choice(sorted(asked))
            end(request, ["withdraw", request])
        elif choice < 0.62 and num_ranks > 1 and len(gone) < num_ranks - 1:
            lost = source.randrange(num_ranks)
            gone.add(lost)
            pool.lost(lost, now)
            for request in [request for request in asked if request % num_ranks == lost]:
                asked.pop(request)
                running.pop(request, None)
        elif swapping and choice < 0.8:
            slot = swapping.pop()
            pool.receive(home_of(slot, num_ranks), ["swapped", slot], now)
        elif running:
            request = source.choice(sorted(running))
            end(request, ["ended", request, source.uniform(1, 50)])
        act()
    for _ in range(1000):  # what is left runs out
        now += 1.0
        if swapping:
            slot = swapping.pop()
            pool.receive(home_of(slot, num_ranks), ["swapped", slot], now)
        elif running:
            request = min(running)
            end(request, ["ended", request, 5.0])
        else:
            break
        act()
    assert not asked and pool.allocator.is_idle
    assert max(given_out.values(), default=1) == 1


def test_a_rank_gets_its_own_slot_where_none_is_freer() -> None:
    pool = begun(pool_of(4, "split:3:1", num_slots=4))
    for request in (2, 1, 0, 6, 3):
        pool.receive(request % 4, ["ask", request, ROLLOUT], 0.0)
    slots = {letter[1]: letter[2] for _, letter in pool.decide(0.0)}
    assert (slots[2], slots[1], slots[0]) == (2, 1, 0)
    assert slots[3] == 0, "its own slot is the judge's"
    assert slots[6] in (1, 2)
