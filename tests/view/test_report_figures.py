"""A report counts where device seconds went, and gives advice where the reward did not rise."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ycore.config.learners import PPOConfig
from ycore.config.schema import RewardConfig, RunConfig, SamplingSettings
from ycore.view.report import (
    PARTS,
    advice,
    count_device_seconds,
)

STEP = {
    "step": 1,
    "ycore/time/step": 20.0,
    "ycore/time/sync": 1.0,
    "ycore/time/round": 10.0,
    "ycore/time/train": 8.0,
    "ycore/sampling/drawn": 16,
    "frac_reward_zero_std": 0.0,
    "completions/clipped_ratio": 0.25,
}


def test_by_hand() -> None:
    """If 16 groups are drawn for 8, half of the round taught nothing."""
    seconds = count_device_seconds([STEP], prompts_per_step=8, num_slots=2).seconds
    nonzero = {part: value for part, value in seconds.items() if value}
    assert nonzero == {
        "groups that taught": 10.0,
        "groups not trained on": 10.0,
        "weight sync": 2.0,
        "training": 16.0,
        "other": 2.0,
    }


def test_idle_and_swaps_come_out_of_the_round() -> None:
    row = {**STEP, "ycore/idle_share": 0.2, "ycore/swap_s": 1.0, "ycore/sampling/drawn": 8}
    seconds = count_device_seconds([row], prompts_per_step=8, num_slots=1).seconds
    assert (seconds["idle"], seconds["swaps"]) == (2.0, 1.0)
    assert seconds["groups that taught"] == pytest.approx(7.0)


def test_the_price_of_a_group_that_taught() -> None:
    half = {**STEP, "frac_reward_zero_std": 0.5}
    assert (
        count_device_seconds([STEP], prompts_per_step=8, num_slots=1).per_informative_group
        == 2.5
    )
    assert (
        count_device_seconds([half], prompts_per_step=8, num_slots=1).per_informative_group
        == 5.0
    )
    assert (
        count_device_seconds(
            [{**STEP, "frac_reward_zero_std": 1.0}], prompts_per_step=8, num_slots=1
        ).per_informative_group
        is None
    )


def test_rows_that_are_no_steps_cost_nothing() -> None:
    assert (
        count_device_seconds(
            [{"train_runtime": 3.0}, {}], prompts_per_step=8, num_slots=1
        ).total
        == 0
    )


@given(
    parts=st.lists(st.floats(0, 1e4), min_size=4, max_size=4),
    shares=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    drawn=st.integers(0, 100),
    slots=st.integers(1, 9),
)
def test_every_second_is_counted_once(
    parts: list[float], shares: list[float], drawn: int, slots: int
) -> None:
    sync, in_round, train, other = parts
    row = {
        "ycore/time/step": sync + in_round + train + other,
        "ycore/time/sync": sync,
        "ycore/time/round": in_round,
        "ycore/time/train": train,
        "ycore/idle_share": shares[0],
        "ycore/swap_s": shares[2] * 100,
        "frac_reward_zero_std": shares[3],
        "ycore/sampling/drawn": drawn,
    }
    device_seconds = count_device_seconds([row], prompts_per_step=8, num_slots=slots)
    assert device_seconds.total == pytest.approx(sum(parts) * slots)
    assert (
        set(device_seconds.seconds) == set(PARTS) and min(device_seconds.seconds.values()) >= 0
    )


CONFIG = RunConfig(
    model="m",
    dataset="task:addition",
    output="o",
    rewards=[RewardConfig(reward="exact_answer")],
)


def around(
    reward: Callable[[int], float], *, steps: int = 30, **metrics: float
) -> list[dict[str, Any]]:
    """Return steps whose rewards go up and down by 0.02 around `reward`."""
    constant = {"learning_rate": 2e-5, "frac_reward_zero_std": 0.5} | metrics
    return [
        {"step": step, "ycore/reward": reward(step) + 0.02 * (-1) ** step, **constant}
        for step in range(steps)
    ]


def flat(step: int) -> float:
    return 0.2


def test_a_reward_that_rose_needs_no_advice() -> None:
    assert advice(around(lambda step: 0.2 + step / 100), CONFIG) is None
    assert advice(around(lambda step: min(1.0, 0.2 + step / 10)), CONFIG) is None, (
        "it is where it can be, since long"
    )


def test_where_groups_taught_the_rate_is_raised_first() -> None:
    message = advice(around(flat), CONFIG)
    assert message is not None
    assert message.startswith(
        "the reward did not rise (0.200 -> 0.200, first and last third of the steps), although groups"
    )
    assert "--learning-rate 8.0e-05" in message


def test_where_hardly_a_group_taught_the_prompts_are_to_blame() -> None:
    message = advice(
        around(flat, frac_reward_zero_std=0.0, **{"ycore/sampling/drawn": 100.0}), CONFIG
    )
    assert message is not None and "within only 240 of 3000 groups; try prompts" in message, (
        "eight a step taught"
    )
    message = advice(around(flat, frac_reward_zero_std=1.0), CONFIG)
    assert message is not None and "within only 0 of 240 groups" in message


def test_where_it_fell_the_rate_is_lowered() -> None:
    message = advice(around(lambda step: 0.8 - step / 100), CONFIG)
    assert (
        message is not None
        and "the reward fell" in message
        and "--learning-rate 5.0e-06" in message
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": SamplingSettings(curriculum=True)},
        {"rewards": [RewardConfig(reward="exact_answer", constraint=True)]},
    ],
)
def test_a_reward_that_need_not_rise_is_not_judged(changes: dict[str, Any]) -> None:
    assert advice(around(flat), CONFIG.model_copy(update=changes)) is None


def test_a_short_run_is_not_judged() -> None:
    assert advice(around(flat, steps=11), CONFIG) is None


@pytest.mark.parametrize(
    "config",
    [
        CONFIG.model_copy(update={"group_size": 1}),
        PPOConfig(**CONFIG.model_dump() | {"algorithm": "ppo"}),
    ],
)
def test_where_a_completion_teaches_by_itself_groups_need_not_differ(config: RunConfig) -> None:
    message = advice(around(flat, frac_reward_zero_std=1.0), config)
    assert message is not None and "although groups taught" in message
