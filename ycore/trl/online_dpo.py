"""Preferences among the policy's own completions: each group's best and worst by reward, over rounds that ycore makes.

    dpo    -log sigmoid(beta * m), m = log pi(best) / ref(best) - log pi(worst) / ref(worst); arXiv 2305.18290, eq. 7
    ipo    (m - 1 / (2 beta))^2; arXiv 2310.12036, eq. 17
    rrhf   sum over pairs, i worse than j, of max(0, p_i - p_j), less log pi(best); arXiv 2304.05302, section 3.1

pi and ref are of whole completions, and p_i is log pi(i) over its number of tokens. The loss of a step is the mean over
the groups of all ranks; a group whose rewards are all equal has none.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ycore.advantages import TOLERANCE
from ycore.config.learners import OnlineDPOConfig
from ycore.trl.batches import Batch, loss_mask
from ycore.trl.policy_gradient import PolicyGradientTrainer


class Trainer(PolicyGradientTrainer):
    """Online DPO: constraints say which completions may be the best, and there are no advantages.

    Args:
        kind: the loss.
        likelihood: weight of the best completion's mean log-probability (CODPO, eq. 14).
    """

    deals_groups = True

    def __init__(self, *args: Any, kind: str, likelihood: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kind = kind
        self._likelihood = likelihood

    @classmethod
    def settings_of(cls, config: OnlineDPOConfig, model: Path) -> dict[str, Any]:
        settings = super().settings_of(config, model)
        return {
            **settings,
            "kind": config.loss_from,
            "likelihood": config.constraints.likelihood,
        }

    def _batch_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of best and worst completions, in the place of GRPO's."""
        size = self.num_generations
        logps, _ = self._forward(model, batch)
        mask = loss_mask(batch)
        totals = batch["totals"].view(-1, size)
        sums = (logps * mask).sum(1).view(-1, size)
        num_tokens = mask.sum(1).view(-1, size)
        if self._kind == "rrhf":
            losses = ranking_losses(sums, num_tokens, totals)
        else:
            kept_PG = batch["kept"].view(-1, size) if "kept" in batch else None
            ratios = ((logps - batch["ref_per_token_logps"]) * mask).sum(1).view(-1, size)
            margins = margins_of(ratios, totals, kept_PG)
            losses = preference_losses(margins, beta=self.beta, kind=self._kind)
            if self._likelihood:
                means = sums / num_tokens.clamp(min=1)
                best, _, differ = best_and_worst(totals, kept_PG)
                best_means = means.gather(1, best.unsqueeze(1)).squeeze(1)[differ]
                losses = losses - self._likelihood * best_means
            if margins.numel():
                self.record("ycore/pairs/margin", margins.mean().item())
                self.record("ycore/pairs/accuracy", (margins > 0).float().mean().item())
        return losses.sum() / batch["pairs_a_step"][0].clamp(min=1) + 0.0 * logps.sum()

    def _replaced_advantages(self, batch: Batch) -> dict[str, Tensor]:
        """Add what the loss needs: the rewards, and the groups of an optimizer step, a rank.

        A completion with no token to learn from, such as one that was truncated and is masked, is not compared.
        """
        size = self.num_generations
        constraints = self._constraints
        replaced = {}
        kept_PG = None
        totals = self._totals(self._rewards)
        if constraints is not None and constraints.by == "gate" and self._kind != "rrhf":
            replaced["kept"] = self._of_this_rank(totals.sign())  # 0 is what breaks one
            totals = self._weighted_sums(self._rewards)
            kept_PG = replaced["kept"].view(-1, size)
        has_no_token = loss_mask(batch).sum(dim=1) == 0
        totals = self._of_this_rank(totals).masked_fill(has_no_token, torch.nan)
        _, _, differ = best_and_worst(totals.view(-1, size), kept_PG)
        pairs = self._add_up(differ.sum().double()) / self.accelerator.num_processes
        share = self.args.gradient_accumulation_steps / self.args.steps_per_generation
        replaced["totals"] = totals
        replaced["pairs_a_step"] = torch.full_like(totals, float(pairs) * share)
        return replaced


def best_and_worst(
    totals_PG: Tensor, kept_PG: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The first completion of each group with the highest reward, the first with the lowest, and whether they differ.

    NaN is a completion without a reward; it is neither. With `kept_PG` (1, or 0 where one is broken) the best keeps
    all constraints, and the worst breaks some, where one does; a group of which none keeps them has no best (CODPO,
    arXiv 2409.20370, section 4.2).
    """
    missing = totals_PG.isnan()
    kept_PG = torch.ones_like(totals_PG) if kept_PG is None else kept_PG
    good = ~missing & (kept_PG == 1)
    bad = ~missing & (kept_PG == 0)
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
    """The losses of pairs, `dpo` or `ipo`."""
    if kind == "ipo":
        return (margins - 1 / (2 * beta)).square()
    return -nn.functional.logsigmoid(beta * margins)


def ranking_losses(sums_PG: Tensor, num_tokens_PG: Tensor, totals_PG: Tensor) -> Tensor:
    """RRHF's loss of each group whose rewards differ, from its completions' log-probabilities and lengths."""
    best, _, differ = best_and_worst(totals_PG)
    means = sums_PG / num_tokens_PG.clamp(min=1)
    worse = (
        totals_PG.unsqueeze(2) < totals_PG.unsqueeze(1) - TOLERANCE
    )  # NaN is neither better nor worse
    hinges = (means.unsqueeze(2) - means.unsqueeze(1)).clamp(min=0) * worse
    return (hinges.sum(dim=(1, 2)) - sums_PG.gather(1, best.unsqueeze(1)).squeeze(1))[differ]
