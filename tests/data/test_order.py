"""The order of a run is its seed's and nothing else's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.data.prompts import PromptOrder

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 60)


@given(seed=seeds, num_rows=sizes, epoch=st.integers(0, 5))
def test_every_row_once_an_epoch(seed: int, num_rows: int, epoch: int) -> None:
    order = PromptOrder(seed=seed, num_rows=num_rows)
    rows = [order.row_at(position) for position in range(epoch * num_rows, (epoch + 1) * num_rows)]
    assert sorted(rows) == list(range(num_rows))


@given(seed=seeds, num_rows=sizes, start=st.integers(0, 200), world=st.integers(1, 5))
def test_a_restart_and_a_shard_see_the_same(seed: int, num_rows: int, start: int, world: int) -> None:
    whole = PromptOrder(seed=seed, num_rows=num_rows)
    rows = [whole.row_at(position) for position in range(start + 40)]

    resumed = PromptOrder(seed=seed, num_rows=num_rows)
    assert [resumed.row_at(position) for position in range(start, start + 40)] == rows[start:]

    shards = [PromptOrder(seed=seed, num_rows=num_rows) for _ in range(world)]
    assert [shards[position % world].row_at(position) for position in range(start + 40)] == rows


@given(seed=seeds, num_rows=sizes, positions=st.lists(st.integers(0, 300), max_size=30))
def test_the_cache_changes_nothing(seed: int, num_rows: int, positions: list[int]) -> None:
    order = PromptOrder(seed=seed, num_rows=num_rows)
    alone = [PromptOrder(seed=seed, num_rows=num_rows).row_at(position) for position in positions]
    assert [order.row_at(position) for position in positions] == alone


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        order = PromptOrder(seed=seed, num_rows=50)
        return [order.row_at(position) for position in range(number * 50, number * 50 + 50)]

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0), epoch(1, 1)]
    assert len({tuple(order) for order in orders}) == 4


def test_the_order_of_a_seed_is_written_down() -> None:
    """A run of last month must resume with the numpy of today."""
    order = PromptOrder(seed=7, num_rows=8)
    assert [order.row_at(position) for position in range(16)] == [0, 6, 7, 2, 4, 5, 1, 3, 6, 3, 1, 0, 2, 4, 7, 5]


@pytest.mark.parametrize(("seed", "num_rows"), [(0, 0), (-1, 3)])
def test_an_order_of_nothing(seed: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match="an order needs"):
        PromptOrder(seed=seed, num_rows=num_rows)


def test_positions_count_from_zero() -> None:
    with pytest.raises(ValueError, match="counts from 0"):
        PromptOrder(seed=0, num_rows=3).row_at(-1)
