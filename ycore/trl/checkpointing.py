"""What TRL leaves out of the checkpoints of a trainer with rounds; and only finite numbers make a step."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from ycore.errors import ConfigError
from ycore.trl.base import BaseTrainer

REFERENCE = "reference.safetensors"


class DurableTrainer(BaseTrainer, GRPOTrainer):
    """GRPOTrainer that also saves a moving reference, and stops at the first loss or gradient that is not finite."""

    way_out = (
        "nothing of it is saved, and the last checkpoint stands; "
        "go on from it with --resume --accept-changes and a lower --learning-rate, or look at the rewards"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.sync_ref_model and (is_deepspeed_zero3_enabled() or self.is_fsdp_enabled):
            raise ConfigError(
                "sync_ref_model moves a reference that a checkpoint must hold whole, and zero3 and fsdp2 cut it up; "
                "take --accelerate zero2, or leave it out"
            )
        self._losses: list[torch.Tensor] = []

    def _save_more(self, checkpoint: Path) -> None:
        """The reference, if it follows the policy (`sync_ref_model`)."""
        if self.args.sync_ref_model and self.args.should_save:
            save_model(self.accelerator.unwrap_model(self.ref_model), str(checkpoint / REFERENCE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.args.sync_ref_model and checkpoint is not None:
            load_model(self.accelerator.unwrap_model(self.ref_model), Path(checkpoint) / REFERENCE)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """transformers calls it for every micro-batch; the losses are checked once a step, to wait for one number."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._losses.append(loss.detach())
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """transformers calls it just before the optimizer's step."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._refuse(torch.stack(self._losses).sum().item(), "the loss")
        self._losses.clear()
        if norm is not None:
            value = float(norm)
            self._refuse(math.inf if value < 0 else value, "the gradient norm")  # DeepSpeed's -1: it has no number
        return norm

    def _refuse(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            self._stop(f"step {self.state.global_step + 1}: {name} is {value}")
