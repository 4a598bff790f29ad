"""Which groups can teach: rewards that differ by more than rounding, masked ones left out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ycore.advantages import TOLERANCE
from ycore.config.schema import ConstraintSettings, RewardConfig, RunConfig, SamplingSettings
from ycore.scoring.group_rewards import (
    Constraint,
    Constraints,
    can_teach,
    compared_rewards,
    min_std_of_sum,
    min_stds,
    normalized_sums,
    rewards_differ,
    total_reward,
    weighted_sum,
    weighted_sums,
)
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

    def teaches(
        *completions: Completion, scores: tuple[float | None, ...] = (1.0, 1.0)
    ) -> bool:
        draw = Draw(0, Prompt(0, "q"), (1,))
        return can_teach(
            Group(draw, completions, tuple((Score(score),) for score in scores)), [1.0]
        )

    assert teaches(paid(0.5, None, None), paid(0.0, None))
    assert not teaches(paid(0.5, None), paid(0.5, None)) and not teaches(
        paid(0.5, None), paid(None, None)
    )
    assert not teaches(paid(None, 0.5), paid(None, 0.0)), "the last turn's is the outcome's"
    assert not teaches(paid(0.5, None, None), paid(0.0, None), scores=(1.0, None)), (
        "one counts nowhere"
    )


def scored_config(rewards: list[RewardConfig], std_threshold: float) -> RunConfig:
    return RunConfig(
        model="m",
        dataset="d",
        rewards=rewards,
        sampling=SamplingSettings(std_threshold=std_threshold),
        output="runs/one",
    )


def test_rewards_that_differ_by_a_thousandth_of_their_range_do_not_teach() -> None:
    """Dividing by a standard deviation that small would make full advantages of noise."""
    stds = min_stds(scored_config([RewardConfig(reward="r.py:f", range=(0, 1))], 1e-3))
    assert stds == (1e-3,)
    assert not can_teach(group((0.9999,), (1.0,), (0.9998,)), [1.0], min_stds_R=stds)
    assert can_teach(group((0.99,), (1.0,), (0.98,)), [1.0], min_stds_R=stds)
    assert can_teach(group(*[(1.0,)] * 63, (0.0,)), [1.0], min_stds_R=stds)  # one of many hits
    assert can_teach(group((0.9999,), (1.0,)), [1.0])


def test_the_range_of_a_sum_is_weighted_and_one_that_is_not_declared_has_a_default() -> None:
    specs = [
        RewardConfig(reward="r.py:f", range=(-1, 3), weight=-0.5),
        RewardConfig(reward="r.py:g", weight=2),
    ]
    weights = [spec.weight for spec in specs]
    tenth = scored_config(specs, 0.1)
    assert min_std_of_sum(min_stds(tenth), weights) == pytest.approx(0.2)
    assert min_std_of_sum(min_stds(tenth, default_range=1.0), weights) == pytest.approx(0.4)
    none = scored_config(specs, 0.0)
    assert min_std_of_sum(min_stds(none, default_range=1.0), weights) == 0.0


def test_rewards_that_cancel_teach_where_each_is_normalized_by_itself() -> None:
    """GDPO, TRL's `normalize_then_sum`: the sum of these rewards is 1 for each completion."""
    cancels = group((1.0, 0.0, 0.0), (0.0, 0.5, 0.5), (0.0, 0.5, 0.5), (0.0, 0.5, 0.5))
    weights = [1.0, 1.0, 1.0]
    assert not can_teach(cancels, weights)
    assert can_teach(cancels, weights, normalizes_each=True)
    assert not can_teach(cancels, weights, normalizes_each=True, min_stds_R=(0.9, 0.9, 0.9))
    equal = group((1.0, 0.0), (1.0, 0.0), (1.0, None))
    assert not can_teach(equal, weights[:2], normalizes_each=True)
    sums = normalized_sums([[1.0, None], [0.0, None], [None, None]], [2.0, 1.0])
    assert sums[0] == pytest.approx(1.414, abs=1e-3) and sums[1] == pytest.approx(
        -1.414, abs=1e-3
    )
    assert sums[2] is None


@given(
    st.lists(st.tuples(REWARDS, REWARDS), min_size=1, max_size=6),
    st.sampled_from([(1.0, 2.0), (0.0, 1.0), (0.0, 0.0), (-1.0, 0.5)]),
)
def test_the_sums_of_tensors_are_those_of_lists(
    rows: list[tuple[float | None, float | None]], weights: tuple[float, float]
) -> None:
    table = [[math.nan if value is None else value for value in row] for row in rows]
    sums = weighted_sums(
        torch.tensor(table, dtype=torch.float64), torch.tensor(weights)
    ).tolist()
    for row, total in zip(rows, sums, strict=True):
        expected = weighted_sum(row, weights)
        assert math.isnan(total) if expected is None else total == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=2, max_size=6))
def test_a_gate_compares_as_the_trainer_does(rows: list[tuple[float, bool]]) -> None:
    """A group teaches where the values differ that CGPO's advantages are made of."""
    totals, keeps = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    trained = (torch.sigmoid(totals - totals.mean()) * keeps).tolist()
    spread = max(trained) - min(trained)
    if TOLERANCE / 100 < spread < TOLERANCE * 100:
        return  # near the tolerance the two scales may differ
    gate = Constraints([Constraint(1, "format", 1.0, 0.1)], ConstraintSettings())
    scored = group(*((total, float(keeps)) for total, keeps in rows))
    assert rewards_differ(compared_rewards(scored, (1.0, 0.0), gate)) is (spread > TOLERANCE)
