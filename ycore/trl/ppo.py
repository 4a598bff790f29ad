"""PPO (arXiv 1707.06347) over rounds that ycore makes: TRL's clipped loss, with advantages from a critic.

The critic learns in the same forward and backward as the policy, with a rate, a clip and a warm-up of its own. No
parameter is shared in training, so a value coefficient would change nothing and there is none. It is a second tree of
modules over the policy's frozen tensors, with adapters and a head of its own.

It lies inside the policy's outermost module, so that one wrapped forward and one backward serve both, and DDP sees all
parameters. It is in no state dict of the policy: neither an engine nor `model/` ever gets it. With `--full` nothing is
frozen, and the critic has every weight for itself.
"""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ycore.config.learners import CriticSettings, PPOConfig
from ycore.errors import ConfigError, RunError
from ycore.run.claim import model_fingerprint
from ycore.run.files import RunFolder, read_json
from ycore.trl.base import bare
from ycore.trl.batches import Batch, whole_sequences
from ycore.trl.forward import PaddedRows, add_outputs, packed_scores
from ycore.trl.grpo import TokenRewardTrainer
from ycore.trl.returns import (
    advantages_and_targets,
    explained_variance,
    to_go,
    value_losses,
    whitened,
)

NAME = "critic"
FILE = f"{NAME}.safetensors"
VALUES = "token_values"
"""The name of the values among the outputs of a forward."""


class Critic(nn.Module):
    """The value of every position of a packed row, float32: what the policy may still expect after that token.

    Args:
        backbone: gives the hidden states.
        width: of a hidden state.
        value_range: the lowest and the highest value (arXiv 2608.23566, eq. 9); None leaves it unbounded.
    """

    def __init__(
        self, backbone: nn.Module, *, width: int, value_range: tuple[float, float] | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_range = value_range
        # Without a draw from the random generator: the policy's own numbers must not depend on there being a critic.
        self.head = nn.utils.skip_init(nn.Linear, width, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self, shift_labels: Any = None, fused_lm_head: Any = None, **row: Any
    ) -> dict[str, Tensor]:
        """{VALUES: (1, L)} of a packed row (1, L); labels are not used."""
        hidden = self.backbone(**row).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.head(hidden.float()).squeeze(-1)
        if self.value_range is not None:
            low, high = self.value_range
            values = low + (high - low) * (0.5 + torch.atan(values) / math.pi)
        return {VALUES: values}

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Its own parameters, by name; the frozen ones are the policy's."""
        named = self.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: parameter.detach().cpu().clone().contiguous()
            for name, parameter in self.trained.items()
        }
        save_file(tensors, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take what `save` wrote; RunError where it is not there, damaged or another critic's."""
        try:
            saved = load_file(folder / FILE)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"{folder} has no whole critic ({error}); go on from another with --resume-from"
            ) from error
        self.take(saved, f"the critic in {folder}")

    def take(self, saved: Mapping[str, Tensor], source: str) -> None:
        """Set every trained parameter; RunError where names or shapes differ."""
        trained = self.trained
        wrong = _shapes(trained).items() ^ _shapes(saved).items()
        if wrong:
            name, _ = min(wrong)
            raise RunError(
                f"{source} does not fit this run's: {name} differs; keep lora and critic as they were"
            )
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(saved[name])


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def add_critic(policy: Any, *, value_range: tuple[float, float] | None = None) -> Critic:
    """Make a critic of the policy as it is, and let the policy's forward give its values in calls with `with_more=True`.

    Args:
        policy: transformers' model or peft's around it, not wrapped by accelerate.
    """
    model = bare(policy)
    frozen = {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    backbone = copy.deepcopy(model.base_model, frozen)  # frozen parameters stay the very same
    width = model.config.get_text_config().hidden_size
    critic = Critic(backbone, width=width, value_range=value_range)
    score = policy.forward
    policy.add_module(NAME, critic.to(next(model.parameters()).device))

    def with_values(**row: Any) -> dict[str, Any]:
        # A plain dict: DDP builds the output again, which a class without a field for values refuses.
        return {**score(**row), **critic(**row)}

    add_outputs(policy, with_values)
    policy.register_state_dict_post_hook(_leave_out)
    policy.register_load_state_dict_post_hook(_miss_nothing)
    return critic


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}{NAME}.")]:
        del state[name]


def _miss_nothing(module: nn.Module, incompatible: Any) -> None:
    incompatible.missing_keys[:] = [
        name for name in incompatible.missing_keys if not name.startswith(f"{NAME}.")
    ]


