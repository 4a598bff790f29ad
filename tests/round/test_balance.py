"""Dealing: every rank its number of groups, each group once, about the same tokens, and little that travels.

The long-tailed lengths: a completion has lognormal(5, 1) tokens, at most 4096 (median 148, mean 245, one in fifty above
1,150), a group has eight of them, a rank trains on eight groups.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.round.peers import Deal, GroupSummary, choose, deal_groups, imbalance
from ycore.round.sampling import Rules, attention_cost
from ycore.types import Completion, Draw, Group, Prompt, Score

WORLD, PER_RANK, GROUP_SIZE = 8, 8, 8


def long_tailed(
    dice: random.Random, *, num_offers: int = WORLD * PER_RANK, world: int = WORLD
) -> list[GroupSummary]:
    def tokens() -> int:
        return sum(min(4096, 1 + int(dice.lognormvariate(5, 1))) for _ in range(GROUP_SIZE))

    return [GroupSummary(n % world, n // world, n, tokens(), True) for n in range(num_offers)]


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[GroupSummary], int, int]:
    """Offers of some ranks, at least as many as are trained on, unevenly spread."""
    world, per_rank = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    num_offers = world * per_rank + draw(st.integers(0, 10))
    counts = [0] * world
    summaries = []
    for position in range(num_offers):
        rank = draw(st.integers(0, world - 1))
        summaries.append(
            GroupSummary(
                rank, counts[rank], position, draw(st.integers(1, 10_000)), draw(st.booleans())
            )
        )
        counts[rank] += 1
    return summaries, world, per_rank


@given(tables())
def test_every_chosen_group_is_dealt_once_and_every_rank_has_its_number(
    table: tuple[list[GroupSummary], int, int],
) -> None:
    summaries, world, per_rank = table
    deal = deal_groups(summaries, world=world, per_rank=per_rank)
    assert [len(rank_groups) for rank_groups in deal.chosen] == [per_rank] * world
    dealt = [summary for rank_groups in deal.chosen for summary in rank_groups]
    assert sorted(dealt, key=lambda o: o.position) == sorted(
        choose(summaries, world * per_rank), key=lambda o: o.position
    )
    assert len({(summary.rank, summary.index) for summary in dealt}) == world * per_rank
    assert all(summary.rank != receiver for summary, receiver in deal.moves)


@given(tables())
def test_what_teaches_comes_first_and_the_earlier_drawn_before_the_later(
    table: tuple[list[GroupSummary], int, int],
) -> None:
    summaries, world, per_rank = table
    chosen = choose(summaries, world * per_rank)
    left = [summary for summary in summaries if summary not in chosen]
    for summary in left:
        assert all(
            (not chosen_summary.teaches, chosen_summary.position)
            < (not summary.teaches, summary.position)
            for chosen_summary in chosen
        )


@given(tables(), st.randoms(use_true_random=False))
def test_every_rank_computes_the_same_deal(
    table: tuple[list[GroupSummary], int, int], dice: random.Random
) -> None:
    summaries, world, per_rank = table
    shuffled = list(summaries)
    dice.shuffle(shuffled)
    assert deal_groups(shuffled, world=world, per_rank=per_rank) == deal_groups(
        summaries, world=world, per_rank=per_rank
    )


@given(tables())
def test_with_even_counts_dealing_never_makes_it_worse(
    table: tuple[list[GroupSummary], int, int],
) -> None:
    summaries, world, per_rank = table
    even = [
        GroupSummary(n % world, n // world, n, summary.cost, True)
        for n, summary in enumerate(summaries)
    ]
    even = even[: world * per_rank]
    assert imbalance(loads(deal_groups(even, world=world, per_rank=per_rank))) <= imbalance(
        loads_before(even, world)
    )


@pytest.mark.parametrize("seed", range(100))
def test_long_tails_over_eight_ranks_come_out_even(seed: int) -> None:
    summaries = long_tailed(random.Random(seed))
    deal = deal_groups(summaries, world=WORLD, per_rank=PER_RANK)
    assert imbalance(loads(deal)) <= 1.05
    assert imbalance(loads_before(summaries, WORLD)) > imbalance(loads(deal))
    assert len(deal.moves) <= WORLD * PER_RANK // 2, "most groups stay where they were written"


def test_an_even_table_moves_nothing() -> None:
    summaries = [
        GroupSummary(rank, index, 4 * index + rank, 100 + index, True)
        for rank in range(4)
        for index in range(6)
    ]
    assert deal_groups(summaries, world=4, per_rank=6).moves == []


def loads(deal: Deal) -> list[int]:
    return [sum(summary.cost for summary in rank_groups) for rank_groups in deal.chosen]


def loads_before(summaries: list[GroupSummary], world: int) -> list[int]:
    return [
        sum(summary.cost for summary in summaries if summary.rank == rank)
        for rank in range(world)
    ]


QWEN_HALF_B = {
    "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936,
}  # fmt: skip


def of_length(position: int, lengths: list[int]) -> Group:
    written = tuple(
        Completion((5,) * length, (-1.0,) * length, "", "stop", 0) for length in lengths
    )
    return Group(
        Draw(position, Prompt(position, ""), (1,) * 64),
        written,
        ((Score(1.0),),) * len(lengths),
    )


BY_TOKENS = Rules(group_size=4, seed=0, reward_weights=(1.0,))


def spread_of(cost: Rules, by: Rules, *, longest: int, seed: int) -> float:
    """The imbalance of `cost` after a deal by `by`: 4 ranks x 8 groups of 4 long-tailed completions."""
    dice, groups = random.Random(seed), []
    for position in range(32):
        drawn = (int(longest / 8 * dice.lognormvariate(0, 1)) for _ in range(4))
        groups.append(of_length(position, [max(1, min(longest, length)) for length in drawn]))
    summaries = [
        GroupSummary(n % 4, n // 4, n, by.cost_of(group), True)
        for n, group in enumerate(groups)
    ]
    deal = deal_groups(summaries, world=4, per_rank=8)
    return imbalance(
        [
            sum(cost.cost_of(groups[summary.position]) for summary in rank_groups)
            for rank_groups in deal.chosen
        ]
    )


def test_long_groups_are_dealt_by_what_they_cost_and_not_by_their_tokens() -> None:
    cost = replace(BY_TOKENS, attention_cost=attention_cost(QWEN_HALF_B))
    assert cost.attention_cost * 32768 / 2 == pytest.approx(1.43, abs=0.02), (
        "at 32k attention costs more than the rest"
    )
    by_cost = [spread_of(cost, cost, longest=32768, seed=seed) for seed in range(10)]
    by_tokens = [spread_of(cost, BY_TOKENS, longest=32768, seed=seed) for seed in range(10)]
    assert max(by_cost) < 1.03 and sum(by_tokens) / 10 > 1.03
    short = [
        spread_of(cost, by, longest=512, seed=seed)
        for by in (cost, BY_TOKENS)
        for seed in range(10)
    ]
    assert max(short) < 1.025, "short ones alike"


def test_a_group_costs_its_tokens_where_the_model_is_not_known() -> None:
    group = of_length(0, [10, 300])
    assert BY_TOKENS.cost_of(group) == group.num_tokens == 310
    assert attention_cost({"hidden_size": 8}) == 0.0
