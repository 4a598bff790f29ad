"""Dealing a round into micro-batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.trl.batches import deal, flatten
from ycore.types import Completion, Draw, Group, Prompt, Score


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Tokens of each group, group size, sequences a micro-batch, windows: what `config.batch` lets through."""
    group_size, windows = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    groups_per_window = draw(st.integers(1, 4))
    in_window = groups_per_window * group_size
    per_batch = draw(
        st.sampled_from([n for n in range(1, in_window + 1) if in_window % n == 0])
    )
    total = groups_per_window * windows
    return (
        draw(st.lists(st.integers(1, 99), min_size=total, max_size=total)),
        group_size,
        per_batch,
        windows,
    )


@given(rounds(), st.integers(0, 9))
def test_every_sequence_is_dealt_once_into_full_micro_batches(
    dealt: tuple[list[int], int, int, int], seed: int
) -> None:
    tokens, group_size, per_batch, windows = dealt
    indices = deal(tokens, group_size=group_size, num_windows=windows, seed=seed)
    assert sorted(indices) == list(range(len(tokens) * group_size))
    assert len(indices) % per_batch == 0
    assert indices == deal(tokens, group_size=group_size, num_windows=windows, seed=seed)


@given(rounds(), st.integers(0, 9))
def test_groups_stay_whole_and_the_longest_of_a_window_come_first(
    dealt: tuple[list[int], int, int, int], seed: int
) -> None:
    tokens, group_size, per_batch, windows = dealt
    indices = deal(tokens, group_size=group_size, num_windows=windows, seed=seed)
    order = [index // group_size for index in indices]
    groups = order[::group_size]
    assert order == [group for group in groups for _ in range(group_size)]
    per_window = len(groups) // windows
    for start in range(0, len(groups), per_window):
        lengths = [tokens[group] for group in groups[start : start + per_window]]
        assert lengths == sorted(lengths, reverse=True)
    if per_batch % group_size == 0:
        assert all(
            len(set(order[start : start + per_batch])) == per_batch // group_size
            for start in range(0, len(order), per_batch)
        )


def test_windows_are_drawn_not_sorted() -> None:
    tokens = list(range(1, 41))
    means = []
    for seed in range(50):
        first_window = deal(tokens, group_size=2, num_windows=2, seed=seed)[:40]
        means.append(sum(tokens[index // 2] for index in first_window) / 40)
    assert sum(means) / 50 == pytest.approx(20.5, abs=1.0)
    orders = {tuple(deal(tokens, group_size=2, num_windows=1, seed=s)) for s in range(3)}
    assert len(orders) == 1
    assert max(means) < 30 and min(means) > 11


def test_a_row_for_trl_has_no_column_of_the_dataset() -> None:
    """TRL tells whether a row with pictures is a chat by any of several columns, and `chosen` may be a text."""
    chat = [{"role": "user", "content": "What is it?"}]
    columns = {"chosen": "A cat.", "messages": "none", "image": "cat.png", "answer": "cat"}
    draw = Draw(0, Prompt(0, chat, columns), (1, 2))
    group = Group(draw, (Completion((3,), None, "c", "stop", 0),), ((Score(1.0),),))
    assert [sequence.row for sequence in flatten([group])] == [{"prompt": chat}]
    assert flatten([group], open_image=str)[0].row.keys() == {"prompt", "images"}
