"""What of a trainer with rounds a checkpoint needs, and what may never become one.

TRL leaves out the round that a later step still learns from and the reference that follows the policy, and takes a
step on whatever gradient there is. Private members are wrapped or set for that, held by the same contract test as the
seam's:

    _step, _buffered_inputs          where the trainer stands, and the round in use
    _load_optimizer_and_scheduler    load the reference, too
    _get_grad_norm                   the last look before the optimizer takes the step: only numbers pass

What every trainer has besides TRL's own: checkpoints that are whole, and only numbers in them.

Not here: how a checkpoint becomes whole (`whole_checkpoints`), rounds and losses (`trl_seam`), and what is on disk
(`run_folder.checkpoints`, `roles.checkpoints`).
"""

import copyreg
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Protocol

import torch
from safetensors.torch import load_model, save_model
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOTrainer

from ycore.errors import ConfigError, TrainerError


class CheckpointWriter(Protocol):
    """Who decides where a checkpoint is written and when it counts."""

    def saving(self, step: int) -> AbstractContextManager[Path]:
        """The folder under which `checkpoint-STEP` is to be written; on leaving it is published, after an error not."""


class WholeCheckpoints(Trainer):
    """Stands before one of TRL's trainers in the order of classes."""

    way_out: ClassVar[str] = "nothing of it is saved; try again with a lower --learning-rate"
    writer: CheckpointWriter | None = None
    _saves_in: Path | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        copyreg.pickle(type(self.args), _without_hub_token)

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


def _without_hub_token(arguments: TrainingArguments) -> tuple[Any, ...]:
    """How arguments are pickled: transformers writes them to `training_args.bin`, beside weights that are shared."""
    rebuild, kind, state, *_ = tuple(object.__reduce_ex__(arguments, 2))
    return rebuild, kind, {**state, "hub_token": None}


def _here(weight: torch.Tensor) -> torch.Tensor:
    """What of a weight lies on this rank, where it is cut up over the ranks (FSDP2; ZeRO-3 hides its part)."""
    return weight.to_local() if isinstance(weight, DTensor) else weight.detach()


MicroBatches = list[dict[str, torch.Tensor | list[Any] | None]]
"""What TRL splits a round into: tensors by name, of images lists too, and None for what a model does not take."""

REFERENCE = "reference.safetensors"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a trainer stands between two steps: the micro-batches it has taken, and those of a round still in use."""

    micro_step: int
    corrects: bool
    """TRL's `use_vllm`: whether the round came with the engine's logprobs."""

    micro_batches: MicroBatches | None = None


class DurableTrainer(WholeCheckpoints, GRPOTrainer):
    """GRPOTrainer that saves through `writer`, where it has one, and stops at the first number that is none."""

    way_out = (
        "nothing of it is saved, and the last checkpoint stands; "
        "go on from it with --resume --accept-changes and a lower --learning-rate, or look at the rewards"
    )
    _step: int
    _buffered_inputs: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.sync_ref_model and (is_deepspeed_zero3_enabled() or self.is_fsdp_enabled):
            raise ConfigError(
                "sync_ref_model moves a reference that a checkpoint must hold whole, and zero3 and fsdp2 cut it up; "
                "take --accelerate zero2, or leave it out"
            )
        self._losses: list[torch.Tensor] = []

    @property
    def place(self) -> Place:
        """Where the trainer stands now, which is between two steps."""
        unfinished = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        return Place(self._step, self.use_vllm, self._buffered_inputs if unfinished else None)

    def go_to(self, place: Place) -> None:
        """Stand there; before `train`."""
        device = self.accelerator.device
        self._step, self.use_vllm = place.micro_step, place.corrects
        self._buffered_inputs = place.micro_batches and [
            {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
            for batch in place.micro_batches
        ]

    @property
    def steps_per_round(self) -> int:
        """Optimizer steps from one round to the next."""
        return int(self.args.steps_per_generation * self.num_iterations // self.args.gradient_accumulation_steps)

    def _save_more(self, checkpoint: Path) -> None:
        """The reference where it follows the policy (`sync_ref_model`): TRL leaves it out."""
        if self.args.sync_ref_model and self.args.should_save:
            save_model(self.accelerator.unwrap_model(self.ref_model), str(checkpoint / REFERENCE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.args.sync_ref_model and checkpoint is not None:
            load_model(self.accelerator.unwrap_model(self.ref_model), Path(checkpoint) / REFERENCE)

    # -- nothing but numbers ---------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self._losses.append(loss.detach())
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._refuse(torch.stack(self._losses).sum().item(), "the loss")
        self._losses.clear()
        if norm is not None:
            value = float(norm)
            self._refuse(math.inf if value < 0 else value, "the gradient norm")  # DeepSpeed says -1 for no number
        return norm

    def _refuse(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            self._stop(f"step {self.state.global_step + 1}: {what} is {value}")
