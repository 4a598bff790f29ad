"""On-policy distillation over rounds that ycore makes: the policy writes, and a teacher scores its tokens.

The loss is TRL's clipped loss with an advantage for each token, log p_teacher - log p_policy of the token written: the
gradient is that of the reverse KL of each token's distribution, sum over v of p_policy(v) (log p_policy(v) -
log p_teacher(v)), by REINFORCE and without the KL of the tokens after it (discount 0), as in MOPD (arXiv 2601.02780,
eq. 8) and GKD's on-policy case (arXiv 2306.13649). The estimate itself as a loss would have no gradient at all: its
expected gradient is that of a distribution's sum, which is constant.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

from ycore.trl.advantages import ESTIMATORS
from ycore.trl.batches import loss_mask
from ycore.trl.token_rewards import TokenRewardTrainer


class Trainer(TokenRewardTrainer):
    """Example: `Trainer(model=..., teachers=[0], reward_funcs=[teacher, task], ...)`.

    Args:
        teachers: which of the reward sources are teachers. The others give an advantage to whole completions, as in
            GRPO, and the weights of the sources weigh one against the other.
    """

    config_class = GRPOConfig
    skips_equal_rewards = False

    def __init__(self, *args: Any, teachers: Sequence[int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._teachers = list(teachers)

    def _own_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """(B, T): the teachers' of each token, and the rewards' of its completion.

        The policy's log-probabilities are those of the engine that wrote the tokens, as the teacher's are an engine's.
        The trainer's own would add the gap between trainer and engine, whose mean is not 0, to every token.
        """
        mask = loss_mask(batch)
        policy = batch.get("sampling_per_token_logps")
        policy = self._old_logps(batch) if policy is None else policy
        weights = self.reward_weights.tolist()
        advantages = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
        sums = torch.zeros(2, dtype=torch.float64, device=mask.device)
        for source in self._teachers:
            teacher = self._taught(source, mask.size(1)).to(mask.device)
            found = log_ratios(teacher, policy, mask)
            advantages += weights[source] * found
            sums += torch.stack([-found.sum(), (mask * ~teacher.isnan()).sum().double()])
        kl, count = self._add_up(sums).tolist()
        self.record("ycore/teacher/kl", kl / max(1.0, count))
        if any(weight for source, weight in enumerate(weights) if source not in self._teachers):
            of_rewards = self._estimated_advantages(self._advantage or ESTIMATORS["group"])
            advantages += of_rewards.double().unsqueeze(1) * mask
        return {"advantages": advantages.float()}

    def _taught(self, source: int, width: int) -> Tensor:
        """A teacher's log-probabilities of this rank's tokens, (B, T); NaN where it gave none."""
        rows = (sequence.taught[source] or () for sequence in self._round)
        return torch.tensor([[*row, *[torch.nan] * (width - len(row))] for row in rows], dtype=torch.float64)

    def _totals(self, rewards: Tensor) -> Tensor:
        """The weighted sums of the sources that are no teachers."""
        others = rewards.clone()
        others[:, self._teachers] = torch.nan
        return super()._totals(others)


def log_ratios(teacher_BT: Tensor, policy_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """log p_teacher - log p_policy of each token, (B, T) float64; 0 outside of the mask and where one is not known."""
    found = teacher_BT.double() - policy_BT.double()
    return torch.where(mask_BT.bool() & found.isfinite(), found, 0)


TRAINERS = {"grpo": Trainer}
"""By `loss_from`."""
