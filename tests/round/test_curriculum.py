"""Which prompts come again how often, from what their groups were worth."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.config.schema import ConstraintSettings, SamplingSettings
from ycore.errors import DataError
from ycore.round.sampling import (
    Curriculum,
    DrawSource,
    Rules,
    Shard,
    chance_of,
    guesses_from,
    stats_of,
)
from ycore.scoring.group_rewards import Constraint, Constraints
from ycore.types import Completion, Draw, Group, Prompt, Score

LEAST = 0.1
SCORED_GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 1.0])),
    max_size=40,
)


@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=5))
def test_the_chance_is_that_of_drawing_the_group_again(totals: list[float]) -> None:
    """Against every way to draw as many completions from the group's own."""
    again = list(itertools.product(totals, repeat=len(totals)))
    assert chance_of(totals) == pytest.approx(
        sum(len(set(redraw)) > 1 for redraw in again) / len(again)
    )


@pytest.mark.parametrize(
    ("right", "chance"), [(0, 0.0), (1, 0.656391), (4, 0.992188), (7, 0.656391), (8, 0.0)]
)
def test_groups_of_eight(right: int, chance: float) -> None:
    """1 - (k/8)^8 - (1 - k/8)^8, worked by rank_groups: 7^8 = 5,764,801 of 8^8 = 16,777,216."""
    totals = [1.0] * right + [0.0] * (8 - right)
    assert chance_of(totals) == pytest.approx(chance, abs=1e-6)
    prompts = [Prompt(0, "x", {"rate": right / 8})]
    assert guesses_from(prompts, "rate", 8) == [pytest.approx(chance, abs=1e-6)]


def test_a_lesson_is_of_the_scored_completions() -> None:
    assert stats_of([1.0, None, 0.0], teaches=True) == (0.5, 0.5)
    assert stats_of([1.0, None], teaches=False) is None
    assert stats_of([0.3, 0.1 + 0.2], teaches=False) == (0.0, pytest.approx(0.3)), (
        "rewards that differ by dust are the same"
    )


def test_a_gate_of_constraints_solves_no_prompt() -> None:
    """It makes 0.5 of equal rewards, whatever they are: prompts of which all answers were wrong were dropped as solved."""
    constraint = Constraint(1, "format", least=1.0, limit=0.05)
    rules = Rules(2, 0, (1.0, 0.0), constraints=Constraints([constraint], ConstraintSettings()))
    curriculum = Curriculum(seed=0)
    completion = Completion((1,), None, "", "stop", 0)
    # row 0 is right, row 1 wrong, and row 2 right in a form that breaks the constraint
    for row, scores in enumerate([(1.0, 1.0), (0.0, 1.0), (1.0, 0.0)]):
        of_one = tuple(map(Score, scores))
        group = Group(Draw(row, Prompt(row, "x"), (1,)), (completion,) * 2, (of_one,) * 2)
        stats = rules.stats_of(group, teaches=rules.can_teach(group))
        assert stats == (0.0, scores[0] if scores[1] else pytest.approx(-1e30))
        curriculum.learn([(row, *stats)] * 3)
    assert [curriculum.weight(row) > 0 for row in range(3)] == [False, True, True]


def test_what_breaks_a_constraint_is_not_solved_where_rewards_are_negative() -> None:
    """A penalty's best is 0, or less: 0 for what breaks a constraint would be the best."""
    constraint = Constraint(1, "format", least=1.0, limit=0.05)
    rules = Rules(2, 0, (1.0, 0.0), constraints=Constraints([constraint], ConstraintSettings()))
    completion = Completion((1,), None, "", "stop", 0)
    curriculum = Curriculum(seed=0)
    for row, scores in enumerate([(-0.25, 0.0), (-0.25, 1.0), (-1.0, 0.0)]):
        of_one = tuple(map(Score, scores))
        group = Group(Draw(row, Prompt(row, "x"), (1,)), (completion,) * 2, (of_one,) * 2)
        stats = rules.stats_of(group, teaches=False)
        assert stats is not None
        curriculum.learn([(row, *stats)] * 3)
    assert [curriculum.weight(row) > 0 for row in range(3)] == [True, False, True]


def test_a_prompt_that_teaches_by_more_than_its_totals_is_neither_rare_nor_solved() -> None:
    """By rewards of turns, by each reward normalized alone, or against a greedy completion."""
    curriculum = Curriculum(seed=0)
    for _ in range(4):
        stats = stats_of([1.0, 1.0], teaches=True)
        assert stats == (1.0, 1.0)
        curriculum.learn([(0, *stats)])
    assert curriculum.num_dropped == 0 and curriculum.weight(0) == pytest.approx(1.0)


