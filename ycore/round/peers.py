"""What the ranks of a run share: counts while a round runs, the deal at its end, and the groups that change ranks.

A rank sees no prompt or completion of another rank but those dealt to it. Every rank computes the same deal from the
same numbers, so no rank leads. `Peers` is the exchange of a run with one rank; `TorchPeers` extends it to many.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from ycore.types import Group

_LOOK_S, _LOOK_LONGEST_S = 0.05, 0.5
_PATIENCE = 0.1  # share of the time since the last result that passes before a rank looks at the counts again


@dataclass(frozen=True, slots=True)
class Offer:
    """One finished group as other ranks see it: numbers only."""

    rank: int
    index: int
    position: int
    cost: int  # of training on it: `sampling.Cost`
    teaches: bool
    lesson: tuple[float, float] | None = (
        None  # for the curriculum, of a group of this round: `curriculum.lesson_of`
    )

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.index


@dataclass(frozen=True, slots=True)
class Counts:
    """A round over all ranks: groups that count towards the need, groups in flight, groups drawn so far."""

    kept: int
    in_flight: int
    drawn: int

    @property
    def finished(self) -> int:
        return self.drawn - self.in_flight


class Tally:
    """One round's counts over all ranks. `need`: groups that all ranks need together."""

    def __init__(self, *, need: int, ready: int, starts: int) -> None:
        self.need = need
        self._counts = Counts(ready, starts, starts)

    async def add(self, *, kept: int = 0, in_flight: int = 0, drawn: int = 0) -> Counts:
        """Add what this rank has done; returns all three counts at that moment."""
        now = self._counts
        self._counts = Counts(now.kept + kept, now.in_flight + in_flight, now.drawn + drawn)
        return self._counts

    async def look(self) -> Counts:
        """The counts as far as this rank knows."""
        return self._counts

    async def news(self, *, idle_s: float, is_busy: bool) -> None:
        """Return when it is time to look again. The longer the last result is ago, the longer: a long wait costs few
        looks. `is_busy`: this rank writes groups itself."""
        await asyncio.sleep(
            (4 if is_busy else 1) * min(_LOOK_LONGEST_S, max(_LOOK_S, _PATIENCE * idle_s))
        )


class Peers:
    """The exchange with other ranks; this class has none. All ranks call these methods in the same order."""

    rank, world, bytes_sent = 0, 1, 0

    async def open_tally(self, *, need: int, ready: int, starts: int) -> Tally:
        """Begin a round in which every rank needs `need` groups; this one has `ready` of them and starts `starts`."""
        return Tally(need=need, ready=ready, starts=starts)

    async def meet(self, *, stopping: bool) -> bool:
        """Wait until every rank calls this; returns whether any of them is stopping, the same on all ranks.

        Unlike a collective it does not block the event loop, and it raises RunError when a rank has failed.
        """
        return stopping

    def gather_offers(self, offers: Sequence[Offer]) -> list[Offer]:
        """Every rank's offers; all ranks get the same list."""
        return list(offers)

    def exchange(
        self, moves: Sequence[tuple[Offer, int]], own: Sequence[Group]
    ) -> dict[tuple[int, int], Group]:
        """Send and receive the groups that change ranks; returns those received, by the key of their offer.

        `moves` are offers and the ranks that receive them, in an order that all ranks share. An offer's `index` counts
        in `own`, its rank's groups.
        """
        assert not moves, "a single rank has no other to give groups to"
        return {}

    def add_up(self, values: Sequence[float]) -> list[float]:
        """Each value's sum over all ranks."""
        return list(values)

    def ask_to_stop(self) -> None:
        """Make `stop_asked` true on every rank."""

    def stop_asked(self) -> bool:
        """Whether any rank called `ask_to_stop`; raises RunError when a rank has failed."""
        return False

    def fail(self, message: str) -> None:
        """Make the other ranks raise RunError with this message."""


_EVEN_ENOUGH = 1.02  # imbalance below which moving another group is not worth it
_MAX_SWAPS = 1000


