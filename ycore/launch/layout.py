"""The machine of a run with its devices, its training ranks, and the accelerate config that starts them.

Devices are those that NVML lists: whole GPUs, or the slices of one that MIG divides. The device files in /dev are no
such list: WSL2 has none, and a GPU that MIG divides is one file and several devices.
"""

import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pynvml
import yaml
from pydantic import TypeAdapter

from ycore import __version__
from ycore.config.recipe_files import parse_yaml, read_yaml_file
from ycore.config.schema import SHARDS_WEIGHTS, BaseConfig, RunConfig
from ycore.engine.commands import split_evenly
from ycore.errors import ConfigError, nearest
from ycore.plan.devices import (
    GIB,
    bfloat16_factor,
    check_bfloat16,
    check_replicas,
    core_flags,
    format_of,
    usable_cores,
)
from ycore.plan.memory import SHARDINGS, Sharding
from ycore.run.files import RunFolder


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. `id`: what CUDA_VISIBLE_DEVICES takes, the index in the driver's order or the slice's UUID.

    Memory is in GiB, and None where the driver does not say. `capability`: CUDA's compute capability.
    """

    id: str
    uuid: str
    name: str
    driver: str
    memory_gib: float | None = None
    free_gib: float | None = None
    capability: tuple[int, int] | None = None

    @property
    def has_bfloat16(self) -> bool:
        """From compute capability 8.0 on (Ampere)."""
        return self.capability is None or self.capability >= (8, 0)


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the devices that this process may use, in the order of CUDA_VISIBLE_DEVICES or else the driver's."""
    present = tuple(_present_gpus()) if _driver_answers() else ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        # CUDA ends its list at the first name that it does not know. A UUID may be cut short.
        is_uuid = bool(name) and not name.isdigit()
        matches = [
            gpu for gpu in present if name == gpu.id or (is_uuid and gpu.uuid.startswith(name))
        ]
        if len(matches) != 1:
            break
        chosen += matches
    return tuple(chosen)


@cache
def _driver_answers() -> bool:
    """Start NVML, which this process then keeps: a driver that has to wake its devices takes several seconds."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _present_gpus() -> Iterator[Gpu]:
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:  # the device has fallen off the bus
            continue
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        gpu = Gpu(
            id=str(index),
            uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
            name=str(pynvml.nvmlDeviceGetName(handle)),
            driver=driver,
            memory_gib=memory and memory.total / GIB,
            free_gib=memory and memory.free / GIB,
            capability=_ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        )
        slices = [*_slices(handle, gpu)]
        yield from slices or [gpu]


def _slices(handle: Any, gpu: Gpu) -> Iterator[Gpu]:
    """Yield the MIG slices of a device; none where MIG does not divide it."""
    mode = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        part = _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if part is None:  # no slice has this index
            continue
        uuid = str(pynvml.nvmlDeviceGetUUID(part))
        memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, part)
        yield replace(
            gpu,
            id=uuid,
            uuid=uuid,
            name=str(pynvml.nvmlDeviceGetName(part)),
            memory_gib=memory and memory.total / GIB,
            free_gib=None,
        )


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None where this device has none, as a GB10 has no memory of its own."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None


Settings = dict[str, Any]
"""Values by the names of the fields or variables that they are for."""

_SHM = "/dev/shm"
SSH = "ssh -T -oBatchMode=yes -oControlPath=none -oConnectTimeout=10 -oServerAliveInterval=2 -oServerAliveCountMax=2 --"
_TAKE_ZERO3 = "take --accelerate zero3 to shard"
_PINNED_AS_IT_IS = "pinned_max_round_threshold_mb:1"
"""Stops torch from rounding pinned memory up to powers of two: 15 GB of weights would take 29."""
_REPLICATE = "parallelism_config_dp_replicate_size"
_SHARD = "parallelism_config_dp_shard_size"
_MIXED_PRECISION = {"float32": "no", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores that this process may use, the devices that it may see, and their memory, None where not known."""

    cores: tuple[int, ...]
    devices: tuple[str, ...]
    device_bytes: float | None = None  # of the smallest device
    free_bytes: float | None = None  # of the device of which others hold most
    host_bytes: float | None = None
    shm_bytes: float | None = None  # free in /dev/shm
    without_bfloat16: tuple[str, ...] = ()  # devices, in words
    cores_have_bfloat16: bool = True  # instructions for it

    @property
    def parts(self) -> tuple[tuple[int | str, ...], str]:
        """The devices or cores that processes and engines divide, and the word for them."""
        return (self.devices, "devices") if self.devices else (self.cores, "cores")

    @property
    def has_bfloat16(self) -> bool:
        """Whether what a run computes on multiplies bfloat16 as fast as float32 at least."""
        return not self.without_bfloat16 if self.devices else self.cores_have_bfloat16

    @property
    def is_sliced(self) -> bool:
        """Whether the devices are slices of MIG, of which a process sees one alone."""
        return any(device.startswith("MIG-") for device in self.devices)