def start_from_reward_model(critic: Critic, run: Path, *, base: Path) -> None:
    """Set the critic to the reward model that a run of `ycore reward` trained.

    Args:
        run: the folder of that run.
        base: the folder of the weights that this run begins with, which must be those that it began with.

    Raises:
        ConfigError: it is no such run, or began with another model, or has other adapters.
    """
    folder = RunFolder(run)
    setting = f"critic.init {run}"
    if (
        not folder.identity.is_file()
        or read_json(folder.config)["config"].get("algorithm") != "reward"
    ):
        raise ConfigError(
            f"{setting} must be the folder of a finished run of `ycore reward`, and it is not"
        )
    began_with = read_json(folder.identity)["model"]
    base_model = model_fingerprint(base)
    if began_with != base_model:
        raise ConfigError(
            f"{setting} began with another model ({began_with} instead of {base_model}); train it on this run's --model"
        )
    has_adapter = any(".lora_" in name for name in critic.trained)
    source = folder.model / "adapter" if has_adapter else folder.model
    files = sorted(source.glob("*.safetensors"))
    if not files or has_adapter != (folder.model / "adapter").is_dir():
        kind = "adapters" if has_adapter else "every weight"
        raise ConfigError(
            f"{setting} has no trained weights in {source}, and this run trains {kind}; train both alike"
        )
    if has_adapter:
        lora = read_json(source / "adapter_config.json")
        modules = critic.backbone.modules()
        layer: Any = next(module for module in modules if hasattr(module, "lora_A"))
        r = layer.r["default"]
        alpha = layer.lora_alpha["default"]
        if (lora["r"], lora["lora_alpha"]) != (r, alpha):
            raise ConfigError(
                f"{setting} has adapters of r {lora['r']} and alpha {lora['lora_alpha']}, this run's are {r} and {alpha}; "
                f"say --set lora.r={lora['r']} --set lora.alpha={lora['lora_alpha']}"
            )
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    try:
        critic.take(_renamed(saved, critic.backbone.base_model_prefix), setting)
    except RunError as error:
        raise ConfigError(str(error)) from None


def _renamed(saved: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """A classifier's tensors under the critic's names; its head is called `score` and has no bias."""
    renamed: dict[str, Tensor] = {"head.bias": torch.zeros(1)}
    for name, tensor in saved.items():
        name = name.removeprefix("base_model.model.")
        if name.startswith("score."):
            renamed["head.weight"] = tensor
            continue
        name = f"backbone.{name.removeprefix(f'{prefix}.')}"
        for part in ("lora_A", "lora_B"):
            name = name.replace(f"{part}.weight", f"{part}.default.weight")
        renamed[name] = tensor
    return renamed


# -- the trainer -------------------------------------------------------------------------------------------------------


class Trainer(TokenRewardTrainer):
    """Example: `Trainer(model=..., critic=CriticSettings(warmup_steps=5), kl_in="reward", ...)`.

    Args:
        base: the folder of the weights that training begins with, to compare with a reward model's.
    """

    more_outputs = (VALUES,)

    def __init__(self, *args: Any, critic: CriticSettings, base: Path, **kwargs: Any) -> None:
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
            start_from_reward_model(self.critic, Path(critic.init).expanduser(), base=base)

    @classmethod
    def settings_of(cls, config: PPOConfig, model: Path) -> dict[str, Any]:
        return {**super().settings_of(config, model), "critic": config.critic, "base": model}

    # -- the round: from scores to advantages and value targets -----------------------------------------------------

    def _replaced_advantages(self, batch: Batch) -> dict[str, Tensor]:
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
        explained = explained_variance(values, to_go(rewards), mask, self._add_up)
        if explained is not None:
            self.record("ycore/critic/explained_variance", explained)
        self.record(
            "ycore/critic/value", (values * mask).sum().item() / max(1, int(mask.sum()))
        )
        return {
            "advantages": advantages.float(),
            "old_values": values.float(),
            "value_targets": targets.float(),
            "value_mask": mask,
        }

    def _values_of(self, batch: Batch) -> Tensor:
        """Values before each token, (B, T)."""
        ids, mask = whole_sequences(batch)
        width = batch["completion_ids"].size(1)
        later_prompts = batch.get("later_prompt_lengths")
        rows = PaddedRows(ids, mask, width, later_prompts=later_prompts)
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

    def _compute_loss(self, model: nn.Module, inputs: Batch) -> Tensor:
        """TRL's loss of the policy, and the critic's: the mean over the tokens of the whole step."""
        loss = super()._compute_loss(model, inputs)
        (values,) = self._more
        mask = inputs["value_mask"].bool()
        losses = value_losses(
            values[mask],
            inputs["old_values"][mask],
            inputs["value_targets"][mask],
            self._settings.value_clip,
        )
        if losses.numel():
            self.record("ycore/critic/loss", losses.detach().mean().item())
        return loss + losses.sum() / self._step_tokens(inputs) + 0.0 * values.sum()

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

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """transformers calls it before the optimizer's step: each of the two is clipped by its own norm."""
        self._warm_up()
        parameters = self.critic.trained.values()
        norm = float(nn.utils.clip_grad_norm_(parameters, self._settings.max_grad_norm))
        self._refuse(norm, "the norm of the critic's gradient")
        self.record("ycore/critic/grad_norm", norm)
        return self.accelerator.clip_grad_norm_(
            self._policy_parameters, self.args.max_grad_norm
        )

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
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
