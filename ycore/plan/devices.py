"""The devices of a plan: known ones from devices.json, and one core of this machine, measured.

The figures of devices.json are the makers' for dense bfloat16, each with its source. The share of them that software
reaches is in `timing`.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from time import process_time
from timeit import repeat
from typing import Literal

import psutil

from ycore.errors import ConfigError, nearest

GIB = 2**30
GB = 10**9


@dataclass(frozen=True)
class Device:
    """One device, or one core of a CPU."""

    name: str
    memory_bytes: float
    flops: float  # operations a second in `format`
    bandwidth: float  # bytes a second from its memory
    link: float  # bytes a second to the other devices of its machine, one way
    source: str
    on_cpu: bool = False
    has_bfloat16: bool = True
    format: str = "bfloat16"
    network: float = 1e15  # bytes a second of a machine to the others; by default no limit

    @property
    def in_words(self) -> str:
        if not self.on_cpu:
            return self.source
        return f"{self.flops / GB:.0f} GFLOP/s in {self.format} and {self.bandwidth / GB:.1f} GB/s a core, {self.source}"


@dataclass(frozen=True)
class Fleet:
    """`count` devices, equally many on each of the machines."""

    device: Device
    count: int
    machines: int = 1


DEVICES = {
    row["name"].lower(): Device(
        row["name"],
        memory_bytes=row["memory_gb"] * GB,
        flops=row["bfloat16_tflops"] * 1e12,
        bandwidth=row["bandwidth_tb_s"] * 1e12,
        link=row["link_gb_s"] * GB,
        source=row["source"],
        has_bfloat16=row.get("has_bfloat16", True),
    )
    for row in json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
}


def check_bfloat16(dtype: str, without: Sequence[str]) -> None:
    """Raise ConfigError for a run that is told to compute in bfloat16 on devices that have none, which `without` names."""
    if without and dtype == "bfloat16":
        raise ConfigError(
            f"the run computes in bfloat16, and device {', '.join(without)} has none; train with --set dtype=float32"
        )


def check_replicas(num_machines: int, ranks: int) -> None:
    """Raise ConfigError where `hsdp` has nothing to replicate, or nothing to shard."""
    if not 1 < num_machines < ranks:
        raise ConfigError(
            "--accelerate hsdp shards within machines and replicates between them: it needs two machines of two "
            f"ranks or more; here are {num_machines} with {ranks} ranks; take --accelerate fsdp2"
        )


def device_called(driver_name: str) -> Device | None:
    """Find a device by the name that its driver gives, e.g. `NVIDIA A100-SXM4-40GB`; None for an unknown one."""
    words = set(re.split(r"[^a-z0-9]+", driver_name.lower()))
    known = [device for name, device in DEVICES.items() if set(name.split("-")) <= words]
    return max(known, key=lambda device: len(device.name), default=None)


_COMMON = ("t4", "a10", "a100-40gb", "l40s", "a100", "h20", "h200")
"""Devices of which the nearest in size is taken, where only the size is given."""

_PATTERN = re.compile(
    r"^(?:(\d+)\s*[xX*]\s*(?=\d+\s*[xX*]))?(?:(\d+)\s*[xX*]\s*)?([\w.-]+)(?:,\s*(\d+)\s*Gb)?$"
)
_NETWORK_GBIT = 100  # a second, of a machine's network where it is not said
_MEMORY = re.compile(r"^(\d+(?:\.\d+)?)\s*(gb|gib|g)$", re.IGNORECASE)


def parse_devices(text: str, *, core: Callable[[], Device], num_cores: int) -> Fleet:
    """Parse `8x80GB`, `4x8xH100,400Gb`, `cpu` (every core of this machine) or `2xcpu`; ConfigError for other texts.

    The first of two numbers counts machines; the network between them is in gigabits a second.

    Args:
        core: Measures a core, where the devices are cores.
    """
    match = _PATTERN.match(text.strip())
    kind = match[3].lower() if match else ""
    memory = _MEMORY.match(kind)
    if match is None or not (kind == "cpu" or memory or kind in DEVICES):
        names = ", ".join(device.name for device in DEVICES.values())
        raise ConfigError(
            f"--devices takes a number and a size or a name, e.g. 8x80GB, 4xH100, 2x8xH100,400Gb (2 machines), cpu; "
            f"it is {text!r}"
            + (nearest(text.lower().rpartition("x")[2], DEVICES) or f"; names: {names}")
        )
    count = int(match[2] or (num_cores if kind == "cpu" else 1))
    machines = int(match[1] or 1)
    if count * machines == 0:
        raise ConfigError(
            f"--devices {text}: a plan needs one device or more; e.g. --devices 1x80GB"
        )
    if kind != "cpu":
        device = _of_memory(float(memory[1])) if memory else DEVICES[kind]
        if machines > 1:
            device = replace(device, network=int(match[4] or _NETWORK_GBIT) * GB / 8)
        return Fleet(device, count * machines, machines)
    if machines > 1:
        raise ConfigError(
            f"--devices {text}: cores of several machines are not planned; e.g. 2xcpu"
        )
    if count > num_cores:
        raise ConfigError(
            f"--devices {text}: this machine has {num_cores} cores; e.g. --devices {num_cores}xcpu"
        )
    return Fleet(core(), count)


def _of_memory(gigabytes: float) -> Device:
    size = gigabytes * GB
    nearest_device = min(
        (DEVICES[name] for name in _COMMON), key=lambda device: abs(device.memory_bytes - size)
    )
    return replace(
        nearest_device,
        name=f"{gigabytes:g} GB device",
        memory_bytes=size,
        source=f"speed taken as {nearest_device.name}'s, since only the size was given ({nearest_device.source})",
        has_bfloat16=True,
    )


_SIZE = 512
_COPY_BYTES = 32 * 2**20
_REPEATS = 3
_FASTER = (
    ("amx_bf16", 6.0),
    ("avx512_bf16", 8.0),
    ("bf16", 2.0),
)
"""By processor flag, how many times as fast torch multiplies in bfloat16 as numpy does in float32.

