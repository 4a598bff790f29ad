"""GRPO's trainer with an advantage for each token: REINFORCE++, rewards of turns, and what PPO shares with them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import gather
from torch import Tensor

from ycore.advantages import ESTIMATORS, Estimator
from ycore.scoring.constraints import Constraints
from ycore.trl.batches import loss_mask
from ycore.trl.constrained import broken, gated, kept, near
from ycore.trl.importance import behaviour_logps, effective_share, old_by_completion, region_weights
from ycore.trl.returns import AddUp, last_token, to_go, whitened
from ycore.trl.seam import SeamGRPOTrainer


class TokenRewardTrainer(SeamGRPOTrainer):
    """The seam, with the KL of `--beta` inside the reward where `kl_in` says so.

    TRL then still computes the reference's log-probabilities, by the same forward as the policy's. Its loss has no KL
    term, or the same KL would count twice.

    Args:
        by_token: REINFORCE++ (arXiv 2501.03262, eqs. 4 and 5): each token's advantage is the score less beta times the
            KL of the tokens from it on, whitened over the tokens of all ranks.
        by_turn: MT-GRPO (arXiv 2505.11821): the advantage of a turn's tokens is that of its reward among the group's
            turns of the same number, and the completion's own by GRPO; the last turn has the completion's alone.
        constraints: what completions must keep beside their rewards (CGPO, arXiv 2409.20370).
        trust_region: `clip`, TRL's; `clip-completion`, the same with one ratio a completion; or one of `importance`,
            anchored at the policy that wrote the tokens.
        loss_average: `prompts`: ScaleRL's (arXiv 2510.13786), where the loss itself averages over tokens.
    """

    beta: float

    def __init__(
        self,
        *args: Any,
        kl_in: str = "loss",
        by_token: bool = False,
        by_turn: bool = False,
        trust_region: str = "clip",
        loss_average: str = "tokens",
        constraints: Constraints | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._by_token, self._by_turn, self._trust_region = by_token, by_turn, trust_region
        self._constraints, self._loss_average = constraints, loss_average
        self._nearness: Tensor | None = None  # of all ranks' completions, with CGPO's KL
        self._kl_in_reward = kl_in == "reward" and self.beta != 0.0
        if by_token or by_turn or self._kl_in_reward:
            self.skips_equal_rewards = False

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        beta = self.beta
        if self._kl_in_reward:
            self.beta = 0.0
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = beta

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        if self._loss_average == "prompts":
            mask, advantages = loss_mask(batch), batch["advantages"]
            advantages = advantages if advantages.dim() == 2 else advantages.unsqueeze(1)
            weights = prompt_weights(advantages, mask, self.num_generations, self._add_up)
            batch["advantages"] = advantages * weights.unsqueeze(1).float()
        return batch

    def _own_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        if self._by_turn:
            outcome, mask = self._estimated_advantages(ESTIMATORS["group"]), loss_mask(batch)
            return {"advantages": outcome.unsqueeze(1) * mask + self._of_turns(mask)}
        if not self._by_token:
            self._nearness = self._how_near(batch) if self._kl_in_reward else None
            found = super()._own_advantages(batch)
            self._nearness = None
            return found
        rewards, mask = self._token_rewards(batch)
        return {"advantages": whitened(to_go(rewards), mask, self._add_up).float()}

    # -- constraints -------------------------------------------------------------------------------------------------

    def _totals(self, rewards: Tensor) -> Tensor:
        """The weighted sums, less what broken constraints cost, or gated by them."""
        totals = super()._totals(rewards)
        if self._constraints is None:
            return totals
        found = broken(rewards, self._constraints.held)
        if self._constraints.by == "gate":
            gates = gated(totals, kept(found), self.num_generations)
            return gates if self._nearness is None else gates * self._nearness
        weights = torch.tensor(
            self.rounds.constraint_weights, dtype=torch.float64, device=rewards.device
        )
        return totals - (found * weights).sum(dim=1)

    def _estimated_advantages(self, estimate: Estimator) -> Tensor:
        advantages = super()._estimated_advantages(estimate)
        if (
            estimate.name == "raft"
            and self._constraints is not None
            and self._constraints.by == "gate"
        ):
            advantages = (
                advantages * self._of_this_rank(self._totals(self._rewards)).nan_to_num().float()
            )  # eq. 18
        return advantages

    def _how_near(self, batch: dict[str, Any]) -> Tensor:
        """Of all ranks' completions eq. 11's factor, where `beta` is 1 / KL_max; for RAFT eq. 17: 1 up to KL_max."""
        log_ratios = (
            self._old_logps(batch) - batch.pop("ref_per_token_logps")
        ).double() * loss_mask(batch)
        of_all = gather(log_ratios.sum(dim=1))
        self.record("kl", of_all.mean().item())
        is_raft = self._advantage is not None and self._advantage.name == "raft"
        return (of_all <= 1 / self.beta).double() if is_raft else near(of_all, 1 / self.beta)

    # -- advantages by turn and token --------------------------------------------------------------------------------

    def _of_turns(self, mask: Tensor) -> Tensor:
        """(B, T): the advantage of each turn's reward, at its tokens. A completion without a reward counts nowhere."""
        counts = (~self._of_this_rank(self._totals(self._rewards)).isnan()).tolist()
        rewards = [
            [paid if counted else math.nan for _, _, paid in one.turns]
            for one, counted in zip(self._round, counts, strict=True)
        ]
        found = torch.zeros_like(mask, dtype=torch.float32)
        advantages = turn_advantages(rewards, group_size=self.num_generations)
        for row, one, of_turns in zip(found, self._round, advantages, strict=True):
            for (start, end, _), advantage in zip(one.turns, of_turns, strict=False):
                row[start:end] = advantage
        return found

    def _fill_in_correction(self, inputs: dict[str, Any], logps: Tensor) -> None:
        """Also measure how far the policy is from the one that wrote the tokens, and apply the trust region.

        A region's weight is put into the advantages, and TRL's own ratio and weight become 1: the gradient of a token
        is then weight * advantage * d log p.
        """
        super()._fill_in_correction(inputs, logps)
        mask = loss_mask(inputs)
        behaviour = behaviour_logps(
            inputs.get("sampling_per_token_logps"), inputs.get("old_per_token_logps"), logps
        )
        self.record("ycore/effective_share", effective_share((logps - behaviour)[mask.bool()]))
        if (
            self._trust_region == "clip-completion"
            and inputs.get("old_per_token_logps") is not None
        ):
            inputs["old_per_token_logps"] = old_by_completion(
                logps, inputs["old_per_token_logps"], mask
            )
        if self._trust_region in ("clip", "clip-completion"):
            return
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        weights = region_weights(self._trust_region, logps, behaviour, advantages, mask)
        outside = (weights == 0) * mask
        self.record("ycore/outside_trust_region", outside.sum().item() / max(1, int(mask.sum())))
        inputs["advantages"], inputs["old_per_token_logps"] = advantages * weights, logps
        inputs["importance_sampling_ratio"] = torch.ones_like(logps)

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
            log_ratio = (self._old_logps(batch) - batch.pop("ref_per_token_logps")).double() * mask
            rewards = rewards - self.beta * log_ratio
            total, count = self._add_up(
                torch.stack([log_ratio.sum(), mask.sum().double()])
            ).tolist()
            self.record("kl", total / max(1.0, count))
        return rewards, mask

    def _old_logps(self, batch: dict[str, Any]) -> Tensor:
        """Of the policy that begins the round, by the trainer's own forward."""
        if batch.get("old_per_token_logps") is not None:
            found: Tensor = batch["old_per_token_logps"]
            return found
        ids, mask = packed_inputs(batch)
        size, width = self.args.per_device_train_batch_size, batch["completion_ids"].size(1)
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(
                self.model, ids, mask, width, batch_size=size
            )[0]

    def _add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a vector; in float64 where the device has it."""
        total: Tensor = self.accelerator.reduce(values, reduction="sum")
        return total

    def _of_this_rank(self, values: Tensor) -> Tensor:
        first = self.accelerator.process_index * len(self._round)
        return values[first : first + len(self._round)]


def turn_advantages(rewards: Sequence[Sequence[float]], *, group_size: int) -> list[list[float]]:
    """GRPO's advantage of each turn's reward among those of its group's turns of the same number.

    Args:
        rewards: of each completion's turns; NaN where none was paid. Such a turn gets 0, and counts nowhere.
        group_size: completions of a group, which are next to each other.
    """
    width = max(1, *map(len, rewards))
    rows = [[*of_one, *[math.nan] * (width - len(of_one))] for of_one in rewards]
    by_turn = torch.tensor(rows).view(-1, group_size, width).transpose(1, 2).reshape(-1, group_size)
    found = ESTIMATORS["group"](by_turn, ~by_turn.isnan())
    spread: list[list[float]] = (
        found.view(-1, width, group_size).transpose(1, 2).reshape(-1, width).tolist()
    )
    return spread


def prompt_weights(
    advantages_BT: Tensor, mask_BT: Tensor, group_size: int, add_up: AddUp
) -> Tensor:
    """(B,): what turns a mean over the tokens of all ranks into one over each prompt's tokens, and then over prompts.

    A group without any advantage is no prompt of the mean.
    """
    tokens = mask_BT.view(-1, group_size * mask_BT.size(1)).sum(dim=1).double()
    teaches = (advantages_BT * mask_BT).view(len(tokens), -1).any(dim=1)
    total, prompts = add_up(torch.stack([tokens.sum(), teaches.sum().double()]))
    weights = torch.where(teaches, total / prompts.clamp(min=1) / tokens.clamp(min=1), 1)
    return weights.repeat_interleave(group_size)


def packed_inputs(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of whole sequences, (B, P + T)."""
    return (
        torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
        torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1),
    )
