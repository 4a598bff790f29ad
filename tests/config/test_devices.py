"""Counting GPUs by their device files and the environment."""

from pathlib import Path

import pytest

from ycore.config.resolve import num_gpus


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("", 0), ("0", 1), ("0,2", 2), ("-1", 0), ("1,-1,2", 1), ("0,1,2,3,4", 3), ("GPU-abc", 1)],
)
def test_the_environment_chooses_among_those_present(visible: str | None, expected: int, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert num_gpus(environment, device_files=tmp_path) == expected


def test_a_machine_without_gpus_has_none(tmp_path: Path) -> None:
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0"}, device_files=tmp_path) == 0
