"""This machine's processor as a device: one core's share of what is measured in a moment, and all of its memory.

What is measured is numpy's: a float32 matrix product and a copy, in seconds of processor time, so that others at work
on the machine disturb it little. How much faster bfloat16 is follows from what the processor says it can do.

Not here: devices by name (`devices`).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ycore.planning.devices import GB, Device

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