Measured with AVX-512: 420 against 52 GFLOP/s a core; with AMX, in products of 512 rows of small models: 590 and 720
against 116. ARM's bf16 (the last) is assumed to be twice float32. A CPU with none of the flags multiplies bfloat16 at
an eighth of float32's rate (measured with AVX2: 17 against 130 GFLOP/s on two cores), so by default a run on one
computes in float32.
"""
_WITHOUT = 1 / 8


def measured_core(dtype: str = "auto") -> Device:
    """Measure one core of this machine as a run in `dtype` uses it, with all memory, in a tenth of a second."""
    flops, bandwidth = _measure()
    factor = bfloat16_factor(core_flags())
    computes_in = format_of(dtype, has_bfloat16=factor is not None)
    return Device(
        name="core",
        memory_bytes=float(psutil.virtual_memory().total),
        flops=flops * ((factor or _WITHOUT) if computes_in == "bfloat16" else 1.0),
        bandwidth=bandwidth,
        link=bandwidth / 2,
        source="measured here, now, by numpy",
        on_cpu=True,
        has_bfloat16=factor is not None,
        format=computes_in,
    )


def core_flags() -> set[str]:
    """Return the flags of the first core in /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(
        next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    )


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))


def bfloat16_factor(flags: set[str]) -> float | None:
    """Return how much faster than float32 bfloat16 is; None where the processor has no instructions for it."""
    return next((factor for flag, factor in _FASTER if flag in flags), None)


def format_of(dtype: str, *, has_bfloat16: bool) -> Literal["float32", "bfloat16"]:
    """Return what a run computes in: `auto` is bfloat16 where the device multiplies it, else float32."""
    return (
        "bfloat16" if dtype == "bfloat16" or (dtype == "auto" and has_bfloat16) else "float32"
    )


def format_on(device: Device, dtype: str) -> Literal["float32", "bfloat16"]:
    """`format_of` on the device; ConfigError where a GPU that has no bfloat16 is told to compute in it."""
    check_bfloat16(dtype, () if device.has_bfloat16 or device.on_cpu else (device.name,))
    return format_of(dtype, has_bfloat16=device.has_bfloat16)


@cache
def _measure() -> tuple[float, float]:
    """Measure operations and bytes a second of one core, the best of a few tries."""
    import numpy as np

    left = np.full((_SIZE, _SIZE), 0.5, dtype=np.float32)
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    product_s, copy_s = [
        # Processor seconds of all threads together.
        max(1e-9, min(repeat(work, timer=process_time, repeat=_REPEATS, number=1)))
        for work in (lambda: left @ left, lambda: np.copyto(target, source))
    ]
    return 2.0 * _SIZE**3 / product_s, 2.0 * _COPY_BYTES / copy_s
