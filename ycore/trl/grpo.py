"""GRPO (arXiv 2402.03300) and its kin: TRL's losses, over rounds that ycore makes.

GMPO (arXiv 2507.20673) takes the geometric mean of the tokens' ratios. RLOO and other estimators are settings of GRPO.
REINFORCE++ and MT-GRPO have an advantage for each token or turn; a reward for each token is also PPO's.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from trl.experimental.gmpo import GMPOTrainer

from ycore.advantages import ESTIMATORS, TOKEN_ADVANTAGE, TURN_ADVANTAGE
from ycore.config.learners import GroupConfig
from ycore.trl.batches import Batch, loss_mask
from ycore.trl.policy_gradient import PolicyGradientTrainer
from ycore.trl.returns import last_token, to_go, whitened


class GMPORoundTrainer(PolicyGradientTrainer, GMPOTrainer):
    """The seam first, then GMPO's loss, then everything else of GRPO."""


class TokenRewardTrainer(PolicyGradientTrainer):
    """A policy gradient from a reward for each token."""

    skips_equal_rewards = False

    def _token_rewards(self, batch: Batch) -> tuple[Tensor, Tensor]:
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
            # The reference leaves the batch: the loss then has no KL.
            reference = batch.pop("ref_per_token_logps")
            log_ratios = (self._old_logps(batch) - reference).double() * mask
            rewards = rewards - self.beta * log_ratios
            sums = self._add_up(torch.stack([log_ratios.sum(), mask.sum().double()]))
            total, count = sums.tolist()
            self.record("kl", total / max(1.0, count))
        return rewards, mask


class ReinforceTrainer(TokenRewardTrainer):
    """REINFORCE++ (arXiv 2501.03262, eqs. 4 and 5).

    The advantage of a token is the score less beta times the KL of the tokens from it on, whitened over the tokens of
    all ranks.
    """

    def _replaced_advantages(self, batch: Batch) -> dict[str, Tensor]:
        rewards, mask = self._token_rewards(batch)
        return {"advantages": whitened(to_go(rewards), mask, self._add_up).float()}


class TurnRewardTrainer(PolicyGradientTrainer):
    """MT-GRPO (arXiv 2505.11821): an advantage for each turn of the policy.

    The advantage of a turn's tokens is that of its reward among the group's turns of the same number, and the
    completion's own by GRPO; the last turn has the completion's alone.
    """

    skips_equal_rewards = False

    def _replaced_advantages(self, batch: Batch) -> dict[str, Tensor]:
        mask = loss_mask(batch)
        outcome = self._estimated_advantages(ESTIMATORS["group"]).unsqueeze(1)
        return {"advantages": outcome * mask + self._turn_advantages(mask)}

    def _turn_advantages(self, mask: Tensor) -> Tensor:
        """(B, T): the advantage of each turn's reward, at its tokens. A completion without a reward counts nowhere."""
        is_unknown = self._of_this_rank(self._totals(self._rewards)).isnan().tolist()
        rewards = [
            [
                math.nan if unknown or reward is None else reward
                for _, _, reward in sequence.completion.rewarded_turns
            ]
            for sequence, unknown in zip(self._round, is_unknown, strict=True)
        ]
        advantages_BT = torch.zeros_like(mask, dtype=torch.float32)
        by_completion = turn_advantages(rewards, group_size=self.num_generations)
        for row, sequence, advantages in zip(
            advantages_BT, self._round, by_completion, strict=True
        ):
            for (start, end, _), advantage in zip(
                sequence.completion.rewarded_turns, advantages, strict=False
            ):
                row[start:end] = advantage
        return advantages_BT


def turn_advantages(
    rewards: Sequence[Sequence[float]], *, group_size: int
) -> list[list[float]]:
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


def choose_group_trainer(config: GroupConfig) -> type[PolicyGradientTrainer]:
    """The class for the run's `advantage` and `loss_from`."""
    if config.advantage == TOKEN_ADVANTAGE:
        return ReinforceTrainer
    if config.advantage == TURN_ADVANTAGE:
        return TurnRewardTrainer
    return GMPORoundTrainer if config.loss_from == "gmpo" else PolicyGradientTrainer
