"""Whether a step has a gradient, from the rewards of all ranks."""

import math

import pytest
import torch

from ycore.trl.seam import SeamGRPOTrainer


def teaches(rewards: list[list[float]], aggregation: str) -> bool:
    trainer = SeamGRPOTrainer.__new__(SeamGRPOTrainer)
    trainer.num_generations = 4
    trainer.multi_objective_aggregation = aggregation
    trainer.reward_weights = torch.ones(len(rewards[0]))
    trainer._advantage = None
    trainer._rewards = torch.tensor(rewards)
    return trainer._some_rewards_differ()


CANCELS = [[1.0, 0.0, 0.0], *[[0.0, 0.5, 0.5]] * 3]


@pytest.mark.parametrize(
    ("rewards", "aggregation", "expected"),
    [
        (CANCELS, "sum_then_normalize", False),
        (CANCELS, "normalize_then_sum", True),
        ([[1.0, 0.5, 0.0]] * 4, "normalize_then_sum", False),
        ([[1.0, 0.5, 0.0]] * 4 + CANCELS, "normalize_then_sum", True),
        (
            [[math.nan] * 3, [1.0, math.nan, math.nan], *[[math.nan] * 3] * 2],
            "sum_then_normalize",
            False,
        ),
        ([[1.0, 0.0, 0.0], *[[0.0, 0.0, 0.0]] * 3], "sum_then_normalize", True),
    ],
)
def test_a_round_teaches_by_the_rule_of_its_advantages(
    rewards: list[list[float]], aggregation: str, expected: bool
) -> None:
    assert teaches(rewards, aggregation) is expected
