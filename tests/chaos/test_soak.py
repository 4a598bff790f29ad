"""A long run grows in its rows alone: memory, descriptors, threads and what lies beside it stay as they were."""

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.job import Job, write_inputs
from tests.harness import HANG_S, start_ycore
from ycore.run.metrics import MetricsFollower
from ycore.run.paths import RunFolder
from ycore.run.reports import is_alive

STEPS = 500
SETTLED = 200


@pytest.mark.verify
def test_a_long_run_does_not_grow(tmp_path: Path) -> None:
    job = Job(write_inputs(tmp_path / "inputs"), steps=STEPS, checkpoint_every=50, think_s=0.0)
    folder = RunFolder(tmp_path / "run")
    run = start_ycore(
        job.words(folder.root),
        cwd=tmp_path,
        log=tmp_path / "run.log",
        scripted_engine={"--think-s": "0"},
    )
    followed = MetricsFollower(folder.metrics, from_the_start=True)
    step, sizes = 0, dict[int, dict[str, int]]()
    deadline = time.monotonic() + 3 * HANG_S
    while step < STEPS and run.poll() is None and time.monotonic() < deadline:
        step = max((row["step"] for row in followed.read()), default=step)
        if (step + 75) // 100 > len(sizes):  # between two checkpoints
            sizes[step] = measure(run.pid, folder)
            print(step, sizes[step])
        time.sleep(0.1)
    assert run.wait(HANG_S) == 0, (tmp_path / "run.log").read_text()[-2000:]
    settled, last = (sizes[min(at for at in sizes if at >= SETTLED)], sizes[max(sizes)])
    for name, allowed in ALLOWED.items():
        assert last[name] <= settled[name] + allowed, f"{name}: {sizes}"


ALLOWED = {
    "processes": 0,
    "threads": 2,
    "descriptors": 30,
    "memory_kb": 60_000,
    "shared_memory_kb": 64,
    "temporary_files": 2,
    "logs_kb": 20,
    "files": 2,
}
"""By how much each may be larger near the last step than after 200: descriptors of connections come and go."""


def measure(pid: int, folder: RunFolder) -> dict[str, int]:
    """Add up what the run's processes hold and what its folders have."""
    sums = dict.fromkeys(("processes", "threads", "descriptors", "memory_kb"), 0)
    leader = psutil.Process(pid)
    for process in (leader, *leader.children(recursive=True)):
        try:
            if is_alive(process):
                sums["memory_kb"] += process.memory_info().rss // 1024
                sums["threads"] += process.num_threads()
                sums["descriptors"] += process.num_fds()
                sums["processes"] += 1
        except psutil.Error:  # it has ended meanwhile
            continue
    return {
        **sums,
        "shared_memory_kb": size_kb(folder.shared_memory),
        "temporary_files": len(list(folder.temporary.glob("**/*"))),
        "logs_kb": size_kb(folder.logs),
        "files": len(os.listdir(folder.root)),
    }


def size_kb(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it is replaced meanwhile
            continue
    return total // 1024