@dataclass(frozen=True, slots=True)
class Deal:
    """`chosen[rank]`: the offers that this rank trains on. All other groups stay where they are."""

    chosen: tuple[tuple[Offer, ...], ...]

    @property
    def moves(self) -> list[tuple[Offer, int]]:
        """(offer, receiving rank) of every group that changes ranks, in an order that all ranks share."""
        return [
            (offer, rank)
            for rank, offers in enumerate(self.chosen)
            for offer in offers
            if offer.rank != rank
        ]

    def metrics(self) -> dict[str, float]:
        """Groups that fill up the step without teaching, and the imbalance of costs before and after the deal."""
        chosen = [offer for hand in self.chosen for offer in hand]
        metrics = {"ycore/sampling/filled": float(sum(not offer.teaches for offer in chosen))}
        if len(self.chosen) > 1:
            before = [
                sum(o.cost for o in chosen if o.rank == rank) for rank in range(len(self.chosen))
            ]
            metrics["ycore/balance/before"] = imbalance(before)
            metrics["ycore/balance/after"] = imbalance(
                [sum(o.cost for o in hand) for hand in self.chosen]
            )
        return metrics


def imbalance(costs: Sequence[int]) -> float:
    """The busiest rank's cost over the mean of all ranks; 1.0 is perfect."""
    return max(costs) * len(costs) / max(1, sum(costs))


def choose(offers: Sequence[Offer], num_wanted: int) -> list[Offer]:
    """The groups to train on: those that can teach in the order of their draws, then, if too few, the others.

    The order of draws, not of finishing: otherwise short completions would be preferred to long ones.
    """
    return sorted(offers, key=lambda offer: (not offer.teaches, offer.position))[:num_wanted]


def deal_groups(offers: Sequence[Offer], *, world: int, per_rank: int) -> Deal:
    """Deal `world * per_rank` groups so that training costs every rank about the same.

    Each rank first keeps its own groups. What it has too many goes to the lightest rank with room, the costliest first.
    Then groups are swapped until the loads are even enough. So few groups travel. `offers` are those of all ranks.
    """
    hands: list[list[Offer]] = [[] for _ in range(world)]
    over: list[Offer] = []
    for offer in choose(offers, world * per_rank):
        (hands[offer.rank] if len(hands[offer.rank]) < per_rank else over).append(offer)
    loads = [sum(offer.cost for offer in hand) for hand in hands]
    for offer in sorted(over, key=lambda offer: (-offer.cost, offer.position)):
        rank = min(
            (rank for rank in range(world) if len(hands[rank]) < per_rank),
            key=lambda r: (loads[r], r),
        )
        hands[rank].append(offer)
        loads[rank] += offer.cost
    _swap_while_it_helps(hands, loads)
    return Deal(tuple(tuple(sorted(hand, key=lambda offer: offer.position)) for hand in hands))


def _swap_while_it_helps(hands: list[list[Offer]], loads: list[int]) -> None:
    """Swap a group of the heaviest rank for a lighter one elsewhere, as long as the larger load of the two falls."""
    for _ in range(_MAX_SWAPS):
        if imbalance(loads) <= _EVEN_ENOUGH:
            return
        heavy = loads.index(max(loads))
        swap = _best_swap(hands, loads, heavy)
        if swap is None:
            return
        ours, rank, theirs = swap
        delta = hands[heavy][ours].cost - hands[rank][theirs].cost
        hands[heavy][ours], hands[rank][theirs] = hands[rank][theirs], hands[heavy][ours]
        loads[heavy] -= delta
        loads[rank] += delta


def _best_swap(
    hands: list[list[Offer]], loads: list[int], heavy: int
) -> tuple[int, int, int] | None:
    best, best_peak = None, loads[heavy]
    for rank in range(len(hands)):
        for ours, offer in enumerate(hands[heavy]):
            for theirs, other in enumerate(hands[rank]):
                delta = offer.cost - other.cost
                peak = max(loads[heavy] - delta, loads[rank] + delta)
                if delta > 0 and peak < best_peak:
                    best, best_peak = (ours, rank, theirs), peak
    return best
