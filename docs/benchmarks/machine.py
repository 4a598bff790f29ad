"""A description of the machine on which figures are measured."""

import platform
import re
from pathlib import Path
from typing import Any

import psutil

from ycore.launch.layout import this_machine, visible_gpus
from ycore.plan.devices import core_flags
from ycore.run.claim import installed_versions

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
"""Instructions on which speed and sums of floats depend; the last two are ARM's."""


def hardware() -> dict[str, Any]:
    """Describe what figures depend on, as JSON values: processor, cores, memory, devices; no names of hosts."""
    machine = this_machine()
    flags = core_flags()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    model_name = re.search(r"^model name\s*:\s*(.*)", text, re.MULTILINE)
    description: dict[str, Any] = {
        "cores": len(machine.cores),
        "processor": model_name[1] if model_name else platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "memory_gib": round((machine.host_bytes or 0) / 2**30, 1),
    }
    if machine.devices:
        description["devices"] = [gpu.name for gpu in visible_gpus()]
    return description


def describe_machine() -> dict[str, Any]:
    """Describe the machine as a recipe's band does, and the versions."""
    versions = {
        name: version for name, version in installed_versions().items() if version is not None
    }
    return hardware() | {"versions": versions}


def busy_share() -> float:
    """Measure how much of the processor others use, over the next second: 0 for nothing, 1 for all of it."""
    percent: float = psutil.cpu_percent(interval=1.0)
    return percent / 100
