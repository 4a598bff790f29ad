"""Every part of the device check on the first visible GPU: `pytest -m gpu tests/gpu`, at most 55 minutes."""

from pathlib import Path

import pytest
import torch

from tests.gpu.check import PARTS, run_part
from ycore.launch.doctor import gpu_checks, torch_cuda
from ycore.launch.layout import visible_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]


def test_the_driver_and_the_free_memory_serve_a_run() -> None:
    gpus = visible_gpus()
    checks = list(gpu_checks(gpus, torch_cuda=torch_cuda()))
    assert all(check["ok"] for check in checks), checks


@pytest.mark.parametrize("name", PARTS)
def test_a_part_passes_on_a_device(name: str, tmp_path: Path) -> None:
    print(run_part(name, tmp_path, device=visible_gpus()[0].id))
