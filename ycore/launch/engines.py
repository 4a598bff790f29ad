"""Which engines a run gets, how many, and on which cores or devices.

Where a run runs on this machine: its folder here, its ranks, the cores and devices they have.

Not here: an engine's command (`roles.rollout`), and its process (`launcher`).
"""

import importlib.metadata
import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ycore.config.algorithms import AnyConfig
from ycore.config.resolve import num_gpus
from ycore.config.schema import RunConfig
from ycore.engine.commands import EngineSpec, kv_cache_gib
from ycore.errors import ConfigError
from ycore.launch.layout import ONE_RANK, Layout, layout_of
from ycore.models.folder import context_length
from ycore.run.files import temporary_folder
from ycore.run.paths import RunFolder

Kind = Literal["vllm", "transformers", "replay"]

_MOST_ON_CPU = 2
_LONGEST = 4096  # tokens, where neither the run nor the model asks for less
_PROMPT_ALLOWANCE = 512  # tokens of KV cache kept for a sequence's prompt; more prompts than fit wait their turn
_MOST_SEQUENCES = 256
_WAY_TO_VLLM = "pip install 'ycore[cpu]' (or 'ycore[gpu]')"
_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Machine:
    """What engines can run on: the cores this process may use, and the devices it may see."""

    cores: tuple[int, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The kind of engine, in a sentence for a person, and the servers to start (none for `transformers`)."""

    kind: Kind
    note: str
    max_model_len: int
    engines: tuple[EngineSpec, ...]

    @property
    def sleeps(self) -> bool:
        """Whether the engines share their devices by sleeping."""
        return any(engine.sleeps for engine in self.engines)


def this_machine() -> Machine:
    """The cores and devices of this process; no device where torch is a CPU build."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(n) for n in range(num_gpus())]
    devices = () if _is_cpu_build() else tuple(names[: num_gpus()])
    return Machine(cores=tuple(cores), devices=devices)


def choose_kind(requested: str, *, vllm_installed: bool) -> tuple[Kind, str]:
    """The kind of engine that `engine.kind` means here, and what to tell about it."""
    way_out = _WAY_TO_VLLM
    if requested == "transformers":
        return "transformers", "generating with transformers in the trainer's process, as asked"
    if vllm_installed:
        return "vllm", "generating with vLLM"
    if requested == "vllm":
        raise ConfigError(f"engine.kind is vllm, and vLLM is not installed; {way_out}, or set engine.kind=transformers")
    return "transformers", f"vLLM is not installed, so transformers generates, which is slower; {way_out} for vLLM"


def is_vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def plan_engines(
    config: RunConfig,
    folder: RunFolder,
    model: Path,
    *,
    model_config: Mapping[str, Any],
    machine: Machine,
    vllm_installed: bool,
    layout: Layout = ONE_RANK,
    sleeps: bool = False,
) -> EnginePlan:
    """The run's engines here: on CPU one a core, two at most; else one a device; and always one or more a rank.

    `sleeps`: those on a device can leave it to others.
    """
    max_model_len = longest_sequence(config, model_config)
    if config.replay is not None:
        note = f"taking the rounds of {config.replay} from its journal: nothing is generated"
        return EnginePlan(kind="replay", note=note, max_model_len=max_model_len, engines=())
    kind, note = choose_kind(config.engine.kind, vllm_installed=vllm_installed)
    if kind == "transformers":
        if layout.shards_weights:
            raise ConfigError(
                "transformers generates with the trainer's own weights, which no rank has whole under zero3 or fsdp2; "
                f"install vLLM ({_WAY_TO_VLLM}), or take --accelerate zero2"
            )
        return EnginePlan(kind=kind, note=note, max_model_len=max_model_len, engines=())
    slots = _slots(config.engine.count, machine, least=layout.local)
    max_num_seqs = _sequences_at_once(config, len(slots) * layout.num_machines)
    dtype: Literal["bfloat16", "float32"] = "float32" if config.dtype == "float32" else "bfloat16"
    engines = tuple(
        EngineSpec(
            name=f"rollout-{number}",
            model=model,
            socket=folder.socket(f"rollout-{number}"),
            temporary=temporary_folder(folder),
            run_id=folder.run_id,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            seed=config.seed,
            cores=slot.cores or None,
            device=slot.devices[0] if slot.devices else None,
            memory_gib=_memory_gib(config, model_config, max_model_len, max_num_seqs, _BYTES[dtype], slot),
            gpu_memory_utilization=config.engine.gpu_memory_utilization,
            sleeps=sleeps and bool(slot.devices),
            trust_remote_code=config.trust_remote_code,
        )
        for number, slot in enumerate(slots)
    )
    return EnginePlan(kind=kind, note=f"{note}: {_describe(slots)}", max_model_len=max_model_len, engines=engines)


def longest_sequence(config: RunConfig, model_config: Mapping[str, Any]) -> int:
    """Prompt plus completion, in tokens: as asked, else the model's own context, 4096 at most."""
    context = context_length(dict(model_config))
    if config.engine.max_model_len is None:
        return min(context or _LONGEST, _LONGEST)
    if context and config.engine.max_model_len > context:
        raise ConfigError(
            f"engine.max_model_len {config.engine.max_model_len} is more than the model's {context}; lower it"
        )
    return config.engine.max_model_len


def _slots(count: int | Literal["auto"], machine: Machine, *, least: int) -> list[Machine]:
    """The machine, divided: `count` devices, or `count` even shares of the cores; slot k is rank k's."""
    if count != "auto" and count < least:
        raise ConfigError(f"engine.count {count} is less than the {least} ranks here, which need one each; raise it")
    if machine.devices:
        number = max(least, len(machine.devices)) if count == "auto" else count
        if number > len(machine.devices):
            raise ConfigError(f"engine.count {number} is more than the {len(machine.devices)} devices here; lower it")
        return [Machine(cores=(), devices=(device,)) for device in machine.devices[:number]]
    number = max(least, min(len(machine.cores), _MOST_ON_CPU)) if count == "auto" else count
    if number > len(machine.cores):
        raise ConfigError(f"engine.count {number} is more than the {len(machine.cores)} cores here; lower it")
    bounds = [len(machine.cores) * share // number for share in range(number + 1)]
    return [Machine(cores=machine.cores[bounds[k] : bounds[k + 1]], devices=()) for k in range(number)]


def _sequences_at_once(config: RunConfig, num_engines: int) -> int:
    """What one engine must hold so that a round's completions run all at the same time."""
    group = config.num_samples if config.algorithm == "eval" else config.group_size
    return max(1, min(_MOST_SEQUENCES, math.ceil(config.prompts_per_step * group / num_engines)))


def _memory_gib(
    config: RunConfig,
    model_config: Mapping[str, Any],
    max_model_len: int,
    max_num_seqs: int,
    bytes_per_value: int,
    slot: Machine,
) -> int:
    if config.engine.memory_gib is not None or slot.devices:
        return config.engine.memory_gib or 1
    expected = max_num_seqs * min(max_model_len, _PROMPT_ALLOWANCE + config.max_tokens)
    return kv_cache_gib(model_config, max(expected, max_model_len), bytes_per_value=bytes_per_value)


def _describe(slots: Sequence[Machine]) -> str:
    engines = "1 engine" if len(slots) == 1 else f"{len(slots)} engines"
    if slots[0].devices:
        return f"{engines} on {'device' if len(slots) == 1 else 'devices'} " + ", ".join(
            slot.devices[0] for slot in slots
        )
    num_cores = len(slots[0].cores)
    return f"{engines} on {num_cores} CPU core{'s' if num_cores > 1 else ''}{' each' if len(slots) > 1 else ''}"


def _is_cpu_build() -> bool:
    """Whether the torch that is installed cannot use a device, by its version alone: `2.13.0+cpu`."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


@dataclass(frozen=True, slots=True)
class Site:
    """`folder` is the run's own on the first machine, and `node-1`, `node-2`, ... inside it on the others."""

    folder: RunFolder
    layout: Layout
    machine: Machine


def site_of(config: AnyConfig, *, trains: bool = True) -> Site:
    """This machine's part of the run; ConfigError where it has not what the ranks need."""
    machine = this_machine()
    layout = layout_of(config, on_cpu=not machine.devices) if trains else ONE_RANK
    has = machine.devices or machine.cores
    if layout.local > len(has):
        kind = "devices" if machine.devices else "cores"
        rule = f"every process needs {kind} of its own"
        raise ConfigError(f"{rule}; there are {layout.local} processes and {len(has)} {kind}; ask for fewer")
    home = Path(config.output)
    folder = RunFolder(home if layout.machine_rank == 0 else home / f"node-{layout.machine_rank}")
    return Site(folder, layout, machine)


def rank_cores(machine: Machine, layout: Layout) -> list[list[int]] | None:
    """On CPU each rank's own share of the cores; None where ranks need not be kept apart."""
    if machine.devices or layout.accelerate is None:
        return None
    bounds = [len(machine.cores) * rank // layout.local for rank in range(layout.local + 1)]
    return [list(machine.cores[bounds[rank] : bounds[rank + 1]]) for rank in range(layout.local)]
