"""Who trains on which group: as many groups and about as many tokens on every rank. Pure.

Every rank computes the same deal from the same gathered numbers, so no rank leads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_EVEN_ENOUGH = 1.02  # imbalance below which moving another group is not worth it
_MAX_SWAPS = 1000


@dataclass(frozen=True, slots=True)
class Offer:
    """One finished group as other ranks see it: numbers only."""

    rank: int
    index: int
    position: int
    num_tokens: int
    teaches: bool

    @property
    def key(self) -> tuple[int, int]:
        return self.rank, self.index


@dataclass(frozen=True, slots=True)
class Deal:
    """`chosen[rank]`: the offers that this rank trains on. All other groups stay where they are."""

    chosen: tuple[tuple[Offer, ...], ...]

    @property
    def moves(self) -> list[tuple[Offer, int]]:
        """(offer, receiving rank) of every group that changes ranks, in an order that all ranks share."""
        return [(offer, rank) for rank, offers in enumerate(self.chosen) for offer in offers if offer.rank != rank]

    def metrics(self) -> dict[str, float]:
        """Groups that fill up the step without teaching, and the imbalance of tokens before and after the deal."""
        chosen = [offer for hand in self.chosen for offer in hand]
        metrics = {"ycore/sampling/filled": float(sum(not offer.teaches for offer in chosen))}
        if len(self.chosen) > 1:
            before = [sum(o.num_tokens for o in chosen if o.rank == rank) for rank in range(len(self.chosen))]
            metrics["ycore/balance/before"] = imbalance(before)
            metrics["ycore/balance/after"] = imbalance([sum(o.num_tokens for o in hand) for hand in self.chosen])
        return metrics


def imbalance(tokens: Sequence[int]) -> float:
    """The busiest rank's tokens over the mean of all ranks; 1.0 is perfect."""
    return max(tokens) * len(tokens) / max(1, sum(tokens))


def choose(offers: Sequence[Offer], num_wanted: int) -> list[Offer]:
    """The groups to train on: those that can teach in the order of their draws, then, if too few, the others.

    The order of draws, not of finishing: otherwise short completions would be preferred to long ones.
    """
    return sorted(offers, key=lambda offer: (not offer.teaches, offer.position))[:num_wanted]


def deal_groups(offers: Sequence[Offer], *, world: int, per_rank: int) -> Deal:
    """Deal `world * per_rank` groups so that every rank has about the same number of tokens.

    Each rank first keeps its own groups. What it has too many goes to the lightest rank with room, longest group first.
    Then groups are swapped until the loads are even enough. So few groups travel. `offers` are those of all ranks.
    """
    hands: list[list[Offer]] = [[] for _ in range(world)]
    over: list[Offer] = []
    for offer in choose(offers, world * per_rank):
        (hands[offer.rank] if len(hands[offer.rank]) < per_rank else over).append(offer)
    loads = [sum(offer.num_tokens for offer in hand) for hand in hands]
    for offer in sorted(over, key=lambda offer: (-offer.num_tokens, offer.position)):
        rank = min((rank for rank in range(world) if len(hands[rank]) < per_rank), key=lambda r: (loads[r], r))
        hands[rank].append(offer)
        loads[rank] += offer.num_tokens
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
        delta = hands[heavy][ours].num_tokens - hands[rank][theirs].num_tokens
        hands[heavy][ours], hands[rank][theirs] = hands[rank][theirs], hands[heavy][ours]
        loads[heavy] -= delta
        loads[rank] += delta


def _best_swap(hands: list[list[Offer]], loads: list[int], heavy: int) -> tuple[int, int, int] | None:
    best, best_peak = None, loads[heavy]
    for rank in range(len(hands)):
        for ours, offer in enumerate(hands[heavy]):
            for theirs, other in enumerate(hands[rank]):
                delta = offer.num_tokens - other.num_tokens
                peak = max(loads[heavy] - delta, loads[rank] + delta)
                if delta > 0 and peak < best_peak:
                    best, best_peak = (ours, rank, theirs), peak
    return best
