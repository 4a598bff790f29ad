"""GRPO (arXiv 2402.03300): TRL's trainer, its settings from the run's config, rounds from the controller.

GMPO (arXiv 2507.20673): the geometric mean of the tokens' ratios, by TRL's own trainer, behind ycore's seam.

Not here: the seam itself (`trl_seam`), the process (`roles.trainer`).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase, TrainerCallback
from trl import GRPOConfig
from trl.experimental.gmpo import GMPOTrainer

from ycore.config.batch import derive_batch
from ycore.config.schema import LoraSettings, RunConfig
from ycore.config.trl_arguments import trl_arguments
from ycore.rewards.loading import reward_names
from ycore.run.paths import RunFolder
from ycore.trl.advantages import estimator
from ycore.trl.seam import SeamGRPOTrainer, placeholder_rewards


class SeamGMPOTrainer(SeamGRPOTrainer, GMPOTrainer):
    """The seam first, then GMPO's loss, then GRPO's everything else."""


def compute_dtype(config: RunConfig) -> torch.dtype:
    """What trainer and engine compute in."""
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def build_trainer(
    config: RunConfig,
    folder: RunFolder,
    *,
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    callbacks: Sequence[TrainerCallback],
    world_size: int = 1,
) -> SeamGRPOTrainer:
    """A trainer that wants only its `rounds`."""
    batch = derive_batch(config, world_size=world_size, on_cpu=not torch.cuda.is_available())
    arguments = trl_arguments(config, batch, folder)
    arguments["model_init_kwargs"] = {"dtype": _stored_dtype(config), **(arguments.get("model_init_kwargs") or {})}
    arguments["reward_weights"] = [reward.weight for reward in config.rewards]
    names = reward_names(config.rewards)
    trainer_class = SeamGMPOTrainer if config.loss_from == "gmpo" else SeamGRPOTrainer
    return trainer_class(
        model=str(model),
        reward_funcs=placeholder_rewards(names),
        advantage=None if config.advantage == "group" else estimator(config.advantage),
        divergence=config.divergence,
        args=GRPOConfig(**arguments),
        train_dataset=_ticks(arguments["per_device_train_batch_size"] * batch.steps_per_generation * world_size),
        processing_class=tokenizer,
        peft_config=None if config.lora is None else _lora(config.lora),
        callbacks=list(callbacks),
    )


def _stored_dtype(config: RunConfig) -> torch.dtype:
    """A frozen base is kept as it is computed with; weights in training are kept in float32."""
    return torch.float32 if config.lora is None else compute_dtype(config)


def _lora(settings: LoraSettings) -> LoraConfig:
    return LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=settings.target_modules,
        task_type="CAUSAL_LM",
    )


def _ticks(num_rows: int) -> Dataset:
    """The controller draws the prompts; TRL's loader only says when the next round is due."""
    rows: dict[str, Any] = {"prompt": ["tick"] * num_rows}
    return Dataset.from_dict(rows)
