"""GRPO (arXiv 2402.03300) and its kin: TRL's losses, over rounds that ycore makes.

GMPO (arXiv 2507.20673) takes the geometric mean of the tokens' ratios. RLOO and other estimators are settings of GRPO.
"""

from typing import Any

from accelerate.utils import gather
from torch import Tensor
from trl import GRPOConfig
from trl.experimental.gmpo import GMPOTrainer

from ycore.advantages import TOKEN_ADVANTAGE, TURN_ADVANTAGE, Estimator
from ycore.config.learners import GroupConfig
from ycore.trl.batches import loss_mask
from ycore.trl.constrained import near
from ycore.trl.policy_gradient import PolicyGradientTrainer
from ycore.trl.token_rewards import ReinforceTrainer, TurnRewardTrainer


class Trainer(PolicyGradientTrainer):
    """GRPO. With `kl_in` reward, CGPO's KL of whole completions scales the gated rewards (arXiv 2409.20370)."""

    config_class = GRPOConfig
    _kl_factors: Tensor | None = None
    """The factors of all ranks' completions, while their advantages are computed."""

    def _replaced_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        if self._kl_in_reward:
            self._kl_factors = self._factors_of_kl(batch)
        replaced = super()._replaced_advantages(batch)
        self._kl_factors = None
        return replaced

    def _factors_of_kl(self, batch: dict[str, Any]) -> Tensor:
        """Eq. 11's factor, where `beta` is 1 / KL_max; for RAFT eq. 17's: 1 up to KL_max."""
        log_ratios_N = gather((self._log_ratios(batch) * loss_mask(batch)).sum(dim=1))
        self.record("kl", log_ratios_N.mean().item())
        if self._advantage is not None and self._advantage.name == "raft":
            return (log_ratios_N <= 1 / self.beta).double()
        return near(log_ratios_N, 1 / self.beta)

    @property
    def _is_gated(self) -> bool:
        return self._constraints is not None and self._constraints.by == "gate"

    def _totals(self, rewards: Tensor) -> Tensor:
        totals = super()._totals(rewards)
        if self._kl_factors is None or not self._is_gated:
            return totals
        return totals * self._kl_factors

    def _estimated_advantages(self, estimate: Estimator) -> Tensor:
        advantages = super()._estimated_advantages(estimate)
        if estimate.name == "raft" and self._is_gated:  # eq. 18
            totals = self._of_this_rank(self._totals(self._rewards))
            advantages = advantages * totals.nan_to_num().float()
        return advantages


class GMPORoundTrainer(Trainer, GMPOTrainer):
    """The seam first, then GMPO's loss, then everything else of GRPO."""


def trainer_class(config: GroupConfig) -> type[PolicyGradientTrainer]:
    """The class for the run's `advantage` and `loss_from`."""
    if config.advantage == TOKEN_ADVANTAGE:
        return ReinforceTrainer
    if config.advantage == TURN_ADVANTAGE:
        return TurnRewardTrainer
    return GMPORoundTrainer if config.loss_from == "gmpo" else Trainer
