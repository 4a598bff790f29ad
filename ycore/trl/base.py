"""Trainers of ycore add to TRL's: whole checkpoints, finite weights, a measure of held-out rows, a saved model."""

import copyreg
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from accelerate.utils import fsdp2_prepare_model
from peft import PeftModel
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from ycore.engine.weights import save_merged
from ycore.errors import ConfigError, TrainerError

REFERENCE = "reference.safetensors"
_NOT_A_MEASURE = {
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "epoch",
    "num_tokens",
    "model_preparation_time",
}


class BaseTrainer(Trainer):
    """A mixin: an algorithm's class lists it before TRL's trainer."""

    config_class: ClassVar[type[TrainingArguments]]
    task_type: ClassVar[str] = "CAUSAL_LM"
    """peft's name for what the model does."""

    keeps_peft: ClassVar[bool] = False
    """Whether adapters keep peft's own forward, for a trainer that adds a second adapter or leaves autocast."""

    way_out: ClassVar[str] = "nothing of it is saved; try again with a lower --learning-rate"
    saving: Callable[[int], AbstractContextManager[Path]] | None = None
    """Gives the folder for `checkpoint-STEP`, publishes it on leaving, and drops it after an error."""

    _saves_in: Path | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for parent in type(self).__mro__:
            names = vars(sys.modules[parent.__module__])
            if "prepare_fsdp" in names:  # by which TRL shards a reference
                names["prepare_fsdp"] = shard_frozen
        super().__init__(*args, **kwargs)
        copyreg.pickle(type(self.args), _without_hub_token)

    @classmethod
    def prepare_tokenizer(cls, tokenizer: PreTrainedTokenizerBase) -> None:
        """Change the tokenizer before training, if the algorithm needs that."""

    @property
    def bare_model(self) -> Any:
        """The policy without wrappers: transformers' model, or peft's around it."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def base_model(self) -> Any:
        """The policy as transformers' own model, without adapters around it."""
        return bare(self.bare_model)

    def measure(self) -> dict[str, Any]:
        """TRL's figures of the model on the held-out rows, and `n`, their number. All ranks call it together."""
        figures = {name.removeprefix("eval_"): value for name, value in self.evaluate().items()}
        for name in _NOT_A_MEASURE & figures.keys():
            del figures[name]
        return {"n": len(self.eval_dataset), **figures}

    def write_model(self, folder: Path, *, dtype: torch.dtype, merge: bool) -> None:
        """Save the trained model and its tokenizer. All ranks call it together.

        Args:
            dtype: of the merged weights.
            merge: also write the adapters merged into their base, under `folder/merged`.
        """
        writes = self.accelerator.is_main_process
        self.save_model(str(folder))
        folders = [folder]
        if merge:
            folders.append(folder / "merged")
            save_merged(self.bare_model, folder / "merged", dtype=dtype, writes=writes)
        for saved in folders if writes else ():
            self.processing_class.save_pretrained(saved)

    def _init_training_state(self, max_steps: int, *args: Any, **more: Any) -> tuple[int, int]:
        """From a checkpoint of the last step no epoch is left; transformers would take a step more inside an epoch."""
        begun: tuple[int, int] = super()._init_training_state(max_steps, *args, **more)
        return begun if self.state.global_step < max_steps else (sys.maxsize, 0)

    def save_checkpoint(self) -> None:
        """Save a checkpoint of the last finished step."""
        self._save_checkpoint(self.model, trial=None)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """transformers calls it every `save_steps`; `saving` decides where it writes and when that counts."""
        if self.saving is None:
            super()._save_checkpoint(model, trial)
            return
        self.refuse_broken_weights()
        with self.saving(self.state.global_step) as folder:
            self._saves_in = folder
            try:
                super()._save_checkpoint(model, trial)
                self._save_more(folder / f"checkpoint-{self.state.global_step}")
            finally:
                self._saves_in = None

    def _save_more(self, checkpoint: Path) -> None:
        """Write what TRL leaves out of this algorithm's checkpoints."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begin FSDP2 with the trained adapter: by a reference's, which may come first, it takes gradients for bfloat16."""
        if isinstance(self.model, FSDPModule):
            self.model._get_fsdp_state()._lazy_init()
        return super().training_step(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(super()._get_output_dir(trial) if self._saves_in is None else self._saves_in)

    def refuse_broken_weights(self) -> None:
        """TrainerError if a trained weight is not finite, so that no checkpoint or model is made of it."""
        named = self.model.named_parameters()
        weights = {name: _local(weight) for name, weight in named if weight.requires_grad}
        # The norm is one pass over the weights, and one number to wait for.
        if torch.isfinite(get_total_norm(list(weights.values()))):
            return
        broken = (name for name, weight in weights.items() if not torch.isfinite(weight).all())
        name = next(broken, "of them all")
        self._stop(f"after step {self.state.global_step} the weight {name} is not finite")

    def _stop(self, problem: str) -> NoReturn:
        raise TrainerError(f"{problem}; {self.way_out}")


class DurableTrainer(BaseTrainer):
    """Saves a reference that may move, and stops at the first loss or gradient that is not finite."""

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
        self._losses: list[Tensor] = []

    def _save_more(self, checkpoint: Path) -> None:
        """The reference, if it follows the policy (`sync_ref_model`)."""
        if self.args.sync_ref_model and self.args.should_save:
            save_model(
                self.accelerator.unwrap_model(self.ref_model), str(checkpoint / REFERENCE)
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.args.sync_ref_model and checkpoint is not None:
            load_model(
                self.accelerator.unwrap_model(self.ref_model), Path(checkpoint) / REFERENCE
            )

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """transformers calls it for every micro-batch; the losses are checked once a step, to wait for one number."""
        loss: Tensor = super().training_step(*args, **kwargs)
        self._losses.append(loss.detach())
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """transformers calls it just before the optimizer's step."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._refuse(torch.stack(self._losses).sum().item(), "the loss")
        self._losses.clear()
        if norm is not None:
            # DeepSpeed's -1 says that the norm has no number.
            self._refuse(math.inf if norm < 0 else float(norm), "the gradient norm")
        return norm

    def _refuse(self, value: float, name: str) -> None:
        if not math.isfinite(value):
            self._stop(f"step {self.state.global_step + 1}: {name} is {value}")


def shard_frozen(model: nn.Module, accelerator: Any) -> nn.Module:
    """Shard a frozen model by FSDP2 as accelerate shards the policy: by layers, with the weights that rank 0 has read.

    TRL's `prepare_fsdp` gathers it in one piece, and leaves the other ranks the empty weights that transformers gave them.
    """
    model.requires_grad_(False)
    return fsdp2_prepare_model(accelerator, model).eval()


def bare(model: nn.Module) -> Any:
    """transformers' own model, without adapters around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def _local(weight: Tensor) -> Tensor:
    """This rank's part of a weight that FSDP2 shards; ZeRO-3 leaves the weight empty here."""
    return weight.to_local() if isinstance(weight, DTensor) else weight.detach()


def _without_hub_token(arguments: TrainingArguments) -> tuple[Any, ...]:
    """Pickle arguments: transformers writes them to `training_args.bin`, beside weights that are shared."""
    rebuild, constructor_arguments, state, *_ = tuple(object.__reduce_ex__(arguments, 2))
    return rebuild, constructor_arguments, {**state, "hub_token": None}
