"""PPO (arXiv 1707.06347) over rounds that ycore makes: TRL's clipped loss, with advantages from a critic.

The critic learns in the same forward and backward as the policy, with a rate, a clip and a warm-up of its own. No
parameter is shared in training, so a value coefficient would change nothing and there is none.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ycore.config.learners import CriticSettings, PPOConfig
from ycore.errors import ConfigError
from ycore.trl.critic import VALUES, add_critic, start_from_reward_model
from ycore.trl.forward import PaddedRows, packed_scores
from ycore.trl.grpo import TokenRewardTrainer
from ycore.trl.policy_gradient import whole_sequences
from ycore.trl.returns import (
    advantages_and_targets,
    explained_variance,
    to_go,
    value_losses,
    whitened,
)


class Trainer(TokenRewardTrainer):
    """Example: `Trainer(model=..., critic=CriticSettings(warmup_steps=5), kl_in="reward", ...)`.

    Args:
        base: the folder of the weights that training begins with, to compare with a reward model's.
    """

    def __init__(
        self, *args: Any, critic: CriticSettings, base: Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.packed_by is None:
            raise ConfigError(
                "ycore ppo reads the critic's values from packed rows, and this model's attention cannot be packed; "
                "take a model without sliding windows, or ycore grpo"
            )
        self._settings = critic
        self._policy_parameters = [
            parameter for parameter in self.bare_model.parameters() if parameter.requires_grad
        ]
        self.critic = add_critic(self.bare_model, value_range=critic.range)
        if critic.init is not None:
            assert base is not None
            start_from_reward_model(self.critic, Path(critic.init).expanduser(), base=base)
        self._values = torch.empty(0)

    @classmethod
    def settings_of(cls, config: PPOConfig, model: Path) -> dict[str, Any]:
        return {**super().settings_of(config, model), "critic": config.critic, "base": model}

    # -- the round: from scores to advantages and value targets -----------------------------------------------------

    def _replaced_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Advantages, old values and value targets, (B, T), fixed for all optimizer steps of the round."""
        settings = self._settings
        rewards, mask = self._token_rewards(batch)
        values = self._values_of(batch)
        advantages, targets = advantages_and_targets(
            rewards,
            values,
            mask,
            lam=settings.lam,
            target_lam=settings.target_lam,
            alpha=settings.alpha,
            macro_tokens=settings.macro_tokens,
        )
        if settings.whiten:
            advantages = whitened(advantages, mask, self._add_up)
        self._record_explained(values, to_go(rewards), mask)
        self.record(
            "ycore/critic/value", (values * mask).sum().item() / max(1, int(mask.sum()))
        )
        return {
            "advantages": advantages.float(),
            "old_values": values.float(),
            "value_targets": targets.float(),
            "value_mask": mask,
        }

    def _record_explained(self, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        explained = explained_variance(values, returns, mask, self._add_up)
        if explained is not None:
            self.record("ycore/critic/explained_variance", explained)

    def _values_of(self, batch: dict[str, Any]) -> Tensor:
        """Values before each token, (B, T)."""
        ids, mask = whole_sequences(batch)
        completions = batch["completion_ids"]
        later_prompts = batch.get("later_prompt_lengths", torch.zeros_like(completions))
        rows = PaddedRows(ids, mask, completions.size(1), later_prompts=later_prompts)
        with torch.no_grad(), self.accelerator.autocast():
            (values,) = packed_scores(
                self.critic,
                rows,
                path=self.packed_by,
                names=(VALUES,),
                size=self.args.per_device_train_batch_size,
            )
        return values

    # -- the loss ----------------------------------------------------------------------------------------------------

    def _score(
        self, model: torch.nn.Module, rows: PaddedRows, size: int | None
    ) -> tuple[Tensor, Tensor]:
        if self._micro_batch is None:
            return super()._score(model, rows, size)
        names = ("log_probs", "entropy", VALUES)
        logps, entropies, self._values = packed_scores(
            model, rows, path=self.packed_by, names=names, size=size, with_values=True
        )
        return logps, entropies

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss of the policy, and the critic's: the mean over the tokens of the whole step."""
        loss = super()._compute_loss(model, inputs)
        mask = inputs["value_mask"].bool()
        losses = value_losses(
            self._values[mask],
            inputs["old_values"][mask],
            inputs["value_targets"][mask],
            self._settings.value_clip,
        )
        if losses.numel():
            self.record("ycore/critic/loss", losses.detach().mean().item())
        return loss + losses.sum() / self._step_tokens(inputs) + 0.0 * self._values.sum()

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """transformers' optimizer, with the critic's parameters in groups of their own rate."""
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if not is_new:
            return optimizer
        critic_ids = {id(parameter) for parameter in self.critic.trained.values()}
        for group in list(optimizer.param_groups):
            of_critic = [p for p in group["params"] if id(p) in critic_ids]
            group["params"] = [p for p in group["params"] if id(p) not in critic_ids]
            if of_critic:
                rate = group["lr"] * self._settings.lr_ratio
                optimizer.add_param_group({**group, "params": of_critic, "lr": rate})
        return optimizer

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """transformers calls it before the optimizer's step: each of the two is clipped by its own norm."""
        self._warm_up()
        parameters = self.critic.trained.values()
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm))
        self._refuse(norm, "the norm of the critic's gradient")
        self.record("ycore/critic/grad_norm", norm)
        return self.accelerator.clip_grad_norm_(
            self._policy_parameters, self.args.max_grad_norm
        )

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Any = None) -> Any:
        self._warm_up()
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    def _warm_up(self) -> None:
        """Before the warm-up's end the policy has no gradient. Zeros would age its moments, and its weights decay."""
        if self.state.global_step < self._settings.warmup_steps:
            for parameter in self._policy_parameters:
                parameter.grad = None

    # -- on disk -----------------------------------------------------------------------------------------------------

    def _save_more(self, checkpoint: Path) -> None:
        super()._save_more(checkpoint)
        if self.args.should_save:
            self.critic.save(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.critic.load(Path(checkpoint))

    def write_model(self, folder: Path, *, dtype: torch.dtype, merge: bool) -> None:
        """Save the policy in `folder`, and the critic's own weights beside it, in `critic/`."""
        super().write_model(folder, dtype=dtype, merge=merge)
        if self.accelerator.is_main_process:
            self.critic.save(folder.with_name("critic"))
