"""The final keyword arguments of TRL's GRPOConfig: what the run decides, ycore's defaults, and the user's own fields.

Not here: the check of those fields (`overrides`, `trl_fields`) and the arithmetic of batches (`batch`).
"""

import math
from typing import Any

from ycore.config.batch import BatchPlan
from ycore.config.run import RunConfig
from ycore.run_folder.paths import RunFolder

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
