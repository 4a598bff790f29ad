"""A description of the machine on which figures are measured."""

import os
import platform
from pathlib import Path
from typing import Any

import psutil

from ycore.run.claim import installed_versions

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def describe_machine() -> dict[str, Any]:
    """Cores, processor, memory and versions; no names."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": fields.get("model name", platform.processor()),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "versions": {name: version for name, version in installed_versions().items() if version is not None},
    }


def busy_share() -> float:
    """How much of the processor others use, over the next second: 0 for nothing, 1 for all of it."""
    percent: float = psutil.cpu_percent(interval=1.0)
    return percent / 100
