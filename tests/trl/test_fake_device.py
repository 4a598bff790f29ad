"""No tensor of the host meets one of the device: in the packed forward, in a sync, in the optimizer's offload."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fake_device.py")


def run(*cases: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), *cases]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, env=environment)


def test_all_is_on_the_device() -> None:
    done = run("score", "merge", "offload")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "case",
    [
        "score_with_a_mask_left_on_the_host",
        "merge_with_adapters_left_on_the_host",
        "offload_that_does_not_come_back",
    ],
)
@pytest.mark.verify
def test_what_is_left_on_the_host_is_found(case: str) -> None:
    done = run(case)
    assert done.returncode != 0 and "device" in done.stderr.lower(), done.stderr[-3000:]