def test_what_taught_nothing_comes_seldom_and_what_taught_comes_often() -> None:
    order = Curriculum(seed=0)
    assert order.weight(3) == 1.0
    order.learn([(3, 0.0, 0.0), (4, 0.99, 0.5)])
    assert order.weight(3) == LEAST and order.weight(4) == pytest.approx(1.09 / 1.1)
    order.learn(
        [(3, 0.656, 0.125)]
    )  # one completion in eight was right: the policy has learned
    assert order.weight(3) == pytest.approx((0.1 + 0.656) / (0.5 + 1 + 0.1))


def test_a_prompt_is_dropped_when_it_was_solved_often_enough_and_not_when_it_was_only_hopeless() -> (
    None
):
    order = Curriculum(seed=0, settings=SamplingSettings(drop_after=2))
    order.learn([(0, 0.0, 1.0), (1, 0.0, 0.0)])
    assert order.weight(0) == order.weight(1) == LEAST
    order.learn([(0, 0.0, 1.0), (1, 0.0, 0.0)])
    assert order.weight(0) == 0.0 and order.weight(1) == LEAST and order.num_dropped == 1
    never = Curriculum(seed=0, settings=SamplingSettings(drop_after=0))
    never.learn([(0, 0.0, 1.0)] * 9)
    assert never.weight(0) == LEAST and never.num_dropped == 0


def test_a_prompt_may_be_dropped_at_a_share_of_the_best_and_no_other_come_less_often() -> None:
    order = Curriculum(seed=0, settings=SamplingSettings(drop_after=1, drop_at=0.9, least=1.0))
    order.learn([(0, 0.4, 0.9375), (1, 0.9, 0.875), (2, 0.0, 0.0), (3, 0.0, 1.0)])
    assert [order.weight(row) for row in range(5)] == [0.0, 1.0, 1.0, 0.0, 1.0]
    below_zero = Curriculum(seed=0, settings=SamplingSettings(drop_after=1, drop_at=0.9))
    below_zero.learn([(0, 0.5, -1.0), (1, 0.5, -1.05)])
    assert below_zero.num_dropped == 1, (
        "a share of a reward below zero has no meaning: the best itself counts"
    )


@given(SCORED_GROUPS, SCORED_GROUPS)
def test_a_state_gives_the_memory_back(first: list, second: list) -> None:  # type: ignore[type-arg]
    order, again = Curriculum(seed=1), Curriculum(seed=1)
    order.learn(first)
    order.learn(second)
    again.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert again.state_dict() == order.state_dict()
    assert [again.takes(place, place % 10) for place in range(50)] == [
        order.takes(place, place % 10) for place in range(50)
    ]


@given(st.integers(1, 4), SCORED_GROUPS)
def test_ranks_together_draw_what_one_would(world: int, learned: list) -> None:  # type: ignore[type-arg]
    """But for what a rank draws because it passed as many positions as there are rows."""

    def draws(shard: Shard) -> DrawSource:
        order = Curriculum(seed=2)
        order.learn(learned)
        rows = [Prompt(row, "x") for row in range(10)]
        return DrawSource(
            rows,
            seed=2,
            encode=lambda _: (1,),
            max_prompt_tokens=1,
            shard=shard,
            curriculum=order,
        )

    def upto(source: DrawSource, end: int) -> dict[int, int]:
        assert source.curriculum is not None
        row_of = {}
        while (draw := source.draw()).position < end:
            if source.curriculum.takes(draw.position, draw.prompt.row):
                row_of[draw.position] = draw.prompt.row
        return row_of

    if all(draws(Shard()).curriculum.weight(row) == 0 for row in range(10)):  # type: ignore[union-attr]
        return
    parts = [upto(draws(Shard(rank, world)), 100) for rank in range(world)]
    assert {place: row for part in parts for place, row in part.items()} == upto(
        draws(Shard()), 100
    )


def test_where_all_are_dropped_prompts_still_come() -> None:
    order = Curriculum(seed=0, settings=SamplingSettings(drop_after=1))
    order.learn([(row, 0.0, 1.0) for row in range(3)])
    rows = [Prompt(row, "x") for row in range(3)]
    source = DrawSource(
        rows, seed=0, encode=lambda _: (1,), max_prompt_tokens=1, curriculum=order
    )
    assert len({source.draw().position for _ in range(5)}) == 5


def test_a_column_gives_the_first_guess() -> None:
    rows = [
        Prompt(0, "x", {"rate": 0.5}),
        Prompt(1, "y", {"rate": 1}),
        Prompt(2, "z", {"rate": 0.0}),
    ]
    order = Curriculum(seed=0, guesses=guesses_from(rows, "rate", 8))
    assert [order.weight(row) for row in range(3)] == pytest.approx(
        [0.992188, LEAST, LEAST], abs=1e-6
    )


@pytest.mark.parametrize("value", [None, "0.5", True, 1.5, -0.1])
def test_a_column_that_is_no_share_is_refused_with_its_row(value: object) -> None:
    with pytest.raises(
        DataError, match=r"row 7: --curriculum rate takes the share of right completions"
    ):
        guesses_from([Prompt(7, "x", {"rate": value})], "rate", 8)
