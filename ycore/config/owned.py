"""The fields of TRL's config that are ycore's own: some are another spelling of a key, some are refused, with why.

Not here: every other field, which passes through `trl` as it is.
"""

from collections.abc import Mapping
from typing import Any

from ycore.errors import ConfigError

ALIASES: Mapping[str, str] = {
    "num_generations": "group_size",
    "max_completion_length": "max_tokens",
    "max_steps": "steps",
    "output_dir": "output",
    "save_steps": "checkpoint_every",
    "seed": "seed",
    "trust_remote_code": "trust_remote_code",
    "bf16": "dtype",
}
"""TRL's spelling -> the key of RunConfig that owns it."""

_DTYPES: Mapping[bool | None, str] = {True: "bfloat16", False: "float32", None: "auto"}

_NO_EVALUATION = "ycore trains without an evaluation loop; measure a model with `ycore eval`"
_DATA_ORDER = "ycore owns the order of the data, by `--seed`"
_ENGINE = "ycore starts, feeds and stops the engines itself; say `--engine vllm` or `--engine transformers`"

_REFUSED: Mapping[str, str] = {
    "generation_batch_size": "say `--prompts-per-step`; a round is prompts_per_step * group_size completions",
    "auto_find_batch_size": "a smaller batch would break groups apart; lower `--prompts-per-step` or `--group-size`",
    "use_vllm": _ENGINE,
    "vllm_gpu_memory_utilization": "say `--set engine.gpu_memory_utilization=0.3`",
    "vllm_max_model_length": "say `--set engine.max_model_len=4096`",
    "fp16": "ycore computes in float32 or bfloat16; say `--set dtype=float32`",
    "reward_weights": "a reward carries its own weight; say `--set rewards.0.weight=0.5`",
    "num_train_epochs": "a run's length is its number of steps; say `--steps`",
    "resume_from_checkpoint": "say `--resume`, which goes on from the run folder's last checkpoint",
    "remove_unused_columns": "rewards read the dataset's columns, so they are always kept",
    "shuffle_dataset": _DATA_ORDER,
    "data_seed": _DATA_ORDER,
    "do_train": "`ycore grpo` trains",
    **dict.fromkeys(("do_eval", "do_predict", "eval_strategy", "eval_steps", "eval_on_start"), _NO_EVALUATION),
    **dict.fromkeys(("load_best_model_at_end", "num_generations_eval"), _NO_EVALUATION),
}


def refusal(name: str) -> str | None:
    """Why a TRL field cannot be given, and what to say instead; None where it can."""
    if name in _REFUSED:
        return _REFUSED[name]
    if name.startswith("vllm_") and not name.startswith("vllm_importance_sampling_"):
        return _ENGINE
    return None


def own_value(name: str, value: Any) -> Any:
    """The value of an alias as the key that owns it takes it."""
    if name == "bf16":
        return _DTYPES[value]
    if name == "save_steps":
        if value < 1 or value != int(value):
            raise ConfigError(f"save_steps is a whole number of steps between checkpoints, at least 1; it is {value}")
        return int(value)
    return value
