"""GRPO (arXiv 2402.03300) and its kin: TRL's losses, over rounds that ycore makes.

GMPO (arXiv 2507.20673) takes the geometric mean of the tokens' ratios. RLOO and other estimators are settings of GRPO.
"""

from trl import GRPOConfig
from trl.experimental.gmpo import GMPOTrainer

from ycore.advantages import TOKEN_ADVANTAGE, TURN_ADVANTAGE
from ycore.config.learners import GroupConfig
from ycore.trl.policy_gradient import PolicyGradientTrainer
from ycore.trl.token_rewards import ReinforceTrainer, TurnRewardTrainer


class Trainer(PolicyGradientTrainer):
    """GRPO, with TRL's advantages or those of an estimator."""

    config_class = GRPOConfig


class GMPORoundTrainer(Trainer, GMPOTrainer):
    """The seam first, then GMPO's loss, then everything else of GRPO."""


def choose_group_trainer(config: GroupConfig) -> type[PolicyGradientTrainer]:
    """The class for the run's `advantage` and `loss_from`."""
    if config.advantage == TOKEN_ADVANTAGE:
        return ReinforceTrainer
    if config.advantage == TURN_ADVANTAGE:
        return TurnRewardTrainer
    return GMPORoundTrainer if config.loss_from == "gmpo" else Trainer
