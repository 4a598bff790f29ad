"""What every trainer has besides TRL's own: checkpoints that are whole, and only numbers in them.

TRL saves in place; here a checkpoint is written where a `CheckpointWriter` says, which publishes it once it is whole.
Of private members, `_save_checkpoint` and `_get_output_dir` are wrapped, held by the contract test of `trl_seam`.

Not here: what checkpoints of the trainers that generate hold besides (`durable`), and what is on disk
(`run_folder.checkpoints`).
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import Trainer

from ycore.errors import TrainerError


class CheckpointWriter(Protocol):
    """Who decides where a checkpoint is written and when it counts."""

    def saving(self, step: int) -> AbstractContextManager[Path]:
        """The folder under which `checkpoint-STEP` is to be written; on leaving it is published, after an error not."""


class WholeCheckpoints(Trainer):
    """Stands before one of TRL's trainers in the order of classes."""

    way_out: ClassVar[str] = "nothing of it is saved; try again with a lower --learning-rate"
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
                self._save_more(folder / f"checkpoint-{self.state.global_step}")
            finally:
                self._saves_in = None

    def _save_more(self, checkpoint: Path) -> None:
        """What a trainer's checkpoint holds besides."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._saves_in is None else self._saves_in)

    def refuse_broken_weights(self) -> None:
        """TrainerError where a weight in training is not finite: neither a checkpoint nor a model is made of that."""
        weights = {name: _here(weight) for name, weight in self.model.named_parameters() if weight.requires_grad}
        if not torch.isfinite(get_total_norm(list(weights.values()))):  # one pass over them, and one number to wait for
            broken = next((name for name, weight in weights.items() if not torch.isfinite(weight).all()), "of them all")
            self._stop(f"after step {self.state.global_step} the weight {broken} is not finite")

    def _stop(self, what: str) -> NoReturn:
        raise TrainerError(f"{what}; {self.way_out}")


def _here(weight: torch.Tensor) -> torch.Tensor:
    """What of a weight lies on this rank, where it is cut up over the ranks (FSDP2; ZeRO-3 hides its part)."""
    return weight.to_local() if isinstance(weight, DTensor) else weight.detach()
