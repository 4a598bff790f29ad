"""Preferences among the policy's own completions: each group's best and worst by reward, over rounds that ycore makes.

    dpo    -log sigmoid(beta * m), m = log pi(best) / ref(best) - log pi(worst) / ref(worst); arXiv 2305.18290, eq. 7
    ipo    (m - 1 / (2 beta))^2; arXiv 2310.12036, eq. 17
    rrhf   sum over pairs, i worse than j, of max(0, p_i - p_j), less log pi(best); arXiv 2304.05302, section 3.1

pi and ref are of whole completions, and p_i is log pi(i) over its number of tokens. The loss of a step is the mean over
the groups of all ranks; a group whose rewards are all equal has none.
"""

from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from ycore.errors import ConfigError
from ycore.scoring.group_rewards import TOLERANCE
from ycore.trl.batches import loss_mask
from ycore.trl.constrained import broken, kept
from ycore.trl.seam import SeamGRPOTrainer
from ycore.trl.token_rewards import TokenRewardTrainer, packed_inputs


class _PairLoss(GRPOTrainer):
    """Under the seam, in the place of GRPO's loss."""

    kind: str
    likelihood = 0.0
    """Weight of the best completion's mean log-probability (CODPO, eq. 14)."""

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        width, size = inputs["completion_ids"].size(1), self.num_generations
        logps = self._get_per_token_logps_and_entropies(model, *packed_inputs(inputs), width)[0]
        mask, totals = loss_mask(inputs), inputs["totals"].view(-1, size)
        if self.kind == "rrhf":
            losses = ranking_losses(
                (logps * mask).sum(1).view(-1, size), mask.sum(1).view(-1, size), totals
            )
        else:
            ratios = ((logps - inputs["ref_per_token_logps"]) * mask).sum(1).view(-1, size)
            keeps = inputs["kept"].view(-1, size) if "kept" in inputs else None
            margins = margins_of(ratios, totals, keeps)
            losses = preference_losses(margins, beta=self.beta, kind=self.kind)
            if self.likelihood:
                means = ((logps * mask).sum(1) / mask.sum(1).clamp(min=1)).view(-1, size)
                best, _, differ = best_and_worst(totals, keeps)
                losses = (
                    losses - self.likelihood * means.gather(1, best.unsqueeze(1)).squeeze(1)[differ]
                )
            if margins.numel():
                self._metrics["train"]["ycore/pairs/margin"].append(margins.detach().mean().item())
                self._metrics["train"]["ycore/pairs/accuracy"].append(
                    (margins > 0).float().mean().item()
                )
        return losses.sum() / inputs["pairs_a_step"][0].clamp(min=1) + 0.0 * logps.sum()


class Trainer(TokenRewardTrainer, _PairLoss):
    config_class = GRPOConfig

    def __init__(self, *args: Any, likelihood: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.likelihood = likelihood
        if self.args.per_device_train_batch_size % self.num_generations:
            raise ConfigError(
                "the completions of a group are compared within one micro-batch, and per_device_train_batch_size "
                f"{self.args.per_device_train_batch_size} does not hold whole groups of {self.num_generations}; "
                f"say --per-device-train-batch-size {self.num_generations}, or --group-size 2"
            )

    def _own_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """No advantages, but what the loss needs: the rewards, and the groups of an optimizer step, a rank.

        A completion with no token to learn from, such as one that was cut and is masked, is not compared.
        """
        found, more = self._totals(self._rewards), {}
        if self._constraints is not None and self._constraints.by == "gate" and self.kind != "rrhf":
            found = SeamGRPOTrainer._totals(self, self._rewards)
            more["kept"] = self._of_this_rank(kept(broken(self._rewards, self._constraints.held)))
        totals = self._of_this_rank(found).masked_fill(loss_mask(batch).sum(dim=1) == 0, torch.nan)
        size = self.num_generations
        differ = best_and_worst(
            totals.view(-1, size), more["kept"].view(-1, size) if more else None
        )[2]
        pairs = self._add_up(differ.sum().double()) / self.accelerator.num_processes
        share = self.args.gradient_accumulation_steps / self.args.steps_per_generation
        return {
            **more,
            "totals": totals,
            "pairs_a_step": torch.full_like(totals, float(pairs) * share),
        }


class _TrainerOfIPO(Trainer):
    kind = "ipo"


class _TrainerOfRRHF(Trainer):
    kind = "rrhf"


class _TrainerOfDPO(Trainer):
    kind = "dpo"


TRAINERS = {"dpo": _TrainerOfDPO, "ipo": _TrainerOfIPO, "rrhf": _TrainerOfRRHF}
"""By `loss_from`."""


def best_and_worst(
    totals_PG: Tensor, kept_PG: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each group the first completion with the highest reward, the first with the lowest, and whether they differ.

    NaN is a completion without a reward; it is neither. With `kept_PG` (`advantages.kept`) the best keeps all
    constraints, and the worst breaks some, where one does; a group of which none keeps them has no best (CODPO,
    arXiv 2409.20370, section 4.2).
    """
    missing = totals_PG.isnan()
    kept_PG = torch.ones_like(totals_PG) if kept_PG is None else kept_PG
    good, bad = ~missing & (kept_PG == 1), ~missing & (kept_PG == 0)
    some_bad = bad.any(dim=1)
    highest, best = totals_PG.masked_fill(~good, -torch.inf).max(dim=1)
    lowest, worst = totals_PG.masked_fill(
        ~torch.where(some_bad.unsqueeze(1), bad, good), torch.inf
    ).min(dim=1)
    return best, worst, good.any(dim=1) & (some_bad | (highest - lowest > TOLERANCE))


def margins_of(ratios_PG: Tensor, totals_PG: Tensor, kept_PG: Tensor | None = None) -> Tensor:
    """The best completion's log(pi / ref) less the worst's, of the groups whose rewards differ: (pairs,)."""
    best, worst, differ = best_and_worst(totals_PG, kept_PG)
    margins = ratios_PG.gather(1, best.unsqueeze(1)) - ratios_PG.gather(1, worst.unsqueeze(1))
    return margins.squeeze(1)[differ]


def preference_losses(margins: Tensor, *, beta: float, kind: str) -> Tensor:
    """Of each pair: `dpo` or `ipo`."""
    if kind == "ipo":
        return (margins - 1 / (2 * beta)).square()
    return -torch.nn.functional.logsigmoid(beta * margins)


def ranking_losses(sums_PG: Tensor, num_tokens_PG: Tensor, totals_PG: Tensor) -> Tensor:
    """RRHF's loss of each group whose rewards differ, from its completions' log-probabilities and lengths."""
    best, _, differ = best_and_worst(totals_PG)
    means = sums_PG / num_tokens_PG.clamp(min=1)
    worse = (
        totals_PG.unsqueeze(2) < totals_PG.unsqueeze(1) - TOLERANCE
    )  # NaN is neither better nor worse
    hinges = (means.unsqueeze(2) - means.unsqueeze(1)).clamp(min=0) * worse
    return (hinges.sum(dim=(1, 2)) - sums_PG.gather(1, best.unsqueeze(1)).squeeze(1))[differ]
