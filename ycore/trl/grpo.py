"""GRPO (arXiv 2402.03300) and GMPO (arXiv 2507.20673): TRL's losses, over rounds that ycore makes.

GMPO takes the geometric mean of the tokens' ratios. RLOO, REINFORCE++ and the other estimators are settings of GRPO.
"""

from trl import GRPOConfig
from trl.experimental.gmpo import GMPOTrainer

from ycore.trl.token_rewards import TokenRewardTrainer


class Trainer(TokenRewardTrainer):
    config_class = GRPOConfig


class TrainerOfGMPO(Trainer, GMPOTrainer):
    """The seam first, then GMPO's loss, then everything else of GRPO."""


TRAINERS = {"grpo": Trainer, "gmpo": TrainerOfGMPO}
"""By `loss_from`."""
