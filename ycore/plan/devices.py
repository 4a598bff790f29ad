"""Named devices: memory, arithmetic and bandwidth, each with its source; and what `--devices 8x80GB` means.

Figures are the makers' for dense bfloat16, from the data sheets named. What a program reaches of them is in `timing`.

This machine's processor as a device: one core's share of what is measured in a moment, and all of its memory.

Not here: this machine's processor, whose figures are measured (`machine`).
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ycore.errors import ConfigError, nearest

GIB = 2**30
GB = 10**9


@dataclass(frozen=True, slots=True)
class Device:
    """`memory_bytes`, `flops` a second in bfloat16, bytes a second from its memory, and over its link to the others."""

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float
    link: float
    source: str
    on_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Fleet:
    """The devices of one machine, all alike."""

    device: Device
    count: int

    @property
    def in_words(self) -> str:
        return f"{self.count} x {self.device.name}"


def _device(name: str, gigabytes: float, teraflops: float, terabytes: float, link: float, source: str) -> Device:
    return Device(name, gigabytes * GB, teraflops * 1e12, terabytes * 1e12, link * GB, source)


DEVICES: Mapping[str, Device] = {
    device.name.lower(): device
    for device in (
        _device("T4", 16, 65, 0.32, 16, "NVIDIA T4 data sheet, float16: it has no bfloat16 of its own"),
        _device("L4", 24, 121, 0.30, 32, "NVIDIA L4 data sheet"),
        _device("A10", 24, 125, 0.60, 32, "NVIDIA A10 data sheet"),
        _device("4090", 24, 165, 1.008, 32, "NVIDIA Ada architecture white paper, table 2"),
        _device("L40S", 48, 362, 0.864, 32, "NVIDIA L40S data sheet"),
        _device("A100-40GB", 40, 312, 1.555, 300, "NVIDIA A100 data sheet"),
        _device("A100", 80, 312, 2.039, 300, "NVIDIA A100 data sheet"),
        _device("H20", 96, 148, 4.0, 450, "published H20 specifications"),
        _device("H800", 80, 989, 3.35, 200, "as H100, with a link of 400 GB/s both ways"),
        _device("H100", 80, 989, 3.35, 450, "NVIDIA H100 data sheet, SXM"),
        _device("H200", 141, 989, 4.8, 450, "NVIDIA H200 data sheet, SXM"),
        _device("B200", 180, 2250, 7.7, 900, "NVIDIA DGX B200 data sheet, an eighth of the machine"),
    )
}

# A device of which only the memory is told gets the figures of a common one that has about as much.
_BY_MEMORY = ((16, "t4"), (24, "a10"), (40, "a100-40gb"), (48, "l40s"), (80, "a100"), (96, "h20"), (141, "h200"))

_PATTERN = re.compile(r"^(?:(\d+)\s*[xX*]\s*)?([\w.-]+)$")
_MEMORY = re.compile(r"^(\d+(?:\.\d+)?)\s*(gb|gib|g)$", re.IGNORECASE)


def parse_devices(text: str, *, processor: Device, num_cores: int) -> Fleet:
    """`8x80GB`, `4xH100`, `cpu` (every core here) or `2xcpu`; ConfigError for anything else.

    Args:
        processor: one core of this machine, for `cpu`.
        num_cores: how many of them there are.
    """
    match = _PATTERN.match(text.strip())
    if match is None:
        raise _unknown(text)
    count, kind = (None if match[1] is None else int(match[1])), match[2].lower()
    if count == 0:
        raise ConfigError(f"--devices {text}: a plan needs one device or more; e.g. --devices 1x80GB")
    if kind == "cpu":
        asked = count or num_cores
        if asked > num_cores:
            raise ConfigError(f"--devices {text}: this machine has {num_cores} cores; e.g. --devices {num_cores}xcpu")
        return Fleet(processor, asked)
    memory = _MEMORY.match(kind)
    if memory is not None:
        return Fleet(_of_memory(float(memory[1])), count or 1)
    if kind not in DEVICES:
        raise _unknown(text)
    return Fleet(DEVICES[kind], count or 1)


def _of_memory(gigabytes: float) -> Device:
    _, alike = min(_BY_MEMORY, key=lambda known: abs(known[0] - gigabytes))
    device = DEVICES[alike]
    source = f"speed taken as {device.name}'s, since only the memory was told ({device.source})"
    return replace(device, name=f"{gigabytes:g} GB device", memory_bytes=gigabytes * GB, source=source)


def _unknown(text: str) -> ConfigError:
    kind = text.lower().rpartition("x")[2]
    listed = ", ".join(device.name for device in DEVICES.values())
    return ConfigError(
        f"--devices takes a number and a size or a name, e.g. 8x80GB, 4xH100, cpu; it is {text!r}"
        + (nearest(kind, DEVICES) or f"; names: {listed}")
    )


_SIZE = 1024
_COPY_BYTES = 64 * 2**20
_REPEATS = 3
_FASTER: tuple[tuple[str, float], ...] = (("amx_bf16", 16.0), ("avx512_bf16", 8.0))
"""Torch's products of bfloat16 numbers over numpy's of float32 in the same time, by what the processor has.

As seen with AVX-512: 420 against 52 GFLOP/s a core; twice that for AMX, which nobody measured here.
"""

_OTHERWISE = 1.0


def processor() -> Device:
    """One core of this machine; takes about half a second."""
    flops, bandwidth = _measure()
    return Device(
        name="core",
        memory_bytes=float(psutil.virtual_memory().total),
        flops=flops * bfloat16_factor(_flags()),
        bandwidth=bandwidth,
        link=bandwidth / 2,
        source="measured here, now, by numpy",
        on_cpu=True,
    )


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def bfloat16_factor(flags: set[str]) -> float:
    """How many times as fast as numpy in float32 torch multiplies bfloat16 numbers, from the processor's flags."""
    return next((factor for flag, factor in _FASTER if flag in flags), _OTHERWISE)


def in_words(device: Device) -> str:
    return f"{device.flops / GB:.0f} GFLOP/s in bfloat16 and {device.bandwidth / GB:.1f} GB/s a core, {device.source}"


def _measure() -> tuple[float, float]:
    """Operations and bytes a second of one core, the best of a few."""
    import numpy as np

    left = np.full((_SIZE, _SIZE), 0.5, dtype=np.float32)
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    products = [_timed(lambda: left @ left) for _ in range(_REPEATS)]
    copies = [_timed(lambda: np.copyto(target, source)) for _ in range(_REPEATS)]
    return 2.0 * _SIZE**3 / min(products), 2.0 * _COPY_BYTES / min(copies)


def _timed(work: Callable[[], object]) -> float:
    """Processor seconds of all threads together."""
    began = time.process_time()
    work()
    return max(1e-9, time.process_time() - began)


def _flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    line = next((line for line in lines if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())
