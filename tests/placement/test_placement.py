"""Placements as users write them, and the error lines for those that do not work."""

import pytest

from ycore.errors import ConfigError
from ycore.placement.allocator import Allocator
from ycore.placement.placement import (
    JUDGE,
    REWARD_MODEL,
    ROLLOUT,
    Placement,
    SlotPool,
    check_placement,
    in_order,
    parse_placement,
)

TWO = (ROLLOUT, JUDGE)


def test_words_are_read_and_said_alike() -> None:
    for text in ("colocated", "dynamic", "split:3:1", "split:5:2:1"):
        assert str(parse_placement(text)) == text
    assert parse_placement("split:3:1") == Placement("split", (3, 1))
    assert Allocator(SlotPool(4, TWO), parse_placement("split:3:1")).division == {
        ROLLOUT: 3,
        JUDGE: 1,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dynamik", "did you mean 'dynamic'"),
        ("split", "split with slots for each role"),
        ("dynamic:2", "it is 'dynamic:2'"),
        ("split:3:", "whole number"),
        ("split:0:2", "whole number of 1 or more"),
        ("split:a:b", "whole number"),
        ("split:²:1", "whole number"),
        ("", "must be colocated, dynamic, or split"),
    ],
)
def test_what_is_no_placement_is_refused_in_a_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_placement(text)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "roles", "num_slots", "said"),
    [
        (
            "split:3:1",
            TWO,
            2,
            "divide this run's slots (2) among its roles (rollout, judge); take",
        ),
        ("split:3:1", TWO, 2, "take --placement split:1:1"),
        (
            "split:1:1",
            (ROLLOUT,),
            2,
            "slots (2) among its roles (rollout); leave --placement out",
        ),
        ("split:2", TWO, 2, "placement split:2 must divide"),
        ("split:2", TWO, 2, "take --placement split:1:1"),
        (
            "split:1:1",
            TWO,
            1,
            "slots (1) among its roles (rollout, judge); take --placement dynamic or colocated",
        ),
        ("split:1:1:2", (*TWO, REWARD_MODEL), 8, "take --placement split:6:1:1"),
        ("split:5:4", TWO, 8, "take --placement split:7:1"),
        ("split:3:2", TWO, 8, "take --placement split:7:1"),
        ("split:9999999999:1", TWO, 8, "take --placement split:7:1"),
    ],
)
def test_a_split_that_does_not_fit_names_one_that_does(
    text: str, roles: tuple[str, ...], num_slots: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_placement(parse_placement(text), roles=roles, num_slots=num_slots)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_fits_passes() -> None:
    check_placement(parse_placement("split:3:1"), roles=TWO, num_slots=4)
    for text in ("dynamic", "colocated"):
        check_placement(parse_placement(text), roles=TWO, num_slots=1)
    assert in_order([REWARD_MODEL, ROLLOUT, JUDGE, JUDGE]) == (ROLLOUT, JUDGE, REWARD_MODEL)
