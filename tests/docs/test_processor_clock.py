"""Peaks of memory by role, from outside a run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processor_clock import ProcessorClock, peak_bytes, role_of

from ycore.run.files import RunFolder
from ycore.run.reports import RUN_MARKER

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("python -m ycore.trainer runs/x", "trainer"),
        ("python -P -m ycore.rewards.worker", "rewards"),
        (
            "python -m ycore.engine.serve --model m --uds /tmp/x/rollout-1.sock",
            "rollout-1",
        ),
        ("ycore.engine.serve rollout-0", "rollout-0"),
        ("python -m accelerate.commands.launch --config_file a -m ycore.trainer x", "helper"),
        ("VLLM::EngineCore", None),
    ],
)
def test_whose_process_a_command_line_is(command: str, role: str | None) -> None:
    assert role_of(command.split()) == role


def test_the_peak_of_a_running_process_is_kept_after_its_memory_is_given_back(
    tmp_path: Path,
) -> None:
    """A process with a child, as an engine has one: both count, what they held at most, and nobody else's."""
    child = "import time; held = bytearray(60 << 20); time.sleep(60)"
    code = f"import subprocess as s, sys; held = bytearray(80 << 20); del held; s.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--uds", "/tmp/rollout-0.sock"],
        env={**os.environ, RUN_MARKER: RunFolder(tmp_path).run_id},
        start_new_session=True,
    )
    try:
        memory, deadline = ProcessorClock(tmp_path), time.monotonic() + 30
        while time.monotonic() < deadline and memory.peaks.get("rollout-0", 0) < 140 << 20:
            memory.look_at_memory()
            time.sleep(0.1)
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert set(memory.peaks) == {"rollout-0"}
    assert 140 << 20 <= memory.peaks["rollout-0"] <= 250 << 20


def test_a_process_that_is_gone_has_no_peak() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert peak_bytes(process.pid) == 0
