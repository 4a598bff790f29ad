"""The driver's list of devices as NVML gives it: whole GPUs, slices, none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ycore.launch import layout as module
from ycore.launch.layout import visible_gpus

MIB = 2**20


@dataclass(frozen=True)
class Device:
    """A device as NVML would describe it; a None is a question that it cannot answer."""

    uuid: str
    name: str
    total_mib: int | None = None
    free_mib: int = 0
    capability: tuple[int, int] = (9, 0)
    slices: tuple["Device | None", ...] = ()


EIGHT = [
    Device(f"GPU-0000000{n}-aaaa", "NVIDIA H100 80GB HBM3", 81559, 81000) for n in range(8)
]
T4 = Device("GPU-11111111-bbbb", "Tesla T4", 15360, 14900, (7, 5))
DIVIDED = Device(
    "GPU-22222222-cccc", "NVIDIA A100-SXM4-80GB", 81920, 81000, (8, 0),
    slices=(
        Device("MIG-33333333-dddd", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40320, 40000),
        None,
        Device("MIG-44444444-eeee", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728, 9700),
    ),
)  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, devices: Sequence[Device]) -> None:
    """Answer NVML's questions for these devices."""

    def memory(device: Device) -> Any:
        if device.total_mib is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(total=device.total_mib * MIB, free=device.free_mib * MIB)

    def mig_mode(device: Device) -> tuple[int, int]:
        if not device.slices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE

    def part(device: Device, index: int) -> Device:
        part_device = device.slices[index]
        if part_device is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return part_device

    answers = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.82.07",
        "nvmlDeviceGetCount": lambda: len(devices),
        "nvmlDeviceGetHandleByIndex": lambda index: devices[index],
        "nvmlDeviceGetUUID": lambda device: device.uuid,
        "nvmlDeviceGetName": lambda device: device.name,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlDeviceGetCudaComputeCapability": lambda device: device.capability,
        "nvmlDeviceGetMigMode": mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda device: len(device.slices),
        "nvmlDeviceGetMigDeviceHandleByIndex": part,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


@pytest.fixture(autouse=True)
def _forget_the_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    module._driver_answers.cache_clear()
    yield
    module._driver_answers.cache_clear()


def ids(visible: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return [gpu.id for gpu in visible_gpus()]


def test_every_gpu_of_the_driver_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EIGHT)
    gpus = visible_gpus()
    assert [gpu.id for gpu in gpus] == [str(n) for n in range(8)]
    assert gpus[0].name == "NVIDIA H100 80GB HBM3" and gpus[0].capability == (9, 0)
    assert gpus[0].driver == "580.82.07"
    assert gpus[0].memory_gib == pytest.approx(79.6, abs=0.1)
    assert gpus[0].free_gib == pytest.approx(79.1, abs=0.1)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("2,0", ["2", "0"]),
        ("-1", []),
        ("1,-1,2", ["1"]),
        ("7,8", ["7"]),
        ("GPU-00000003-aaaa, GPU-00000001", ["3", "1"]),
        ("GPU-0000", []),
        ("NoDevFiles", []),
    ],
)
def test_the_environment_chooses_among_them(
    visible: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, EIGHT)
    assert ids(visible) == expected


def test_the_slices_of_a_divided_gpu_are_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [DIVIDED])
    gpus = visible_gpus()
    assert [gpu.id for gpu in gpus] == ["MIG-33333333-dddd", "MIG-44444444-eeee"]
    assert [round(gpu.memory_gib or 0) for gpu in gpus] == [39, 10]
    assert [gpu.capability for gpu in gpus] == [(8, 0), (8, 0)]
    assert ids("MIG-44444444-eeee") == ["MIG-44444444-eeee"]


def test_no_driver_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert visible_gpus() == ()


def test_a_device_that_is_lost_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EIGHT[:2])

    def handle(index: int) -> Device:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return EIGHT[index]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert [gpu.id for gpu in visible_gpus()] == ["1"]


def test_free_memory_is_that_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [T4])
    (before,) = visible_gpus()
    install(monkeypatch, [Device(T4.uuid, T4.name, 15360, 1024, (7, 5))])
    (after,) = visible_gpus()
    assert before.free_gib != after.free_gib == 1.0


def test_older_devices_have_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, [T4, EIGHT[0]])
    old, new = visible_gpus()
    assert not old.has_bfloat16 and new.has_bfloat16


def test_values_that_the_driver_does_not_give_are_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, [Device("GPU-5", "NVIDIA GB10", capability=(12, 1))])
    (unified,) = visible_gpus()
    assert unified.memory_gib is None and unified.free_gib is None
    assert unified.capability == (12, 1)
