"""A reward of weight 0 is measured only: where no other reward scored a completion, it is no reward in training either."""

from pathlib import Path

import pytest
import torch

from tests.tiny_model import write_tiny_model
from tests.trl.small_trainer import small_trainer
from ycore.trl.policy_gradient import PolicyGradientTrainer
from ycore.types import Completion, Draw, Group, Prompt, Score


class Rounds:
    """One group, whose first completion only the measured reward could score."""

    constraint_weights = None
    effective_share = 1.0

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        scores = [(None, 1.0), (1.0, 1.0), (1.0, 0.0), (0.0, 1.0)]
        return [
            Group(
                Draw(0, Prompt(0, "prompt"), (9, 8)),
                tuple(
                    Completion((10, 11 + member), (-4.0, -4.0), "", "stop", step)
                    for member in range(4)
                ),
                tuple((Score(first), Score(second)) for first, second in scores),
            )
        ]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_what_is_only_measured_gives_no_advantage(aggregation: str, tmp_path: Path) -> None:
    trainer = small_trainer(
        PolicyGradientTrainer,
        write_tiny_model(tmp_path / "model"),
        tmp_path,
        Rounds(),
        rewards=("mine", "measured"),
        reward_weights=[1.0, 0.0],
        multi_objective_aggregation=aggregation,
        scale_rewards="none",
        max_steps=1,
    )
    batch = trainer._generate_and_score_completions([{"prompt": "tick"}] * 4)
    advantages = batch["advantages"]
    assert advantages[0] == 0, "the metric would be a reward"
    if aggregation == "sum_then_normalize":
        torch.testing.assert_close(advantages[1:], torch.tensor([1 / 3, 1 / 3, -2 / 3]))
    else:
        assert advantages.sum().item() == pytest.approx(0, abs=1e-6)
