"""REINFORCE++ (arXiv 2501.03262, eqs. 4 and 5), and the rewards of tokens that it shares with PPO.

The advantage of a token is the score less beta times the KL of the tokens from it on, whitened over the tokens of all
ranks.
"""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

from ycore.trl.batches import loss_mask
from ycore.trl.policy_gradient import PolicyGradientTrainer
from ycore.trl.returns import last_token, to_go, whitened


class TokenRewardTrainer(PolicyGradientTrainer):
    """A policy gradient from a reward for each token."""

    config_class = GRPOConfig
    skips_equal_rewards = False

    def _token_rewards(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Rewards of this rank's tokens, (B, T) float64, and the mask of the tokens that have one.

        The score is at the completion's last token. With the KL in the reward each token also has
        -beta * (log pi_old - log pi_ref), the estimate k1, both by the trainer's forward: an engine's own
        log-probabilities would add the gap between engine and trainer, whose mean is not 0. A completion without a
        score has no reward at all.
        """
        totals = self._of_this_rank(self._totals(self._rewards)).double()
        mask = loss_mask(batch) * ~totals.isnan().unsqueeze(1)
        rewards = last_token(mask) * totals.nan_to_num().unsqueeze(1)
        if self._kl_in_reward:
            log_ratios = self._log_ratios(batch) * mask
            rewards = rewards - self.beta * log_ratios
            sums = self._add_up(torch.stack([log_ratios.sum(), mask.sum().double()]))
            total, count = sums.tolist()
            self.record("kl", total / max(1.0, count))
        return rewards, mask


class ReinforceTrainer(TokenRewardTrainer):
    """REINFORCE++."""

    def _replaced_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        rewards, mask = self._token_rewards(batch)
        return {"advantages": whitened(to_go(rewards), mask, self._add_up).float()}
