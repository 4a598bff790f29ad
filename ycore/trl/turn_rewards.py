"""MT-GRPO (arXiv 2505.11821): an advantage for each turn of the policy.

The advantage of a turn's tokens is that of its reward among the group's turns of the same number, and the completion's
own by GRPO; the last turn has the completion's alone.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

from ycore.advantages import ESTIMATORS
from ycore.trl.batches import loss_mask
from ycore.trl.policy_gradient import PolicyGradientTrainer


class TurnRewardTrainer(PolicyGradientTrainer):
    """MT-GRPO."""

    config_class = GRPOConfig
    skips_equal_rewards = False

    def _replaced_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        mask = loss_mask(batch)
        outcome = self._estimated_advantages(ESTIMATORS["group"]).unsqueeze(1)
        return {"advantages": outcome * mask + self._turn_advantages(mask)}

    def _turn_advantages(self, mask: Tensor) -> Tensor:
        """(B, T): the advantage of each turn's reward, at its tokens. A completion without a reward counts nowhere."""
        is_unknown = self._of_this_rank(self._totals(self._rewards)).isnan().tolist()
        rewards = [
            [math.nan if unknown else reward for _, _, reward in sequence.turns]
            for sequence, unknown in zip(self._round, is_unknown, strict=True)
        ]
        advantages_BT = torch.zeros_like(mask, dtype=torch.float32)
        by_completion = turn_advantages(rewards, group_size=self.num_generations)
        for row, sequence, advantages in zip(
            advantages_BT, self._round, by_completion, strict=True
        ):
            for (start, end, _), advantage in zip(sequence.turns, advantages, strict=False):
                row[start:end] = advantage
        return advantages_BT


def turn_advantages(rewards: Sequence[Sequence[float]], *, group_size: int) -> list[list[float]]:
    """GRPO's advantage of each turn's reward among those of its group's turns of the same number.

    Args:
        rewards: of each completion's turns; NaN where there is none. Such a turn gets 0, and counts nowhere.
        group_size: completions of a group, which are next to each other.
    """
    width = max(1, *map(len, rewards))
    padded = [[*of_turns, *[math.nan] * (width - len(of_turns))] for of_turns in rewards]
    by_turn = torch.tensor(padded).view(-1, group_size, width).transpose(1, 2)
    by_turn = by_turn.reshape(-1, group_size)
    advantages = ESTIMATORS["group"](by_turn, ~by_turn.isnan())
    by_completion = advantages.view(-1, width, group_size).transpose(1, 2).reshape(-1, width)
    rows: list[list[float]] = by_completion.tolist()
    return rows