@dataclass(frozen=True, slots=True)
class Layout:
    """The training ranks. `accelerate`: its config, empty for one rank that is started without its launcher."""

    world: int = 1
    num_machines: int = 1
    machine_rank: int = 0
    accelerate: Mapping[str, Any] = field(default_factory=dict)

    @property
    def local(self) -> int:
        """Ranks on this machine."""
        return self.world // self.num_machines

    @property
    def sharding(self) -> Sharding:
        if self.uses_fsdp:
            return "hsdp" if self.replicas > 1 else "fsdp2"
        stage = (self.accelerate.get("deepspeed_config") or {}).get("zero_stage")
        return next((name for name in SHARDINGS if name == f"zero{stage}"), "ddp")

    @property
    def replicas(self) -> int:
        """Copies of what FSDP shards."""
        sizes = self.accelerate.get("parallelism_config") or {}
        return int(sizes.get(_REPLICATE, 1))

    @property
    def uses_fsdp(self) -> bool:
        return self.accelerate.get("distributed_type") == "FSDP"

    @property
    def uses_deepspeed(self) -> bool:
        return self.accelerate.get("distributed_type") == "DEEPSPEED"

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds the whole policy."""
        return self.sharding in SHARDS_WEIGHTS


ONE_RANK = Layout()


@dataclass(frozen=True, slots=True)
class Site:
    """This machine's part of a run. `folder` is the run's folder on the first machine, `node-N` in it on the others."""

    folder: RunFolder
    layout: Layout
    machine: Machine
    trains: bool = True
    apart: Machine | None = None  # what engines have alone; `machine` is then the rest

    @property
    def engine_machine(self) -> Machine:
        """The devices or cores of engines."""
        return self.apart or self.machine

    @property
    def rank_cores(self) -> list[tuple[int, ...]] | None:
        """On a CPU each rank's share of the cores; None where ranks need not be kept apart."""
        is_kept_apart = self.layout.accelerate or self.apart is not None
        if self.machine.devices or not is_kept_apart:
            return None
        return split_evenly(self.machine.cores, self.layout.local)

    @property
    def trainer_environment(self) -> dict[str, str]:
        """The variables that show each rank its device; a rank that saw all would split its model over them.

        Indices are the driver's, in the order of the bus. A file for accelerate may choose devices itself.
        """
        if not self.machine.devices:
            return {}
        # torch reads the first that is set
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        of_user = [os.environ[name] for name in names if os.environ.get(name)]
        environment = {names[0]: ",".join([*of_user[:1], _PINNED_AS_IT_IS])}
        if self.layout.accelerate.get("gpu_ids", "all") in ("all", None):
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            devices = self.machine.devices[: self.layout.local]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        return environment


_Config = TypeVar("_Config", bound=BaseConfig)


