"""Which groups can teach: rewards that differ by more than rounding, masked ones left out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.config.schema import RewardConfig
from ycore.round.sampling import TOLERANCE, can_teach, dust_of, total_reward
from ycore.types import Completion, Draw, Group, Prompt, Score, Turn

REWARDS = st.one_of(st.none(), st.floats(-10, 10))


def group(*rows: tuple[float | None, ...]) -> Group:
    completion = Completion((1,), (-1.0,), "a", "stop", 0)
    scores = tuple(tuple(Score(value) for value in row) for row in rows)
    return Group(Draw(0, Prompt(0, "ask"), (1,)), (completion,) * len(rows), scores)


@pytest.mark.parametrize(
    ("rewards", "teaches"),
    [
        ([0.0, 1.0], True),
        ([1.0, 1.0, 1.0], False),
        ([0.1 + 0.2, 0.3], False),  # not equal to the bit
        ([0.0, TOLERANCE / 2], False),
        ([0.0, TOLERANCE * 2], True),
        ([None, 1.0], False),  # one scored completion has nothing to differ from
        ([None, None], False),
        ([None, 0.0, 1.0], True),
    ],
)
def test_rewards_that_differ_teach(rewards: list[float | None], teaches: bool) -> None:
    assert can_teach(group(*[(reward,) for reward in rewards]), [1.0]) is teaches


def test_sources_are_weighted_before_they_are_compared() -> None:
    canceling = group((1.0, 0.0), (0.0, 0.5))
    assert not can_teach(canceling, [1.0, 2.0])
    assert can_teach(canceling, [1.0, 1.0])
    assert not can_teach(group((1.0, 7.0), (1.0, 3.0)), [1.0, 0.0])


def test_a_masked_source_counts_for_nothing() -> None:
    assert total_reward([Score(None, "late"), Score(0.5)], [1.0, 2.0]) == 1.0
    assert total_reward([Score(None), Score(None)], [1.0, 2.0]) is None


@given(st.lists(REWARDS, min_size=2, max_size=8), st.floats(-10, 10), st.randoms())
def test_a_shift_or_another_order_changes_nothing(
    rewards: list[float | None], shift: float, dice: object
) -> None:
    known = [reward for reward in rewards if reward is not None]
    span = max(known) - min(known) if known else 0.0
    if abs(span - TOLERANCE) < 1e-9:
        return  # on the edge, rounding may decide
    moved = [None if reward is None else reward + shift for reward in rewards]
    expected = can_teach(group(*[(reward,) for reward in rewards]), [1.0])
    assert can_teach(group(*[(reward,) for reward in moved]), [1.0]) is expected
    assert can_teach(group(*[(reward,) for reward in reversed(rewards)]), [1.0]) is expected


def test_rewards_of_turns_that_differ_teach_though_the_outcomes_are_equal() -> None:
    def paid(*rewards: float | None) -> Completion:
        turns = [Turn(True, 1, (), reward=reward) for reward in rewards]
        return Completion((1,) * len(turns), None, "", "stop", 0, tuple(turns))

    def teaches(*completions: Completion, scores: tuple[float | None, ...] = (1.0, 1.0)) -> bool:
        draw = Draw(0, Prompt(0, "q"), (1,))
        return can_teach(Group(draw, completions, tuple((Score(one),) for one in scores)), [1.0])

    assert teaches(paid(0.5, None, None), paid(0.0, None))
    assert not teaches(paid(0.5, None), paid(0.5, None)) and not teaches(
        paid(0.5, None), paid(None, None)
    )
    assert not teaches(paid(None, 0.5), paid(None, 0.0)), "the last turn's is the outcome's"
    assert not teaches(paid(0.5, None, None), paid(0.0, None), scores=(1.0, None)), (
        "one counts nowhere"
    )


def test_rewards_that_differ_by_dust_do_not_teach() -> None:
    """A reward from 0 to 1 with a standard deviation under a thousandth: dividing by it would make lessons of noise."""
    dust = dust_of([RewardConfig(reward="r.py:f", range=(0, 1))], 1e-3)
    assert dust == 1e-3
    assert not can_teach(group((0.9999,), (1.0,), (0.9998,)), [1.0], dust=dust)
    assert can_teach(group((0.99,), (1.0,), (0.98,)), [1.0], dust=dust)
    assert can_teach(group(*[(1.0,)] * 63, (0.0,)), [1.0], dust=dust)  # one of many hits
    assert can_teach(group((0.9999,), (1.0,)), [1.0])


def test_the_range_of_a_sum_is_weighted_and_what_declares_none_counts_as_told() -> None:
    specs = [
        RewardConfig(reward="r.py:f", range=(-1, 3), weight=-0.5),
        RewardConfig(reward="r.py:g", weight=2),
    ]
    assert dust_of(specs, 0.1) == pytest.approx(0.2)
    assert dust_of(specs, 0.1, span=1.0) == pytest.approx(0.4)
    assert dust_of(specs, 0.0, span=1.0) == 0.0
