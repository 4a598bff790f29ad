from hypothesis import given
from hypothesis import strategies as st

from ycore.trl.forward import Cost, Row, group_by_prompt, plan_rows

prompts_of_batches = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), st.integers(0, 12)),
    min_size=1,
    max_size=12,
)
costs = st.floats(0, 1).map(Cost)


def cost_of(rows: list[Row], cost: Cost) -> float:
    return cost.of_rows(len(rows), max(row.length for row in rows))


@given(prompts_of_batches, costs, st.booleans())
def test_every_sequence_is_in_one_row_with_its_own_prompt(
    batch: list[tuple[tuple[int, ...], int]], cost: Cost, share: bool
) -> None:
    prompts, lengths = [prompt for prompt, _ in batch], [length for _, length in batch]
    rows = plan_rows(prompts, lengths, cost=cost, share=share)
    assert sorted(index for row in rows for index in row.members) == list(range(len(batch)))
    for row in rows:
        assert len({prompts[index] for index in row.members}) == 1
        assert row.length == len(prompts[row.members[0]]) - 1 + sum(lengths[index] for index in row.members)
    if not share:
        assert sorted(row.members for row in rows) == [(index,) for index in range(len(batch))]


@given(prompts_of_batches, costs)
def test_the_plan_costs_no_more_than_alone_or_all_together(
    batch: list[tuple[tuple[int, ...], int]], cost: Cost
) -> None:
    prompts, lengths = [prompt for prompt, _ in batch], [length for _, length in batch]
    chosen = cost_of(plan_rows(prompts, lengths, cost=cost), cost)
    assert chosen <= cost_of(plan_rows(prompts, lengths, cost=cost, share=False), cost)
    together = [
        Row(tuple(members), len(prompts[members[0]]) - 1 + sum(lengths[index] for index in members))
        for members in group_by_prompt(prompts)
    ]
    assert chosen <= cost_of(together, cost)


def test_a_long_prompt_is_shared_and_dear_attention_splits() -> None:
    prompts, lengths = [tuple(range(100))] * 4, [5, 5, 5, 5]
    assert plan_rows(prompts, lengths, cost=Cost(0.0)) == [Row((0, 1, 2, 3), 119)]
    assert len(plan_rows([(1,)] * 4, [50] * 4, cost=Cost(1.0))) == 4


def test_rows_of_one_group_are_of_about_equal_length() -> None:
    rows = plan_rows([(1, 2)] * 4, [9, 1, 8, 2], cost=Cost(0.05))
    assert rows == [Row((0, 1), 11), Row((2, 3), 11)]


def test_equal_prompts_need_not_stand_together() -> None:
    assert group_by_prompt([(1,), (2,), (1,), (3,), (2,)]) == [[0, 2], [1, 4], [3]]
