"""Dealing: every rank its number of groups, each group once, about the same tokens, and little that travels.

The long-tailed lengths: a completion has lognormal(5, 1) tokens, at most 4096 (median 148, mean 245, one in fifty above
1,150), a group has eight of them, a rank trains on eight groups.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.round.peers import Deal, Offer, choose, deal_groups, imbalance

WORLD, PER_RANK, GROUP_SIZE = 8, 8, 8


def long_tailed(dice: random.Random, *, num_offers: int = WORLD * PER_RANK, world: int = WORLD) -> list[Offer]:
    def tokens() -> int:
        return sum(min(4096, 1 + int(dice.lognormvariate(5, 1))) for _ in range(GROUP_SIZE))

    return [Offer(n % world, n // world, n, tokens(), True) for n in range(num_offers)]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[Offer], int, int]:
    """Offers of some ranks, at least as many as are trained on, unevenly spread."""
    world, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    num_offers = world * per_rank + draw(st.integers(0, 10))
    counts = [0] * world
    offers = []
    for position in range(num_offers):
        rank = draw(st.integers(0, world - 1))
        offers.append(Offer(rank, counts[rank], position, draw(st.integers(1, 10_000)), draw(st.booleans())))
        counts[rank] += 1
    return offers, world, per_rank


@given(tables())
def test_every_chosen_group_is_dealt_once_and_every_rank_has_its_number(table: tuple[list[Offer], int, int]) -> None:
    offers, world, per_rank = table
    deal = deal_groups(offers, world=world, per_rank=per_rank)
    assert [len(hand) for hand in deal.chosen] == [per_rank] * world
    dealt = [offer for hand in deal.chosen for offer in hand]
    assert sorted(dealt, key=lambda o: o.position) == sorted(choose(offers, world * per_rank), key=lambda o: o.position)
    assert len({(offer.rank, offer.index) for offer in dealt}) == world * per_rank
    assert all(offer.rank != receiver for offer, receiver in deal.moves)


@given(tables())
def test_what_teaches_comes_first_and_the_earlier_drawn_before_the_later(table: tuple[list[Offer], int, int]) -> None:
    offers, world, per_rank = table
    chosen = choose(offers, world * per_rank)
    left = [offer for offer in offers if offer not in chosen]
    for offer in left:
        assert all((not one.teaches, one.position) < (not offer.teaches, offer.position) for one in chosen)


@given(tables(), st.randoms(use_true_random=False))
def test_every_rank_computes_the_same_deal(table: tuple[list[Offer], int, int], dice: random.Random) -> None:
    offers, world, per_rank = table
    shuffled = list(offers)
    dice.shuffle(shuffled)
    assert deal_groups(shuffled, world=world, per_rank=per_rank) == deal_groups(offers, world=world, per_rank=per_rank)


@given(tables())
def test_with_even_counts_dealing_never_makes_it_worse(table: tuple[list[Offer], int, int]) -> None:
    offers, world, per_rank = table
    even = [Offer(n % world, n // world, n, offer.num_tokens, True) for n, offer in enumerate(offers)]
    even = even[: world * per_rank]
    assert imbalance(loads(deal_groups(even, world=world, per_rank=per_rank))) <= imbalance(loads_before(even, world))


@pytest.mark.parametrize("seed", range(100))
def test_long_tails_over_eight_ranks_come_out_even(seed: int) -> None:
    offers = long_tailed(random.Random(seed))
    deal = deal_groups(offers, world=WORLD, per_rank=PER_RANK)
    assert imbalance(loads(deal)) <= 1.05
    assert imbalance(loads_before(offers, WORLD)) > imbalance(loads(deal))
    assert len(deal.moves) <= WORLD * PER_RANK // 2, "most groups stay where they were written"


def test_an_even_table_moves_nothing() -> None:
    offers = [Offer(rank, index, 4 * index + rank, 100 + index, True) for rank in range(4) for index in range(6)]
    assert deal_groups(offers, world=4, per_rank=6).moves == []


def loads(deal: Deal) -> list[int]:
    return [sum(offer.num_tokens for offer in hand) for hand in deal.chosen]


def loads_before(offers: list[Offer], world: int) -> list[int]:
    return [sum(offer.num_tokens for offer in offers if offer.rank == rank) for rank in range(world)]
