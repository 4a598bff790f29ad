import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.errors import DataError
from ycore.rollout.turns import completion_seed
from ycore.round.sampling import DrawSource, ExpectedLengths, Shard
from ycore.types import Prompt

PROMPTS = [Prompt(row=row, content="x" * (row + 1)) for row in range(7)]


def encode(prompt: Prompt) -> tuple[int, ...]:
    return tuple(range(len(str(prompt.content))))


WHOLE = Shard()


def source(
    *, seed: int | None = 3, shard: Shard = WHOLE, max_prompt_tokens: int = 99
) -> DrawSource:
    return DrawSource(
        PROMPTS, seed=seed, encode=encode, max_prompt_tokens=max_prompt_tokens, shard=shard
    )


@given(st.integers(1, 4), st.integers(0, 50))
def test_shards_together_draw_what_one_rank_would(world: int, seed: int) -> None:
    alone = source(seed=seed)
    expected = {
        draw.position: draw.prompt.row for draw in (alone.draw() for _ in range(5 * world))
    }
    seen: dict[int, int] = {}
    for rank in range(world):
        shard = source(seed=seed, shard=Shard(rank, world))
        seen |= {draw.position: draw.prompt.row for draw in (shard.draw() for _ in range(5))}
    assert seen == expected


def test_an_epoch_draws_every_row_once_and_the_next_in_another_order() -> None:
    draws = source()
    first, second = ([draws.draw().prompt.row for _ in PROMPTS] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second


def test_without_a_seed_rows_come_in_file_order() -> None:
    draws = source(seed=None)
    assert [draws.draw().prompt.row for _ in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_the_cursor_goes_back() -> None:
    draws = source()
    first = [draws.draw() for _ in range(4)]
    assert draws.cursor == 4
    draws.cursor = 1
    assert draws.draw() == first[1]
    assert draws.cursor == 2


def test_a_prompt_that_does_not_fit_is_refused_by_its_row_and_not_skipped() -> None:
    draws = source(seed=None, max_prompt_tokens=3)
    for _ in range(3):
        draws.draw()
    for _ in range(2):
        with pytest.raises(
            DataError, match=r"row 3: the prompt has 4 tokens, between 1 and 3 fit"
        ):
            draws.draw()
    assert draws.cursor == 3


def test_an_empty_prompt_is_refused() -> None:
    draws = DrawSource([Prompt(row=5, content="")], seed=0, encode=encode, max_prompt_tokens=3)
    with pytest.raises(DataError, match="row 5: the prompt has 0 tokens"):
        draws.draw()


def test_completion_seeds_are_never_shared() -> None:
    seeds = [
        completion_seed(run, position, index)
        for run in (0, 1)
        for position in range(20_000)
        for index in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert completion_seed(0, 1, 2) == completion_seed(0, 1, 2) != completion_seed(0, 12, 0)


def test_lengths_are_remembered_by_prompt_and_a_new_prompt_has_the_mean() -> None:
    lengths = ExpectedLengths()
    assert lengths.of(3) == 0.0
    lengths.learn([(0, 100), (1, 300)])
    assert [lengths.of(row) for row in (0, 1, 2)] == [100, 300, 200]
    lengths.learn([(0, 300), (2, 1000)])
    assert [lengths.of(row) for row in (0, 1, 2, 3)] == [200, 300, 1000, 500]


def test_lengths_come_back_from_a_checkpoint_or_a_round() -> None:
    lengths, again = ExpectedLengths(), ExpectedLengths()
    lengths.learn([(0, 100), (1, 300)])
    lengths.learn([(0, 300), (2, 1000)])
    again.load_state_dict(json.loads(json.dumps(lengths.state_dict())))
    assert [again.of(row) for row in range(4)] == [lengths.of(row) for row in range(4)]
