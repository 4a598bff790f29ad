"""PPO (arXiv 1707.06347) over rounds that ycore makes: TRL's clipped loss, with advantages from a critic.

The critic learns in the same forward and backward as the policy, with a rate, a clip and a warm-up of its own. No
parameter is shared in training, so a value coefficient would change nothing and there is none.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl import GRPOConfig

from ycore.config.learners import CriticSettings
from ycore.errors import ConfigError
from ycore.trl.critic import VALUES, add_critic, start_from_reward_model
from ycore.trl.forward import packed_scores
from ycore.trl.returns import (
    advantages_and_targets,
    explained_by_position,
    explained_variance,
    to_go,
    value_losses,
    whitened,
)
from ycore.trl.token_rewards import TokenRewardTrainer, packed_inputs


class Trainer(TokenRewardTrainer):
    """Example: `Trainer(model=..., critic=CriticSettings(warmup_steps=5), kl_in="reward", ...)`.

    Args:
        base: the folder of the weights that training begins with, to compare with a reward model's.
    """

    config_class = GRPOConfig
    skips_equal_rewards = False

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
        self._policy_parameters = [one for one in self.bare_model.parameters() if one.requires_grad]
        self.critic = add_critic(self.bare_model, value_range=critic.range)
        if critic.init is not None:
            assert base is not None
            start_from_reward_model(self.critic, Path(critic.init).expanduser(), base=base)
        self._values = torch.empty(0)

    # -- the round: from scores to advantages and value targets -----------------------------------------------------

    def _own_advantages(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Advantages, old values and value targets, (B, T), fixed for all optimizer steps of the round."""
        settings = self._settings
        rewards, mask = self._token_rewards(batch)
        cut = torch.tensor([one.is_cut for one in self._round], device=mask.device) & bool(
            settings.bootstrap
        )
        values, after = self._values_of(batch, cut & mask.any(dim=1))
        advantages, targets = advantages_and_targets(
            rewards,
            values,
            mask,
            lam=settings.lam,
            target_lam=settings.target_lam,
            alpha=settings.alpha,
            macro_tokens=settings.macro_tokens,
            bootstrap_B=after,
        )
        if settings.whiten:
            advantages = whitened(advantages, mask, self._add_up)
        self._record_explained(values, to_go(rewards), mask * ~cut.unsqueeze(1))
        self.record("ycore/critic/value", (values * mask).sum().item() / max(1, int(mask.sum())))
        found = {"advantages": advantages, "old_values": values, "value_targets": targets}
        return {**{name: one.float() for name, one in found.items()}, "value_mask": mask}

    def _record_explained(self, values: Tensor, returns: Tensor, mask: Tensor) -> None:
        explained = explained_variance(values, returns, mask, self._add_up)
        if explained is not None:
            self.record("ycore/critic/explained_variance", explained)
        most = self.args.max_completion_length or 1
        for first, one in explained_by_position(
            values, returns, mask, self._add_up, most=most
        ).items():
            self.record(f"ycore/critic/explained_from/{first}", one)

    def _values_of(self, batch: dict[str, Any], cut: Tensor) -> tuple[Tensor, Tensor]:
        """Values before each token, (B, T), and after the last one, (B,), which is 0 unless the completion was cut.

        The last token is no input of a packed row. For one that was cut, another token is laid behind it: the value
        after the last token is then read at that token's label, whatever it is.
        """
        ids, mask = packed_inputs(batch)
        width = batch["completion_ids"].size(1)
        lengths = batch["completion_mask"].sum(dim=1)
        begins = batch.get("begins", torch.zeros_like(batch["completion_ids"]))
        ids, mask, begins = (torch.nn.functional.pad(one, (0, 1)) for one in (ids, mask, begins))
        rows = torch.arange(len(ids), device=ids.device)
        mask[rows, ids.size(1) - 1 - width + lengths] = cut.to(mask.dtype)
        with torch.no_grad(), self.accelerator.autocast():
            size = self.args.per_device_train_batch_size
            (values,) = packed_scores(
                self.critic,
                ids,
                mask,
                width + 1,
                None,
                begins,
                path=self.packed_by,
                names=(VALUES,),
                size=size,
            )
        return values[:, :width], values[rows, lengths] * cut

    # -- the loss ----------------------------------------------------------------------------------------------------

    def _score(self, model: torch.nn.Module, *inputs: Any, **how: Any) -> tuple[Tensor, Tensor]:
        if self._micro_batch is None:
            return super()._score(model, *inputs, **how)
        names = ("log_probs", "entropy", VALUES)
        logps, entropies, self._values = packed_scores(
            model, *inputs, path=self.packed_by, names=names, with_values=True, **how
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
        tokens = (
            inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        )  # of the round, a rank
        a_step = tokens * self.current_gradient_accumulation_steps / self.args.steps_per_generation
        if losses.numel():
            self.record("ycore/critic/loss", losses.detach().mean().item())
        return loss + losses.sum() / a_step + 0.0 * self._values.sum()

    # -- the optimizer -----------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """transformers' optimizer, with the critic's parameters in groups of their own rate."""
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        own = {id(one) for one in self.critic.trained.values()}
        for group in list(optimizer.param_groups) if is_new else []:
            moved = [one for one in group["params"] if id(one) in own]
            group["params"] = [one for one in group["params"] if id(one) not in own]
            if moved:
                optimizer.add_param_group(
                    {**group, "params": moved, "lr": group["lr"] * self._settings.lr_ratio}
                )
        return optimizer

    def _clip_grad_norm(self, model: torch.nn.Module) -> Any:
        """transformers calls it before the optimizer's step: each of the two is clipped by its own norm."""
        self._warm_up()
        norm = torch.nn.utils.clip_grad_norm_(
            self.critic.trained.values(), self._settings.max_grad_norm
        )
        self._refuse(float(norm), "the norm of the critic's gradient")
        self.record("ycore/critic/grad_norm", float(norm))
        return self.accelerator.clip_grad_norm_(self._policy_parameters, self.args.max_grad_norm)

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
        """The policy in `folder`, and the critic's own weights beside it, in `critic/`."""
        super().write_model(folder, dtype=dtype, merge=merge)
        if self.accelerator.is_main_process:
            self.critic.save(folder.with_name("critic"))


TRAINERS = {"grpo": Trainer}
"""By `loss_from`."""
