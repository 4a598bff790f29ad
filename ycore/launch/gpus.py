"""The NVIDIA devices of this machine, as its driver lists them: whole GPUs, or the slices of one that MIG divides.

The device files in /dev are no such list: WSL2 has none, and a GPU that MIG divides is one file and several devices.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

_WSL = "/usr/lib/wsl/lib/nvidia-smi"  # not on every shell's PATH
_WITHIN_S = 30.0  # a driver that has to wake its devices takes several seconds
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "compute_cap", "driver_version")
_GPU = re.compile(r"^GPU (\d+): ")
_SLICE = re.compile(r"^\s+MIG (\S+)\s+Device\s+\d+: \(UUID: (MIG-[^)]+)\)")

Ask = Callable[[tuple[str, ...]], str]
"""The answer of nvidia-smi to these arguments; empty where there is no driver."""


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


@cache
def ask_driver(arguments: tuple[str, ...]) -> str:
    command = shutil.which("nvidia-smi") or (_WSL if os.path.exists(_WSL) else None)
    if command is None:
        return ""
    with suppress(subprocess.SubprocessError, OSError):
        return subprocess.run(
            [command, *arguments], capture_output=True, text=True, timeout=_WITHIN_S, check=True
        ).stdout
    return ""


def visible_gpus(
    environment: Mapping[str, str] | None = None, *, ask: Ask = ask_driver
) -> tuple[Gpu, ...]:
    """The devices that this process may use, in the order of CUDA_VISIBLE_DEVICES or else the driver's."""
    present = _present_gpus(ask)
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        # CUDA ends its list at the first name that it does not know. A UUID may be cut short.
        found = [
            gpu
            for gpu in present
            if name == gpu.id or (not name.isdigit() and name and gpu.uuid.startswith(name))
        ]
        if len(found) != 1:
            break
        chosen += found
    return tuple(chosen)


def _present_gpus(ask: Ask) -> tuple[Gpu, ...]:
    rows = [
        line.split(", ")
        for line in ask(
            (f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
        ).splitlines()
    ]
    whole = [_gpu(row) for row in rows if len(row) == len(_FIELDS)]
    slices = _slices(ask(("-L",))) if whole else {}
    found: list[Gpu] = []
    for gpu in whole:
        parts = slices.get(gpu.id, [])
        found += [_slice_of(gpu, profile, uuid) for profile, uuid in parts] or [gpu]
    return tuple(found)


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, total, free, capability, driver = (value.strip() for value in row)
    major, _, minor = capability.partition(".")
    known = major.isdigit() and minor.isdigit()
    return Gpu(
        index,
        uuid,
        name,
        driver,
        _gib(total),
        _gib(free),
        (int(major), int(minor)) if known else None,
    )


def _gib(mebibytes: str) -> float | None:
    return int(mebibytes) / 1024 if mebibytes.isdigit() else None


def _slices(listing: str) -> dict[str, list[tuple[str, str]]]:
    """By a GPU's index: profile and UUID of each slice, from the output of `nvidia-smi -L`."""
    found: dict[str, list[tuple[str, str]]] = {}
    index = ""
    for line in listing.splitlines():
        if match := _GPU.match(line):
            index = match[1]
        elif match := _SLICE.match(line):
            found.setdefault(index, []).append((match[1], match[2]))
    return found


def _slice_of(gpu: Gpu, profile: str, uuid: str) -> Gpu:
    """A slice named like `1g.10gb` has 10 GB."""
    memory = re.search(r"\.(\d+)gb", profile)
    gib = int(memory[1]) * 1e9 / 2**30 if memory else None
    return Gpu(uuid, uuid, f"{gpu.name} MIG {profile}", gpu.driver, gib, None, gpu.capability)
