"""`--devices` names devices, and the core of this machine is one of them."""

from dataclasses import replace

import pytest

from ycore.errors import ConfigError
from ycore.plan import devices
from ycore.plan.devices import (
    DEVICES,
    GB,
    GIB,
    Device,
    Fleet,
    bfloat16_factor,
    format_on,
    measured_core,
    parse_devices,
)

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)


@pytest.mark.parametrize(
    ("text", "count", "name", "gigabytes"),
    [
        ("8x80GB", 8, "80 GB device", 80),
        ("4xH100", 4, "H100", 80),
        ("h200", 1, "H200", 141),
        ("2 x 24gb", 2, "24 GB device", 24),
    ],
)
def test_devices_are_a_number_and_a_size_or_name(
    text: str, count: int, name: str, gigabytes: float
) -> None:
    fleet = parse_devices(text, core=lambda: CORE, num_cores=2)
    assert (fleet.count, fleet.device.name, fleet.device.memory_bytes) == (
        count,
        name,
        gigabytes * GB,
    )
    assert fleet.device.source


def test_the_machine_here_is_a_fleet_of_cores() -> None:
    assert parse_devices("cpu", core=lambda: CORE, num_cores=2) == Fleet(CORE, 2)
    assert parse_devices("1xcpu", core=lambda: CORE, num_cores=2) == Fleet(CORE, 1)


@pytest.mark.parametrize("text", ["3xcpu", "0x80GB", "8xh1000", "many", "", "8x"])
def test_other_devices_are_refused_with_a_way_out(text: str) -> None:
    with pytest.raises(ConfigError, match=r"e\.g\.|did you mean"):
        parse_devices(text, core=lambda: CORE, num_cores=2)


def test_this_processor_is_measured() -> None:
    core = measured_core()
    assert (
        core.flops > 1e9 and core.bandwidth > 1e8 and core.memory_bytes > 2**30 and core.on_cpu
    )


def test_a_processors_bfloat16_follows_from_its_flags() -> None:
    assert (
        bfloat16_factor({"amx_bf16", "avx512_bf16"}) == 6
        and bfloat16_factor({"avx512_bf16"}) == 8
    )
    assert (
        bfloat16_factor({"avx512f", "avx2"}) is None and bfloat16_factor({"asimd", "bf16"}) == 2
    )


def test_a_core_is_as_fast_as_it_is_in_the_runs_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_measure", lambda: (1e11, 1e10))

    def speed(flags: set[str], dtype: str) -> tuple[float, str]:
        monkeypatch.setattr(devices, "core_flags", lambda: flags)
        core = measured_core(dtype)
        return core.flops, core.format

    assert (
        speed({"avx512_bf16"}, "auto")
        == speed({"avx512_bf16"}, "bfloat16")
        == (8e11, "bfloat16")
    )
    assert speed({"avx512_bf16"}, "float32") == speed({"avx2"}, "auto") == (1e11, "float32")
    assert speed({"avx2"}, "bfloat16") == (1e11 / 8, "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "computes_in"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("bfloat16", False, "bfloat16"),
        ("float32", True, "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_cores_multiply_it(
    dtype: str, has_bfloat16: bool, computes_in: str
) -> None:
    core = Device("core", 2**30, 1e9, 1e9, 1e9, "told", on_cpu=True, has_bfloat16=has_bfloat16)
    assert format_on(core, dtype) == computes_in


def test_devices_of_several_machines_are_as_far_apart_as_their_network() -> None:
    def fleet(text: str) -> Fleet:
        return parse_devices(text, core=lambda: CORE, num_cores=2)

    assert (fleet("4x8xH100").count, fleet("4x8xH100").machines) == (32, 4)
    assert fleet("4x8xH100").device == replace(DEVICES["h100"], network=100e9 / 8)
    assert fleet("2 x 8 x 80GB, 400Gb").device.network == 400e9 / 8
    assert fleet("8xH100").device == DEVICES["h100"]
    with pytest.raises(ConfigError, match=r"2x2xcpu.*cores of several machines"):
        fleet("2x2xcpu")
