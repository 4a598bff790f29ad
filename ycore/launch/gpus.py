"""The NVIDIA devices of this machine, as NVML lists them: whole GPUs, or the slices of one that MIG divides.

The device files in /dev are no such list: WSL2 has none, and a GPU that MIG divides is one file and several devices.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pynvml

GIB = 2**30


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


def visible_gpus(environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Return the devices that this process may use, in the order of CUDA_VISIBLE_DEVICES or else the driver's."""
    present = tuple(_present_gpus()) if _driver_answers() else ()
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen: list[Gpu] = []
    for name in (part.strip() for part in visible.split(",")):
        # CUDA ends its list at the first name that it does not know. A UUID may be cut short.
        matches = [gpu for gpu in present if name == gpu.id or _begins_uuid(gpu, name)]
        if len(matches) != 1:
            break
        chosen += matches
    return tuple(chosen)


def _begins_uuid(gpu: Gpu, name: str) -> bool:
    return bool(name) and not name.isdigit() and gpu.uuid.startswith(name)


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
            memory_gib=None if memory is None else memory.total / GIB,
            free_gib=None if memory is None else memory.free / GIB,
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
        yield Gpu(
            id=uuid,
            uuid=uuid,
            name=str(pynvml.nvmlDeviceGetName(part)),
            driver=gpu.driver,
            memory_gib=None if memory is None else memory.total / GIB,
            capability=gpu.capability,
        )


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None where this device has none, as a GB10 has no memory of its own."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
