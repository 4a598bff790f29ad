"""The base of ycore's policy gradients: constraints, trust regions, averages by prompt, the KL in the reward."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather
from torch import Tensor, nn
from torch.nn.functional import pad
from trl import GRPOConfig, GRPOTrainer

from ycore.advantages import ESTIMATORS, TOKEN_ADVANTAGE, TURN_ADVANTAGE, Estimator
from ycore.config.learners import (
    AdvantageConfig,
    GroupConfig,
    PolicyGradientConfig,
    PPOConfig,
)
from ycore.scoring.group_rewards import Constraints
from ycore.trl.batches import Batch, loss_mask, whole_sequences
from ycore.trl.importance import (
    behaviour_logps,
    effective_share,
    old_by_completion,
    region_weights,
)
from ycore.trl.own_functions import OwnFunction, ScoredGroup, own_functions, scored_groups
from ycore.trl.returns import AddUp
from ycore.trl.seam import SeamGRPOTrainer, nan_to_none

_PICTURES = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters.keys()
"""The keys of a batch with pictures that the forward takes by their names, among its other parameters."""


class PolicyGradientTrainer(SeamGRPOTrainer):
    """The seam with the settings that all policy gradients have.

    Args:
        kl_in: `reward` takes the KL of `--beta` out of the loss. TRL then still computes the reference's
            log-probabilities, by the same forward as the policy's.
        trust_region: `clip`, TRL's; `clip-completion`, the same with one ratio a completion; or one of `importance`,
            anchored at the policy that wrote the tokens.
        loss_average: `prompts`: ScaleRL's (arXiv 2510.13786), where the loss itself averages over tokens.
        constraints: what completions must keep beside their rewards (CGPO, arXiv 2409.20370).
        functions: functions of one's own, by the option that names each.
    """

    config_class = GRPOConfig
    beta: float

    def __init__(
        self,
        *args: Any,
        kl_in: str = "loss",
        trust_region: str = "clip",
        loss_average: str = "tokens",
        constraints: Constraints | None = None,
        functions: Mapping[str, OwnFunction] | None = None,
        dataset_advantages: Sequence[tuple[Sequence[str], Estimator]] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._trust_region = trust_region
        self._loss_average = loss_average
        self._constraints = constraints
        self._functions = functions or {}
        self._dataset_advantages = dataset_advantages
        self._weights = torch.empty(0)
        self._kl_in_reward = kl_in == "reward" and self.beta != 0.0
        self.deals_groups |= "loss" in self._functions
        if self._kl_in_reward or "loss" in self._functions:
            self.skips_equal_rewards = False

    @classmethod
    def settings_of(cls, config: Any, model: Path) -> dict[str, Any]:
        """The arguments of this class for a run that begins with the weights in the folder `model`."""
        settings: dict[str, Any] = {
            "advantage": estimator_of(config),
            "constraints": Constraints.of(config),
        }
        if isinstance(config, PolicyGradientConfig):
            settings["divergence"] = config.divergence
            settings["functions"] = own_functions(config)
            settings["trust_region"] = config.trust_region
            settings["loss_average"] = config.loss_average
        if isinstance(config, GroupConfig) and config.dataset_advantages:
            settings["dataset_advantages"] = dataset_estimators(config)
        if isinstance(config, GroupConfig | PPOConfig):
            settings["kl_in"] = config.kl_in
        return settings

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        beta = self.beta
        if self._kl_in_reward:  # or the same KL would count twice
            self.beta = 0.0
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = beta

    def _calculate_rewards(self, *inputs: Any) -> Tensor:
        rewards = super()._calculate_rewards(*inputs)
        if "keep" in self._functions:
            self._weights = self._functions["keep"].weights(self._scored_groups())
            is_kept = gather(self._weights > 0)
            self.record("ycore/kept", is_kept.float().mean().item())
            self._rewards = rewards = rewards.where(is_kept.unsqueeze(1), torch.nan)
        return rewards

    def _batch_loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """TRL's loss, or one's own over the same forward.

        One by token is averaged over the tokens of the optimizer step, as TRL's `dapo`; a number over micro-batches.
        """
        if "loss" not in self._functions:
            return super()._batch_loss(model, batch)
        logps, entropies = self._forward(model, batch, compute_entropy=True)
        mask = loss_mask(batch)
        loss, metrics = self._functions["loss"].loss(
            logprobs=logps,
            old_logprobs=batch.get("old_per_token_logps", logps.detach()),
            ref_logprobs=batch.get("ref_per_token_logps"),
            engine_weights=batch.get("importance_sampling_ratio", torch.ones_like(logps)),
            entropies=entropies,
            advantages=_by_token(batch["advantages"]),
            rewards=batch["totals"],
            mask=mask,
            group_size=self.num_generations,
            step=self.state.global_step,
        )
        metrics["entropy"] = (entropies * mask).sum() / mask.sum().clamp(min=1)
        for name, value in metrics.items():
            self.record(name, float(value))
        if loss.dim():
            return (loss * mask).sum() / self._step_tokens(batch)
        return loss / self.current_gradient_accumulation_steps

    def _complete(self, batch: Batch, step: int) -> None:
        super()._complete(batch, step)
        if "loss" in self._functions:
            batch["totals"] = self._of_this_rank(self._totals(self._rewards))
        if "keep" in self._functions:
            weighted = torch.einsum("n...,n->n...", batch["advantages"], self._weights)
            batch["advantages"] = weighted
        if self._loss_average == "prompts":
            mask = loss_mask(batch)
            advantages_BT = _by_token(batch["advantages"])
            weights_B = prompt_weights(advantages_BT, mask, self.num_generations, self._add_up)
            batch["advantages"] = advantages_BT * weights_B.unsqueeze(1).float()

    def _replaced_advantages(self, batch: Batch) -> dict[str, Tensor]:
        if self._dataset_advantages:
            return {"advantages": self._advantages_by_dataset()}
        if "advantage" not in self._functions:
            return super()._replaced_advantages(batch)
        by_group = [
            self._functions["advantage"].advantages(group) for group in self._scored_groups()
        ]
        if by_group[0].dim() == 2:
            width = batch["completion_ids"].size(1)
            by_group = [pad(values, (0, width - values.size(1))) for values in by_group]
        advantages = torch.cat(by_group)
        self.has_gradient = bool(self._add_up(advantages.any().float()))
        return {"advantages": advantages}

    def _advantages_by_dataset(self) -> Tensor:
        """The advantages of this rank's completions, (N,), by the estimator of each dataset among its own."""
        advantages = torch.zeros(len(self._round), device=self.accelerator.device)
        for datasets, estimate in self._dataset_advantages:
            is_of_them = [
                sequence.group.draw.prompt.dataset in datasets for sequence in self._round
            ]
            among_N = torch.tensor(is_of_them, device=advantages.device)
            estimated = self._estimated_advantages(estimate, among_N=among_N)
            advantages = advantages.where(~among_N, estimated.float())
        self.has_gradient = bool(self._add_up(advantages.any().float()))
        return advantages

    def _scored_groups(self) -> list[ScoredGroup]:
        """The groups of this rank's round."""
        totals_PG = self._totals(self._rewards).double().view(-1, self.num_generations)
        first = self.accelerator.process_index * len(self._groups)
        return scored_groups(
            self._groups,
            totals_PG[first : first + len(self._groups)],
            names=self.reward_func_names,
            batch_rewards=totals_PG,
            step=self.state.global_step,
        )

    def _totals(self, rewards: Tensor) -> Tensor:
        """The weighted sums, less what broken constraints cost, or gated by them."""
        totals = self._weighted_sums(rewards)
        constraints = self._constraints
        if constraints is None:
            return totals
        constraints.weights = self.rounds.constraint_weights or []
        size = self.num_generations
        compared = [
            constraints.compared(totals_G, nan_to_none(rewards_GR))
            for totals_G, rewards_GR in zip(
                nan_to_none(totals.view(-1, size).tolist()),
                rewards.unflatten(0, (-1, size)).tolist(),
                strict=True,
            )
        ]
        return rewards.new_tensor(np.array(compared, float), dtype=torch.float64).flatten()

    def _fill_in(self, inputs: Batch, logps: Tensor) -> None:
        """Also measure how far the policy is from the one that wrote the tokens, and apply the trust region.

        A region's weight is put into the advantages, and TRL's own ratio and weight become 1: the gradient of a token
        is then weight * advantage * d log p.
        """
        super()._fill_in(inputs, logps)
        logps = logps.detach()
        mask = loss_mask(inputs)
        old = inputs.get("old_per_token_logps")
        behaviour = behaviour_logps(inputs.get("sampling_per_token_logps"), old, logps)
        gap = (logps - behaviour)[mask.bool()]
        lags = inputs["lags"][mask.bool()]
        self.rounds.effective_share = effective_share(gap)
        self.record("ycore/effective_share", self.rounds.effective_share)
        for lag in lags.unique().tolist():
            self.record(f"ycore/effective_share/{lag}", effective_share(gap[lags == lag]))
        if self._trust_region == "clip":
            return
        if self._trust_region == "clip-completion":
            if old is not None:
                inputs["old_per_token_logps"] = old_by_completion(logps, old, mask)
            return
        advantages = _by_token(inputs["advantages"])
        weights = region_weights(self._trust_region, logps, behaviour, advantages, mask)
        outside = (weights == 0) * mask
        self.record(
            "ycore/outside_trust_region", outside.sum().item() / max(1, int(mask.sum()))
        )
        inputs["advantages"] = advantages * weights
        inputs["old_per_token_logps"] = logps
        inputs["importance_sampling_ratio"] = torch.ones_like(logps)

    def _old_logps(self, batch: Batch) -> Tensor:
        """Log-probabilities, (B, T), by the policy that begins the round, by the trainer's own forward."""
        old: Tensor | None = batch.get("old_per_token_logps")
        if old is not None:
            return old
        size = self.args.per_device_train_batch_size
        with torch.no_grad():
            return self._forward(self.model, batch, batch_size=size)[0]

    def _forward(self, model: nn.Module, batch: Batch, **options: Any) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of a batch's completions, (B, T), by the forward of TRL's loss."""
        ids, mask = whole_sequences(batch)
        width = batch["completion_ids"].size(1)
        pictures = {name: batch[name] for name in _PICTURES & batch.keys()}
        logps, entropies, _ = self._get_per_token_logps_and_entropies(
            model, ids, mask, width, **pictures, **options
        )
        return logps, entropies

    def _step_tokens(self, inputs: Batch) -> Tensor:
        """Tokens of a whole optimizer step, a rank: what TRL's losses by token divide by."""
        in_round = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        return (
            in_round * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        )

    def _add_up(self, values: Tensor) -> Tensor:
        """The sum over all ranks of a vector."""
        total: Tensor = self.accelerator.reduce(values, reduction="sum")
        return total