def on_machine(config: _Config, machine: Machine | None = None) -> _Config:
    """Return the config with `dtype` and `processes` in place of `auto`.

    A file for accelerate has its own number of processes.
    """
    changes: Settings = {}
    machine, _ = split_for_engines(config, machine or this_machine())
    if config.dtype == "auto":
        changes["dtype"] = format_of(config.dtype, has_bfloat16=machine.has_bfloat16)
    if config.processes == "auto" and (
        config.accelerate is None or config.accelerate in SHARDINGS
    ):
        trains_on_all = config.algorithm != "eval" and machine.devices and not machine.is_sliced
        changes["processes"] = _num_ranks(config, len(machine.devices)) if trains_on_all else 1
    return config.model_copy(update=changes)


def _num_ranks(config: BaseConfig, num_devices: int) -> int:
    """Return the most ranks, up to the devices, that can have whole groups of a step each."""
    if not isinstance(config, RunConfig):
        return num_devices
    num_machines = place_here().get("num_machines", 1)
    numbers = range(1, num_devices + 1)
    dividing = (
        number for number in numbers if config.prompts_per_step % (number * num_machines) == 0
    )
    return max(dividing, default=1)


def site_of(config: BaseConfig, *, trains: bool = True) -> Site:
    """Return the site of a run on this machine; ConfigError where the ranks lack something. Without training, one rank."""
    machine = this_machine()
    check_bfloat16(config.dtype, machine.without_bfloat16)
    site = planned_site(config, machine, trains=trains)
    check_deepspeed(config, site.layout)
    return site


def planned_site(
    config: BaseConfig, machine: Machine, *, trains: bool = True, place: Settings | None = None
) -> Site:
    """Return the site of a run that is only planned there; `place` as for `layout_of`."""
    layout = layout_of(config, machine, place=place) if trains else ONE_RANK
    if config.accelerate not in (None, *SHARDINGS):
        try:  # a file gets the checks of the sharding that it asks for
            config.model_copy(update={"accelerate": layout.sharding}).check()
        except ConfigError as problem:
            raise ConfigError(f"{config.accelerate}: {problem}") from None
    rest, apart = split_for_engines(config, machine)
    folder = Path(config.output)
    if layout.machine_rank > 0:
        folder /= f"node-{layout.machine_rank}"
    return Site(RunFolder(folder), layout, rest, trains, apart)


def split_for_engines(config: BaseConfig, machine: Machine) -> tuple[Machine, Machine | None]:
    """Return what training has of a machine, and what engines have alone: the last devices, or cores.

    None where they share all of it; ConfigError where nothing is left to train on.
    """
    if not isinstance(config, RunConfig) or config.engine.devices == "shared":
        return machine, None
    parts, kind = machine.parts
    first = len(parts) - config.engine.devices
    if first < 1:
        raise ConfigError(
            f"engine.devices {config.engine.devices} leaves none of the {len(parts)} {kind} here to train on; take "
            f"{len(parts) - 1} or fewer, or leave it out"
        )
    rest: Settings = {kind: parts[:first]}
    apart: Settings = {kind: parts[first:]}
    return replace(machine, **rest), replace(machine, **apart)


def check_ranks_fit(config: BaseConfig, layout: Layout, machine: Machine) -> None:
    """Check that every rank has a device or a core; else ConfigError with the nearest number that works."""
    count = layout.local
    parts, kind = machine.parts
    max_ranks = 1 if machine.is_sliced else len(parts)
    if count <= max_ranks:
        return
    works = _num_ranks(config, max_ranks)
    if config.processes == count:
        option = f"--processes {count}"
        way_out = f"take --processes {works}"
    else:
        option = f"{config.accelerate}: {count} processes here"
        way_out = f"say num_processes: {works} there"
    if machine.is_sliced:
        rule = "needs whole GPUs: these devices are slices of MIG, of which a process sees one"
    else:
        rule = f"is more than the {len(parts)} {kind} of this machine, and every process needs one of its own"
    raise ConfigError(f"{option} {rule}; {way_out}")


