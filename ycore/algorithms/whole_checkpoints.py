"""What every trainer without rollouts has besides TRL's own: checkpoints that are whole, and only numbers in them.

TRL saves in place; here a checkpoint is written where a `CheckpointWriter` says, which publishes it once it is whole.

Not here: the same for the trainers that generate, whose checkpoints hold more (`durable`).
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer

from ycore.algorithms.durable import CheckpointWriter
from ycore.errors import TrainerError


class WholeCheckpoints(Trainer):
    """Stands before one of TRL's trainers in the order of classes."""

    writer: CheckpointWriter | None = None
    _saves_in: Path | None = None

    def save_checkpoint(self) -> None:
        """A checkpoint of the last finished step."""
        self._save_checkpoint(self.model, trial=None)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.writer is None:
            super()._save_checkpoint(model, trial)
            return
        self.refuse_broken_weights()
        with self.writer.saving(self.state.global_step) as folder:
            self._saves_in = folder
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._saves_in = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._saves_in is None else self._saves_in)

    def refuse_broken_weights(self) -> None:
        """TrainerError where a weight in training is not finite: neither a checkpoint nor a model is made of that."""
        for name, weight in self.model.named_parameters():
            if weight.requires_grad and not torch.isfinite(weight.detach()).all():
                raise TrainerError(
                    f"after step {self.state.global_step} the weight {name} is not finite; nothing of it is saved; "
                    "try again with a lower --learning-rate"
                )
