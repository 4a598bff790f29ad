"""The driver's lists as nvidia-smi prints them: whole GPUs, slices, none."""

import pytest

from ycore.launch.gpus import Ask, visible_gpus

EIGHT = "\n".join(
    f"{n}, GPU-0000000{n}-aaaa, NVIDIA H100 80GB HBM3, 81559, 81000, 9.0, 580.82.07"
    for n in range(8)
)
T4 = "0, GPU-11111111-bbbb, Tesla T4, 15360, 14900, 7.5, 535.129.03\n"
DIVIDED = "0, GPU-22222222-cccc, NVIDIA A100-SXM4-80GB, 81920, 81000, 8.0, 580.82.07\n"
DIVIDED_LIST = """GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-22222222-cccc)
  MIG 3g.40gb     Device  0: (UUID: MIG-33333333-dddd)
  MIG 1g.10gb     Device  1: (UUID: MIG-44444444-eeee)
"""


def answering(rows: str, listing: str = "") -> Ask:
    return lambda arguments: listing if arguments == ("-L",) else rows


def ids(environment: dict[str, str], ask: Ask) -> list[str]:
    return [gpu.id for gpu in visible_gpus(environment, ask=ask)]


def test_every_gpu_of_the_driver_is_listed() -> None:
    gpus = visible_gpus({}, ask=answering(EIGHT))
    assert [gpu.id for gpu in gpus] == [str(n) for n in range(8)]
    assert gpus[0].name == "NVIDIA H100 80GB HBM3" and gpus[0].capability == (9, 0)
    assert gpus[0].memory_gib == pytest.approx(79.6, abs=0.1) and gpus[0].free_gib == pytest.approx(
        79.1, abs=0.1
    )


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
def test_the_environment_chooses_among_them(visible: str, expected: list[str]) -> None:
    assert ids({"CUDA_VISIBLE_DEVICES": visible}, answering(EIGHT)) == expected


def test_the_slices_of_a_divided_gpu_are_devices() -> None:
    gpus = visible_gpus({}, ask=answering(DIVIDED, DIVIDED_LIST))
    assert [gpu.id for gpu in gpus] == ["MIG-33333333-dddd", "MIG-44444444-eeee"]
    assert [round(gpu.memory_gib or 0) for gpu in gpus] == [37, 9]
    assert ids({"CUDA_VISIBLE_DEVICES": "MIG-44444444-eeee"}, answering(DIVIDED, DIVIDED_LIST)) == [
        "MIG-44444444-eeee"
    ]


def test_no_driver_is_no_device() -> None:
    assert visible_gpus({}, ask=answering("")) == ()
    failed = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n"
    assert visible_gpus({}, ask=answering(failed)) == ()


def test_older_devices_have_no_bfloat16() -> None:
    (old,) = visible_gpus({}, ask=answering(T4))
    assert not old.has_bfloat16 and all(
        gpu.has_bfloat16 for gpu in visible_gpus({}, ask=answering(EIGHT))
    )


def test_values_that_the_driver_does_not_give_are_unknown() -> None:
    (unified,) = visible_gpus(
        {}, ask=answering("0, GPU-5, NVIDIA GB10, [N/A], [N/A], 12.1, 580.95.05\n")
    )
    assert unified.memory_gib is None and unified.free_gib is None and unified.capability == (12, 1)