def check_deepspeed(config: BaseConfig, layout: Layout) -> None:
    """Raise ConfigError where the ranks need DeepSpeed, and it is not installed."""
    if layout.uses_deepspeed and find_spec("deepspeed") is None:
        way_out = "pip install 'ycore[deepspeed]'"
        raise ConfigError(
            f"--accelerate {config.accelerate}: DeepSpeed is not installed; {way_out}"
        )


def this_machine() -> Machine:
    """Return the cores and devices of this process; no device where torch is a CPU build."""
    gpus = () if _is_cpu_build() else visible_gpus()
    sizes = [gpu.memory_gib * GIB for gpu in gpus if gpu.memory_gib is not None]
    free = [gpu.free_gib * GIB for gpu in gpus if gpu.free_gib is not None]
    return Machine(
        cores=usable_cores(),
        devices=tuple(gpu.id for gpu in gpus),
        device_bytes=min(sizes, default=None),
        free_bytes=min(free, default=None),
        host_bytes=float(psutil.virtual_memory().total),
        shm_bytes=float(shutil.disk_usage(_SHM).free) if os.path.isdir(_SHM) else None,
        without_bfloat16=tuple(
            f"{gpu.id} ({gpu.name})" for gpu in gpus if not gpu.has_bfloat16
        ),
        cores_have_bfloat16=bfloat16_factor(core_flags()) is not None,
    )


def on_host(host: str, *arguments: str) -> list[str]:
    """Return the command that has a host run `launch.engine_watch` with these arguments."""
    module = [sys.executable, "-P", "-m", "ycore.launch.engine_watch"]
    return [*SSH.split(), host, shlex.join([*module, *arguments])]