def estimator_of(config: Any) -> Estimator | None:
    """The estimator that replaces TRL's; None keeps TRL's, which know of no constraints."""
    advantage = config.advantage if isinstance(config, AdvantageConfig) else "group"
    if advantage in (TOKEN_ADVANTAGE, TURN_ADVANTAGE) or ":" in advantage:
        return None
    if advantage == "group" and not config.has_constraints:
        return None
    return _estimator_named(advantage, config)


def dataset_estimators(config: GroupConfig) -> list[tuple[list[str], Estimator]]:
    """Return the names of the datasets that share an estimator, with it."""
    names: dict[str, list[str]] = {}
    for part in config.mixture:
        names.setdefault(part.advantage or config.advantage, []).append(part.name)
    return [(names[advantage], _estimator_named(advantage, config)) for advantage in names]


def _estimator_named(advantage: str, config: Any) -> Estimator:
    """Return an estimator; `group` is the one that TRL's `scale_rewards` names."""
    if advantage != "group":
        return ESTIMATORS[advantage]
    scale = config.trl.get("scale_rewards", "group")
    names = {"none": "dr-grpo", False: "dr-grpo", "batch": "lite-ppo"}
    return ESTIMATORS[names.get(scale, "group")]


def prompt_weights(
    advantages_BT: Tensor, mask_BT: Tensor, group_size: int, add_up: AddUp
) -> Tensor:
    """(B,): what turns a mean over the tokens of all ranks into one over each prompt's tokens, and then over prompts.

    A group without any advantage is no prompt of the mean.
    """
    tokens_P = mask_BT.view(-1, group_size * mask_BT.size(1)).sum(dim=1).double()
    counts_P = (advantages_BT * mask_BT).view(len(tokens_P), -1).any(dim=1)
    total, prompts = add_up(torch.stack([tokens_P.sum(), counts_P.sum().double()]))
    weights_P = total / prompts.clamp(min=1) / tokens_P.clamp(min=1)
    return torch.where(counts_P, weights_P, 1).repeat_interleave(group_size)


def _by_token(advantages: Tensor) -> Tensor:
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
