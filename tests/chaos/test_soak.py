"""A long run grows in its rows alone: memory, descriptors, threads and what lies beside it stay as they were."""

import os
import statistics
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.chaos.job import Job, write_inputs
from tests.harness import HANG_S, start_ycore
from ycore.run.files import RunFolder
from ycore.run.metrics import MetricsFollower
from ycore.run.reports import is_alive

STEPS = 3000
EVERY = 25
WINDOW = 300
"""The run has settled after so many steps: the windows after them and at the end are compared by their medians."""
WITHIN_S = 4 * HANG_S

ALLOWED = {
    "processes": 0,
    "threads": 1,
    "descriptors": 2,
    "sockets": 32,  # both ends of the connections of a step's 16 requests, kept for a second
    "memory_kb": 20_000,
    "launcher_kb": 4_000,
    "shared_memory_kb": 16,
    "temporary_files": 1,
    "logs_kb": 20,
    "files": 1,
}
"""By how much the last steps' median may be larger than that of the first settled ones."""
TRACE_KB = 2 * 32 * 1024 + 512


@pytest.mark.verify
@pytest.mark.timeout(WITHIN_S + 2 * HANG_S)
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
    step, samples = 0, dict[int, dict[str, int]]()
    deadline = time.monotonic() + WITHIN_S
    while step < STEPS and run.poll() is None and time.monotonic() < deadline:
        step = max((row["step"] for row in followed.read()), default=step)
        if step // EVERY > len(samples):
            samples[step] = measure(run.pid, folder)
            print(step, samples[step], flush=True)
        time.sleep(0.1)
    assert run.wait(HANG_S) == 0, (tmp_path / "run.log").read_text()[-2000:]
    first = medians(samples, WINDOW, 2 * WINDOW)
    last = medians(samples, STEPS - WINDOW, STEPS - 1)
    print(f"steps {WINDOW} to {2 * WINDOW}: {first}; the last {WINDOW}: {last}")
    grown = [name for name, allowed in ALLOWED.items() if last[name] > first[name] + allowed]
    assert not grown, f"{grown}: {first} became {last}"
    assert last["trace_kb"] <= TRACE_KB


def medians(samples: dict[int, dict[str, int]], begin: int, end: int) -> dict[str, float]:
    """Return the median of each figure over the samples of the steps from `begin` to `end`."""
    inside = [sample for step, sample in samples.items() if begin <= step <= end]
    return {name: statistics.median(sample[name] for sample in inside) for name in inside[0]}


def measure(pid: int, folder: RunFolder) -> dict[str, int]:
    """Add up what the run's processes hold and what its folders have."""
    sums = dict.fromkeys(("processes", "threads", "descriptors", "sockets", "memory_kb"), 0)
    leader = psutil.Process(pid)
    sums["launcher_kb"] = own_memory_kb(leader)
    for process in (leader, *leader.children(recursive=True)):
        try:
            if is_alive(process):
                sums["memory_kb"] += own_memory_kb(process)
                sums["threads"] += process.num_threads()
                sums["processes"] += 1
                for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                    with suppress(FileNotFoundError):  # it is closed meanwhile
                        is_socket = os.readlink(descriptor).startswith("socket:")
                        sums["sockets" if is_socket else "descriptors"] += 1
        except (psutil.Error, FileNotFoundError):  # it has ended meanwhile
            continue
    return {
        **sums,
        "shared_memory_kb": size_kb(folder.shared_memory),
        "temporary_files": len(list(folder.temporary.glob("**/*"))),
        "logs_kb": size_kb(folder.logs),
        "trace_kb": sum(path.stat().st_size for path in folder.root.glob("trace*")) // 1024,
        "files": len(os.listdir(folder.root)),
    }


def own_memory_kb(process: psutil.Process) -> int:
    """Without the pages of files, which a machine without memory to spare takes back."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared) // 1024


def size_kb(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # it is replaced meanwhile
            continue
    return total // 1024
