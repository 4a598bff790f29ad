"""From a run's config to the keyword arguments of TRL's config class, and which of TRL's fields ycore sets itself."""

import math
from collections.abc import Mapping
from typing import Any

from ycore.config.algorithms import Algorithm, find_algorithm
from ycore.config.batch import BatchPlan, TuneBatch
from ycore.config.schema import AnyConfig, RunConfig, a_fifth
from ycore.config.trl_fields import familiar_options
from ycore.errors import ConfigError
from ycore.run.paths import RunFolder


def trl_arguments(
    config: AnyConfig, batch: BatchPlan | TuneBatch, folder: RunFolder
) -> dict[str, Any]:
    """Plain JSON values for the config class of the run's trainer; the user's fields win over ycore's defaults.

    Args:
        batch: what `derive_batch` or `derive_tune_batch` made of this config.

    Raises:
        ConfigError: Liger's kernels or flex attention on a CPU.
    """
    if batch.on_cpu and config.trl.get("use_liger_kernel"):
        raise ConfigError(
            "use_liger_kernel needs a GPU: Liger's kernels are written in Triton; leave it out"
        )
    if (
        batch.on_cpu
        and (config.trl.get("model_init_kwargs") or {}).get("attn_implementation")
        == "flex_attention"
    ):
        raise ConfigError(
            "attn_implementation=flex_attention needs a GPU: on a CPU it has no gradients; leave it out"
        )
    return {**_defaults(config, batch, folder), **config.trl, **_owned(config, batch, folder)}


_SAVE_S = 3600.0


def _defaults(
    config: AnyConfig, batch: BatchPlan | TuneBatch, folder: RunFolder
) -> dict[str, Any]:
    algorithm = find_algorithm(config.algorithm)
    defaults: dict[str, Any] = {
        "learning_rate": algorithm.learning_rate
        if config.lora is None
        else algorithm.lora_learning_rate,
        "logging_steps": 1,  # TRL's 10 leaves short runs without a curve
        "report_to": "none",
        "run_name": folder.root.resolve().name,  # of a tracker's page; trackio makes up a new one after a resume
        "save_total_limit": 2,
        "disable_tqdm": True,
    }
    if batch.on_cpu:
        defaults |= {"use_cpu": True, "gradient_checkpointing": False}
    # A rank waits in a collective while another saves a checkpoint of perhaps hundreds of GB: the step's limit is what
    # ends a hang there, and the limit of a round's own exchanges (`collective_timeout_s`) would end a slow save.
    limits = (
        (config.step_timeout_s, config.collective_timeout_s)
        if isinstance(config, RunConfig)
        else (_SAVE_S,)
    )
    defaults["ddp_timeout"] = math.ceil(max(limits))
    if config.deterministic and not batch.on_cpu:
        defaults["full_determinism"] = True
    if isinstance(batch, TuneBatch):
        defaults["max_length"] = batch.max_length
        defaults["per_device_eval_batch_size"] = (
            batch.per_device_train_batch_size
        )  # transformers' 8 may not fit
    return defaults


def _owned(
    config: AnyConfig, batch: BatchPlan | TuneBatch, folder: RunFolder
) -> dict[str, Any]:
    steps = batch.steps if isinstance(batch, TuneBatch) else config.steps
    assert steps is not None
    owned = {
        "output_dir": str(folder.checkpoints),
        "max_steps": steps,
        "seed": config.seed,
        "trust_remote_code": config.trust_remote_code,
        "save_steps": config.checkpoint_every or a_fifth(steps),
        "bf16": config.dtype != "float32",
        "per_device_train_batch_size": batch.per_device_train_batch_size,
        "gradient_accumulation_steps": batch.gradient_accumulation_steps,
    }
    if isinstance(config, RunConfig) and isinstance(batch, BatchPlan):
        owned |= {
            "num_generations": config.group_size,
            "max_completion_length": config.max_tokens,
            "steps_per_generation": batch.steps_per_generation,
            "use_vllm": False,  # TRL's own engines stay off; ycore's backend replaces them after construction
            "remove_unused_columns": False,
            "shuffle_dataset": False,
        }
    return owned


_ALIASES: Mapping[str, str] = {
    "num_generations": "group_size",
    "max_completion_length": "max_tokens",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "output_dir": "output",
    "save_steps": "checkpoint_every",
    "seed": "seed",
    "trust_remote_code": "trust_remote_code",
    "bf16": "dtype",
}


def aliases(algorithm: Algorithm) -> dict[str, str]:
    """TRL's name of a key -> the key of the algorithm's config."""
    return {name: key for name, key in _ALIASES.items() if key in algorithm.config.model_fields}


def alias_value(name: str, value: Any, algorithm: Algorithm) -> Any:
    """The value of an alias in the terms of its key; ConfigError where `save_steps` is a share of the run."""
    if name == "bf16":
        return {True: "bfloat16", False: "float32", None: "auto"}[value]
    if name == "max_steps" and value == -1 and algorithm.learns_from == "examples":
        return None  # epochs count
    if name == "save_steps":
        if value < 1 or value != int(value):
            raise ConfigError(
                f"save_steps is a whole number of steps between checkpoints, at least 1; it is {value}"
            )
        return int(value)
    return value


def refusal(name: str, algorithm: Algorithm) -> str | None:
    """Why a field of TRL's cannot be given, and what to say instead; None where it can."""
    refused = familiar_options()["trl"]
    reasons = refused["any"] | refused[algorithm.learns_from]
    if name.startswith("vllm_") and not name.startswith("vllm_importance_sampling_"):
        reasons = {name: refused["rollouts"]["use_vllm"]} | reasons
    reason: str | None = reasons.get(name)
    return reason
