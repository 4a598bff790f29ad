"""The accelerate config file of each name that `--accelerate` knows. Pure.

Not here: a config file of the user's own (`layout`), and starting accelerate (`launcher`).
"""

from typing import Any, Literal

from ycore.errors import ConfigError

Name = Literal["ddp", "zero1", "zero2", "zero3", "fsdp2"]
Dtype = Literal["float32", "bfloat16"]
NAMES: tuple[Name, ...] = ("ddp", "zero1", "zero2", "zero3", "fsdp2")


def accelerate_config(name: Name, *, processes: int, on_cpu: bool, dtype: Dtype) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads, for ranks on this machine; ConfigError for what cannot work."""
    if name == "fsdp2" and on_cpu:
        raise ConfigError("--accelerate fsdp2 needs GPUs: on CPU accelerate would shard nothing; take zero3")
    common: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "machine_rank": 0,
        "main_process_port": 0,  # a free one
        "main_training_function": "main",
        "mixed_precision": "bf16" if dtype == "bfloat16" else "no",
        "num_machines": 1,
        "num_processes": processes,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": on_cpu,
    }
    if name == "ddp":
        # Also on CPU: for MULTI_CPU accelerate would want MPI; with `use_cpu` it is torchrun and gloo.
        return common | {"distributed_type": "MULTI_GPU", "gpu_ids": "all"}
    if name == "fsdp2":
        return common | {"distributed_type": "FSDP", "fsdp_config": _fsdp2()}
    return common | {"distributed_type": "DEEPSPEED", "deepspeed_config": _deepspeed(int(name.removeprefix("zero")))}


def _deepspeed(stage: int) -> dict[str, Any]:
    return {
        "zero_stage": stage,
        "zero3_init_flag": stage == 3,  # the model is built in shards, never whole on one rank
        "zero3_save_16bit_model": stage == 3,  # so that `model/` holds weights that anything can load
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
    }


def _fsdp2() -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    }
