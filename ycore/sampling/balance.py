"""Who trains on which group: the same number of groups and about the same number of tokens on every rank.

Every rank computes the same deal from the same gathered numbers, so no rank leads.

Not here: how a group travels (`controller.exchange`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

EVEN_ENOUGH = 1.02
"""Imbalance from which on another swap is not worth moving a group."""

MAX_SWAPS = 1000


@dataclass(frozen=True, slots=True)
class Offer:
    """One finished group as the others hear of it: numbers only."""

    rank: int
    index: int
    position: int
    num_tokens: int
    teaches: bool


@dataclass(frozen=True, slots=True)
class Deal:
    """`chosen[rank]`: the offers that rank trains on. The rest stay where they are."""

    chosen: tuple[tuple[Offer, ...], ...]

    @property
    def moves(self) -> list[tuple[Offer, int]]:
        """(offer, rank it goes to) for every group that changes ranks, in an order all ranks share."""
        return [(offer, rank) for rank, offers in enumerate(self.chosen) for offer in offers if offer.rank != rank]


def imbalance(tokens: Sequence[int]) -> float:
    """The busiest rank's tokens over the mean: 1.0 is perfect."""
    return max(tokens) * len(tokens) / max(1, sum(tokens))


def choose(offers: Sequence[Offer], num_wanted: int) -> list[Offer]:
    """The groups to train on: those that teach in the order they were drawn, then, if short, those that do not.

    By draw and not by finish, so that short completions are not preferred to long ones.
    """
    return sorted(offers, key=lambda offer: (not offer.teaches, offer.position))[:num_wanted]


def deal_groups(offers: Sequence[Offer], *, world: int, per_rank: int) -> Deal:
    """Deal `world * per_rank` groups so that every rank has about the same number of tokens.

    Ranks keep what they have as far as they may, what is over goes to the lightest rank with room, longest first, and
    groups are swapped only until the loads are even enough: little travels.
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
    """Trade one group of the heaviest rank for a lighter one elsewhere, as long as the pair's peak falls."""
    for _ in range(MAX_SWAPS):
        if imbalance(loads) <= EVEN_ENOUGH:
            return
        heavy = loads.index(max(loads))
        trade = _best_trade(hands, loads, heavy)
        if trade is None:
            return
        ours, rank, theirs = trade
        delta = hands[heavy][ours].num_tokens - hands[rank][theirs].num_tokens
        hands[heavy][ours], hands[rank][theirs] = hands[rank][theirs], hands[heavy][ours]
        loads[heavy] -= delta
        loads[rank] += delta


def _best_trade(hands: list[list[Offer]], loads: list[int], heavy: int) -> tuple[int, int, int] | None:
    best, best_peak = None, loads[heavy]
    for rank in range(len(hands)):
        for ours, offer in enumerate(hands[heavy]):
            for theirs, other in enumerate(hands[rank]):
                delta = offer.num_tokens - other.num_tokens
                peak = max(loads[heavy] - delta, loads[rank] + delta)
                if delta > 0 and peak < best_peak:
                    best, best_peak = (ours, rank, theirs), peak
    return best
