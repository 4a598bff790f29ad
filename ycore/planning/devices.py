"""Named devices: memory, arithmetic and bandwidth, each with its source; and what `--devices 8x80GB` means.

Figures are the makers' for dense bfloat16, from the data sheets named. What a program reaches of them is in `timing`.

Not here: this machine's processor, whose figures are measured (`machine`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

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
