"""Over which ranks and machines a run trains, and the accelerate config that says so.

The accelerate config file of each name that `--accelerate` knows. Pure.

Not here: the named configs themselves (`accelerate_config`), and any process.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import yaml

from ycore.config.algorithms import AnyConfig
from ycore.errors import ConfigError, nearest

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


_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_MIXED: Mapping[Dtype, str] = {"float32": "no", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Layout:
    """`accelerate` None is one rank in a process of its own, without accelerate's launcher."""

    world: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    accelerate: Mapping[str, Any] | None = None

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds the whole policy."""
        told = self.accelerate or {}
        stage = (told.get("deepspeed_config") or {}).get("zero_stage")
        return told.get("distributed_type") == "FSDP" or stage == 3

    @property
    def local(self) -> int:
        """Ranks on this machine."""
        return self.world // self.num_machines

    def __str__(self) -> str:
        if self.num_machines == 1:
            return f"{self.world} ranks"
        return f"{self.world} ranks on {self.num_machines} machines, this is machine {self.machine_rank}"


ONE_RANK = Layout()


def layout_of(config: AnyConfig, *, on_cpu: bool) -> Layout:
    """The run's ranks, from `processes` and `accelerate`; ConfigError for what cannot work."""
    asked, dtype = config.accelerate, _dtype(config)
    if asked is None and config.processes == 1:
        return ONE_RANK
    named = next((name for name in NAMES if name == (asked or "ddp")), None)
    if named is not None:
        layout = _named(named, config, on_cpu=on_cpu, dtype=dtype)
    else:
        layout = _from_file(Path(str(asked)).expanduser(), config, dtype=dtype)
    assert layout.accelerate is not None
    if layout.accelerate["distributed_type"] == "DEEPSPEED" and find_spec("deepspeed") is None:
        raise ConfigError(f"--accelerate {asked}: DeepSpeed is not installed; pip install 'ycore[deepspeed]'")
    return layout


def _named(name: Name, config: AnyConfig, *, on_cpu: bool, dtype: Dtype) -> Layout:
    told = accelerate_config(name, processes=config.processes, on_cpu=on_cpu, dtype=dtype)
    return Layout(world=config.processes, accelerate=told)


def _from_file(path: Path, config: AnyConfig, *, dtype: Dtype) -> Layout:
    if not path.is_file():
        raise ConfigError(
            f"--accelerate takes {', '.join(NAMES)} or an accelerate config file; there is no file {str(path)!r}"
            + nearest(str(path), NAMES, limit=1)
        )
    told = _read(path)
    world, machines = _number(told, "num_processes", path, least=1), _number(told, "num_machines", path, least=1)
    rank = _number(told, "machine_rank", path, least=0, default=0)
    _check_file(told, path, dtype=dtype, world=world, machines=machines, rank=rank)
    if config.processes not in (1, world // machines):
        raise ConfigError(
            f"--processes {config.processes} is not what {path} says: {world} processes on {machines} "
            f"machine{'s' if machines > 1 else ''}; leave --processes out"
        )
    return Layout(world, machines, rank, told)


def _check_file(told: dict[str, Any], path: Path, *, dtype: Dtype, world: int, machines: int, rank: int) -> None:
    if world % machines or rank >= machines:
        raise ConfigError(
            f"{path}: num_processes must be a multiple of num_machines, and machine_rank below it; "
            f"they are {world}, {machines} and {rank}"
        )
    mixed = told.setdefault("mixed_precision", _MIXED[dtype])
    if str(mixed) not in (_MIXED[dtype], "False" if dtype == "float32" else "bf16"):  # YAML reads a bare `no` as False
        raise ConfigError(
            f"{path}: mixed_precision is {mixed!r}, and the run computes in {dtype}; say {_MIXED[dtype]!r} there, "
            f"or --set dtype={'bfloat16' if mixed == 'bf16' else 'float32'}"
        )
    told["mixed_precision"] = _MIXED[dtype]
    if machines > 1 and not (told.get("main_process_ip") and told.get("main_process_port")):
        raise ConfigError(f"{path}: several machines meet at main_process_ip and main_process_port; say both there")
    if machines > 1 and told["distributed_type"] == "DEEPSPEED":
        launcher = (told.get("deepspeed_config") or {}).get("deepspeed_multinode_launcher")
        if launcher != "standard":
            raise ConfigError(
                f"{path}: deepspeed_config.deepspeed_multinode_launcher must be 'standard', as every machine runs "
                f"this same command; it is {launcher!r}"
            )


def _read(path: Path) -> dict[str, Any]:
    """The file's mapping, `$NAME` and `${NAME}` filled in from the environment, so that one file serves all nodes."""
    text = _VARIABLE.sub(lambda match: _variable(match[1] or match[2], path), path.read_text(encoding="utf-8"))
    try:
        told = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(told, dict) or "distributed_type" not in told:
        raise ConfigError(f"{path} is no accelerate config: it has no distributed_type; `accelerate config` writes one")
    return told


def _variable(name: str, path: Path) -> str:
    if name not in os.environ:
        raise ConfigError(f"{path} names the environment variable {name}, which is not set; export {name}=...")
    return os.environ[name]


def _number(told: Mapping[str, Any], key: str, path: Path, *, least: int, default: int = 1) -> int:
    value = told.get(key, default)
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{path}: {key} is a whole number, {least} or more; it is {value!r}")
    return value


def _dtype(config: AnyConfig) -> Dtype:
    return "float32" if config.dtype == "float32" else "bfloat16"
