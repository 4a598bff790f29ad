"""What another number of ranks goes on from: the states and the rounds of the ranks before them, dealt anew. Pure.

No position is lost, none comes twice, and those to come keep their order.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ycore.round.peers import Offer, deal_groups
from ycore.round.sampling import Shard
from ycore.types import Group


def regroup_states(states: Sequence[Mapping[str, Any]], *, world: int) -> list[dict[str, Any]]:
    """The controllers' states (`RankLoop.state`) for `world` ranks, from those of all ranks before them, in order.

    The ranks' estimates of the yield are nearly the same, and the first one's is taken. What placement has learned is
    known to the first rank of each machine, and given to all.
    """
    first = states[0]
    gaps, start = to_come(
        [state["cursor"] for state in states], first.get("gaps", ()), first.get("start", 0)
    )
    waiting = sorted((item for state in states for item in state["surplus"]), key=_position)
    placement = next(
        (state["placement"] for state in states if state.get("placement") is not None), None
    )
    common = {
        "cursor": 0,
        "gaps": list(gaps),
        "start": start,
        "yield": first["yield"],
        "placement": placement,
    }
    common |= {
        name: first.get(name) for name in ("curriculum", "constraint_weights")
    }  # the same on all ranks
    carried = sorted(
        (group for state in states for group in state.get("carried", ())), key=_drawn_at
    )
    each = [(waiting[rank::world], carried[rank::world]) for rank in range(world)]
    return [{**common, "surplus": surplus, "carried": unfinished} for surplus, unfinished in each]


def to_come(cursors: Sequence[int], gaps: Sequence[int], start: int) -> tuple[tuple[int, ...], int]:
    """The positions that no rank has drawn, as a new `Shard`'s `gaps` and `start`.

    Args:
        cursors: how many positions each rank has drawn from its shard.
        gaps, start: of the shards that they drew from.
    """
    world, everything = len(cursors), Shard(gaps=tuple(gaps), start=start)
    end = max(len(gaps), max(cursors) * world)
    left = [
        everything.position(place)
        for place in range(end)
        if place // world >= cursors[place % world]
    ]
    start = everything.position(end)
    while left and left[-1] == start - 1:
        start = left.pop()
    return tuple(left), start


def regroup_round(parts: Sequence[Sequence[Group]], *, world: int) -> list[list[Group]]:
    """A round's groups for `world` ranks, about the same number of tokens each, from those of all ranks before them.

    Groups are dropped from the end where they cannot be divided evenly; such a round has another size and is not used.
    """
    groups = sorted(
        (group for part in parts for group in part), key=lambda group: group.draw.position
    )
    offers = [
        Offer(number % world, number // world, group.draw.position, group.num_tokens, teaches=True)
        for number, group in enumerate(groups)
    ]
    deal = deal_groups(offers, world=world, per_rank=len(groups) // world)
    return [[groups[offer.index * world + offer.rank] for offer in hand] for hand in deal.chosen]


def _position(item: Mapping[str, Any]) -> int:
    return _drawn_at(item["group"])


def _drawn_at(group: Mapping[str, Any]) -> int:
    return int(group["draw"]["position"])