@cache
def machine_of(host: str) -> Machine:
    """Return another machine by its name for ssh; ConfigError where it cannot run engines."""
    try:
        answer = subprocess.run(
            on_host(host, "machine"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        line = answer.stdout.strip().rpartition("\n")[2]
        version, machine = TypeAdapter(tuple[str, Machine]).validate_json(line)
        if version == __version__:
            return machine
        reason = f"it has ycore {version}"
    except OSError as problem:
        reason = str(problem)
    except ValueError:  # it is no answer
        reason = answer.stderr.strip().rpartition("\n")[2]
    raise ConfigError(
        f"engine.hosts: {host} runs no engine ({reason}); it needs an answer to `ssh {host}` without a question, and "
        f"ycore {__version__} at {sys.executable}"
    )


def _is_cpu_build() -> bool:
    """Read torch's version from its metadata: importing it takes seconds."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return True


def layout_of(config: BaseConfig, machine: Machine, *, place: Settings | None = None) -> Layout:
    """Return the run's ranks, from `processes` and `accelerate`; ConfigError for what cannot work on the machine.

    Args:
        place: accelerate's keys for this machine among several; by default what the environment says.
    """
    config = on_machine(config, machine)
    place = place_here() if place is None else place
    num_machines = place.get("num_machines", 1)
    if config.accelerate is None and config.processes == num_machines == 1:
        return ONE_RANK
    name = next((name for name in SHARDINGS if name == (config.accelerate or "ddp")), None)
    if name is None:
        layout = _layout_from_file(Path(str(config.accelerate)).expanduser(), config)
    else:
        world = int(config.processes) * num_machines
        settings = accelerate_config(
            name,
            processes=world,
            num_machines=num_machines,
            on_cpu=not machine.devices,
            dtype=config.dtype,
        )
        layout = Layout(world, num_machines, place.get("machine_rank", 0), settings | place)
    if layout.uses_fsdp and not machine.devices:
        raise ConfigError(
            f"--accelerate {config.accelerate}: FSDP needs GPUs: on CPU accelerate would shard nothing; {_TAKE_ZERO3}"
        )
    check_ranks_fit(config, layout, split_for_engines(config, machine)[0])
    return layout


def accelerate_config(
    name: Sharding, *, processes: int, on_cpu: bool, dtype: str, num_machines: int
) -> Settings:
    """Return the content of the file for `accelerate launch --config_file`."""
    run_settings: Settings = {
        "mixed_precision": _MIXED_PRECISION[dtype],
        "num_processes": processes,
        "use_cpu": on_cpu,
    }
    if name == "hsdp":
        check_replicas(num_machines, processes)
        run_settings["parallelism_config"] = {
            _REPLICATE: num_machines,
            _SHARD: processes // num_machines,
        }
    return deepcopy(_accelerate_files()[name]) | run_settings


@cache
def _accelerate_files() -> dict[str, Settings]:
    """Read accelerate's settings by the name of the sharding, once: a plan asks for hundreds of layouts."""
    text = Path(__file__).with_name("accelerate.yaml").read_text("utf-8")
    settings: dict[str, Settings] = yaml.safe_load(text)
    return settings


_PLACES = (
    ("NNODES", "NODE_RANK"),
    ("PET_NNODES", "PET_NODE_RANK"),
    ("WORLD_SIZE", "RANK"),
    ("SLURM_STEP_NUM_NODES", "SLURM_NODEID"),
)
"""Variables of the number of machines, and of which this is: by hand, torchrun's, Kubernetes', Slurm's in a step."""


MEETING_SECRET = "YCORE_MEETING_SECRET"
"""The variable of what the machines of a run know, and a stranger at their port does not."""
WAITS = "waits for all others"
"""A machine prints these words when it has lost another; `--hosts` then starts that one again."""


def place_here() -> Settings:
    """Return accelerate's keys for this machine among several, as the environment says them; {} where it is alone."""
    variables = os.environ
    if "LOCAL_RANK" in variables:  # a rank of torchrun's
        return {}
    for count, rank in _PLACES:
        num_machines = _whole_number(count)
        address = variables.get("MASTER_ADDR") or variables.get("PET_MASTER_ADDR")
        if address is None and count.startswith("SLURM") and num_machines > 1:
            address = _first_of_slurm()
        if num_machines > 1 and address and rank in variables:
            return {
                "num_machines": num_machines,
                "machine_rank": _whole_number(rank),
                "main_process_ip": address,
                "main_process_port": _whole_number(
                    "MASTER_PORT", "PET_MASTER_PORT", default="29500"
                ),
            }
    return {}


def _whole_number(*variables: str, default: str = "1") -> int:
    """Return the first that is set."""
    text = next((os.environ[name] for name in variables if os.environ.get(name)), default)
    if not text.isdecimal():
        raise ConfigError(
            f"the environment's {' or '.join(variables)} must be a whole number; it is {text!r}; correct or unset it"
        )
    return int(text)


def _first_of_slurm() -> str:
    if os.environ.get("SLURM_STEP_NUM_TASKS") != os.environ["SLURM_STEP_NUM_NODES"]:
        raise ConfigError(
            "ycore runs once on each machine of a Slurm job; say srun --ntasks-per-node=1"
        )
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise ConfigError(
            f"`{' '.join(command)}` does not say where the machines meet ({problem}); set MASTER_ADDR"
        ) from None
    return answer.stdout.split()[0]


def sharding_named(accelerate: str) -> Sharding:
    """Return the sharding of `--accelerate`, a name or a file; ConfigError for a file that is none of accelerate's."""
    if accelerate in SHARDINGS:
        return accelerate
    return Layout(accelerate=_read_accelerate_file(Path(accelerate).expanduser())).sharding


def _layout_from_file(path: Path, config: BaseConfig) -> Layout:
    if not path.is_file():
        raise ConfigError(
            f"--accelerate takes {', '.join(SHARDINGS)} or an accelerate config file; there is no file {str(path)!r}"
            + nearest(str(path), SHARDINGS, limit=1)
        )
    settings = _read_accelerate_file(path)
    world = _number(settings, "num_processes", path, least=1)
    machines = _number(settings, "num_machines", path, least=1)
    rank = _number(settings, "machine_rank", path, least=0)
    if world % machines or rank >= machines:
        raise ConfigError(
            f"{path}: num_processes must be a multiple of num_machines, and machine_rank below it; "
            f"they are {world}, {machines} and {rank}"
        )
    wanted = _MIXED_PRECISION[config.dtype]
    precision = settings.get("mixed_precision", wanted)
    if precision is False:  # YAML reads a bare `no` so
        precision = "no"
    if precision != wanted:
        raise ConfigError(
            f"{path}: mixed_precision is {precision!r}, and the run computes in {config.dtype}; say {wanted!r} there, "
            f"or --set dtype={'bfloat16' if precision == 'bf16' else 'float32'}"
        )
    if machines > 1:
        _check_machines_meet(settings, path)
    layout = Layout(world, machines, rank, {**settings, "mixed_precision": wanted})
    sizes = settings.get("parallelism_config") or {}
    if layout.replicas > 1 and sizes.get(_SHARD) != world / layout.replicas:
        raise ConfigError(
            f"{path}: {_REPLICATE} times {_SHARD} must be num_processes, {world}; "
            f"they are {layout.replicas} and {sizes.get(_SHARD, 1)}"
        )
    for name, value in {**settings, **sizes}.items():
        if name.endswith(("cp_size", "sp_size", "tp_size")) and value != 1:
            rule = "every rank trains on prompts of its own, with whole layers and sequences"
            raise ConfigError(
                f"{path}: {name} is {value}, and {rule}; say 1, and {_TAKE_ZERO3}"
            )
    if config.processes not in ("auto", world // machines):
        raise ConfigError(
            f"--processes {config.processes} is not what {path} says: {world} processes on {machines} "
            f"machine{'s' if machines > 1 else ''}; leave --processes out"
        )
    return layout


def _read_accelerate_file(path: Path) -> Settings:
    """Read the file's mapping; the environment's place comes before the file's, so that one file serves all machines."""
    way_out = "`accelerate config` writes one"
    text = read_yaml_file(path, what="accelerate", way_out=way_out)
    settings = parse_yaml(text, what=str(path), example="distributed_type")
    if "distributed_type" not in settings:
        raise ConfigError(
            f"{path} is no accelerate config: it has no distributed_type; {way_out}"
        )
    fsdp = settings.get("fsdp_config") or {}
    if settings["distributed_type"] == "FSDP" and fsdp.get("fsdp_version") != 2:
        raise ConfigError(
            f"{path}: ycore knows FSDP of version 2; say fsdp_version: 2 under fsdp_config"
        )
    file = (settings.get("deepspeed_config") or {}).get("deepspeed_config_file")
    if file not in (None, "none"):
        raise ConfigError(
            f"{path}: deepspeed_config_file is {file!r}, and ycore sets DeepSpeed's batch and precision itself; leave it "
            "out, and say zero_stage and the like under deepspeed_config"
        )
    return settings | place_here()


def _check_machines_meet(settings: Settings, path: Path) -> None:
    if not (settings.get("main_process_ip") and settings.get("main_process_port")):
        raise ConfigError(
            f"{path}: several machines meet at main_process_ip and main_process_port; say both there"
        )
    if settings["distributed_type"] == "DEEPSPEED":
        launcher = (settings.get("deepspeed_config") or {}).get("deepspeed_multinode_launcher")
        if launcher != "standard":
            raise ConfigError(
                f"{path}: deepspeed_config.deepspeed_multinode_launcher must be 'standard', as every machine runs "
                f"this same command; it is {launcher!r}"
            )


def _number(settings: Settings, key: str, path: Path, *, least: int) -> int:
    value = settings.get(key, least)
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{path}: {key} is a whole number, {least} or more; it is {value!r}")
    return value
