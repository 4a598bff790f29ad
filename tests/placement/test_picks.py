"""Which slot serves a request: always the one with the fewest in flight, whatever ended, moved or was withdrawn before."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from ycore.placement.allocator import Allocator
from ycore.placement.placement import (
    JUDGE,
    ROLLOUT,
    Placement,
    SlotPool,
    StartRequest,
)

ROLES = (ROLLOUT, JUDGE)
MODES = st.sampled_from(
    [
        ("dynamic", (), True),
        ("dynamic", (), False),
        ("colocated", (), True),
        ("split", (2, 3), False),
    ]
)


@given(
    MODES,
    st.integers(2, 9),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50)), max_size=80),
)
def test_a_request_goes_to_the_slot_with_the_fewest_in_flight(
    mode: tuple[str, tuple[int, ...], bool], capacity: int, events: list[tuple[int, int]]
) -> None:
    kind, shares, exclusive = mode
    pool = SlotPool(5, ROLES, dict.fromkeys(ROLES, capacity), exclusive=exclusive)
    allocator = Allocator(pool, Placement(kind, shares))  # type: ignore[arg-type]
    ranks, slots, swapping = dict[int, int](), dict[int, int](), set[int]()
    for now, (event, number) in enumerate(events):
        if event < 3:
            ranks[now] = number
            allocator.ask(now, ROLES[number % 2], number)
        elif event == 3 and swapping:
            allocator.swapped(swapping.pop(), now)
        elif slots:
            ended = list(slots)[number % len(slots)]
            del slots[ended]
            allocator.ended(ended, now)
        awake = list(allocator.awake)  # a slot that moves takes nothing in this call
        for action in allocator.decide(now):
            if not isinstance(action, StartRequest):
                swapping.add(action.slot)
                continue
            role = ROLES[ranks[action.request] % 2]
            number_of = Counter((slot, ROLES[ranks[at] % 2]) for at, slot in slots.items())
            loads = {
                slot: (
                    number_of[slot, role],
                    sum(number_of[slot, any_role] for any_role in ROLES),
                    slot,
                )
                for slot in range(5)
                if slot not in swapping and (allocator.gathers or awake[slot] == role)
            }
            assert action.slot == min(loads, key=loads.__getitem__)
            slots[action.request] = action.slot
