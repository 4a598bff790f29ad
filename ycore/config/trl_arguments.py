"""The final keyword arguments of TRL's SFTConfig, RewardConfig, DPOConfig and KTOConfig.

The final keyword arguments of TRL's GRPOConfig: what the run decides, ycore's defaults, and the user's own fields.

Not here: the check of the user's own fields (`overrides`, `trl_fields`), and the sizes (`tune_batch`).
"""

import math
from collections.abc import Mapping
from typing import Any

from ycore.config.batch import BatchPlan, TuneBatch
from ycore.config.schema import RunConfig, TuneConfig
from ycore.run.paths import RunFolder

LEARNING_RATE_FULL = 1e-6
LEARNING_RATE_LORA = 2e-5


def trl_arguments(config: RunConfig, batch: BatchPlan, folder: RunFolder) -> dict[str, Any]:
    """Plain JSON values, ready for `GRPOConfig(**arguments)`; the user's own fields win over ycore's defaults."""
    return {**_defaults(config, batch), **config.trl, **_owned(config, batch, folder)}


def _defaults(config: RunConfig, batch: BatchPlan) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "learning_rate": LEARNING_RATE_FULL if config.lora is None else LEARNING_RATE_LORA,
        "logging_steps": 1,
        "report_to": "none",
        "save_total_limit": 2,
        "disable_tqdm": True,
        "ddp_timeout": math.ceil(config.collective_timeout_s),
    }
    return defaults | ({"use_cpu": True, "gradient_checkpointing": False} if batch.on_cpu else {})


def _owned(config: RunConfig, batch: BatchPlan, folder: RunFolder) -> dict[str, Any]:
    return {
        "output_dir": str(folder.checkpoints),
        "max_steps": config.steps,
        "num_generations": config.group_size,
        "max_completion_length": config.max_tokens,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
        "save_steps": config.checkpoint_every or math.ceil(config.steps / 5),
        "bf16": config.dtype != "float32",
        "per_device_train_batch_size": batch.per_device_train_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
        "steps_per_generation": batch.steps_per_generation,
        "use_vllm": False,  # TRL's own engines stay off; ycore's backend takes their place after construction
        "remove_unused_columns": False,
        "shuffle_dataset": False,
    }


TUNE_ARGUMENTS_LEARNING_RATE_FULL: Mapping[str, float] = {"sft": 2e-5, "reward": 1e-5, "dpo": 1e-6, "kto": 1e-6}
TUNE_ARGUMENTS_LEARNING_RATE_LORA: Mapping[str, float] = {"sft": 2e-4, "reward": 1e-4, "dpo": 2e-5, "kto": 2e-5}
"""TRL has one rate for both kinds of weights: 2e-5, 1e-4, 1e-6 and 1e-6. Adapters, which begin at nothing, hardly move
at 1e-6, and 1e-4 on every weight of a reward model forgets what it was trained on."""


def tune_arguments(config: TuneConfig, batch: TuneBatch, folder: RunFolder) -> dict[str, Any]:
    """Plain JSON values for the config class of the run's trainer; the user's own fields win over ycore's defaults."""
    return {**_tune_arguments_defaults(config, batch), **config.trl, **_tune_arguments_owned(config, batch, folder)}


def _tune_arguments_defaults(config: TuneConfig, batch: TuneBatch) -> dict[str, Any]:
    rates = TUNE_ARGUMENTS_LEARNING_RATE_FULL if config.lora is None else TUNE_ARGUMENTS_LEARNING_RATE_LORA
    defaults: dict[str, Any] = {
        "max_length": batch.max_length,
        "learning_rate": rates[config.algorithm],
        "per_device_eval_batch_size": batch.per_device_train_batch_size,  # transformers' 8 may not fit
        "logging_steps": 1,  # TRL's 10 leaves short runs without a curve
        "report_to": "none",
        "save_total_limit": 2,
        "disable_tqdm": True,
    }
    return defaults | ({"use_cpu": True, "gradient_checkpointing": False} if batch.on_cpu else {})


def _tune_arguments_owned(config: TuneConfig, batch: TuneBatch, folder: RunFolder) -> dict[str, Any]:
    return {
        "output_dir": str(folder.checkpoints),
        "max_steps": batch.steps,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
        "save_steps": config.checkpoint_every or math.ceil(batch.steps / 5),
        "bf16": config.dtype != "float32",
        "per_device_train_batch_size": batch.per_device_train_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }
