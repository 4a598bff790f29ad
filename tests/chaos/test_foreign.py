"""The eyes of the row of ends: a process that hides is seen, and a foreign thing that is touched is named."""

import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.chaos.foreign import Foreign, Witness
from tests.chaos.rows_ends import ENDS, REWARDS, STAGES, draw_cases

HIDES = """
import os, subprocess
if os.fork() == 0:
    subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
"""


def test_a_witness_sees_what_hides_and_takes_it_along(tmp_path: Path) -> None:
    try:
        witness = Witness(f"ycore-chaos-test-{tmp_path.name}")
    except ValueError as problem:
        pytest.skip(str(problem))
    try:
        starter = subprocess.Popen(
            [sys.executable, "-c", f"input()\n{HIDES}"], stdin=subprocess.PIPE
        )
        witness.add(starter.pid)
        starter.communicate(b"\n", timeout=120)
        deadline = time.monotonic() + 120
        while [process.name() for process in witness.processes()] != ["sleep"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (hidden,) = witness.processes()
    finally:
        witness.close()
    assert not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_what_is_touched_of_the_foreign_is_named(tmp_path: Path) -> None:
    dataset = tmp_path / "train.jsonl"
    dataset.write_text("{}\n")
    with Foreign(tmp_path / "run", dataset, tmp_path) as foreign:
        foreign.make_more()
        assert foreign.touched() == []
        foreign.dataset.write_text("{} \n")
        shutil.rmtree(next(tmp_path.glob("ycore-*")))
        process = foreign.processes[0]
        process.kill()
        process.wait()
        touched = foreign.touched()
        assert (
            len(touched) == 3
            and f"foreign process {process.pid}: exit -9, was exit None" in touched
        )
        dataset = foreign.dataset
    assert not dataset.exists()


def test_cases_are_dealt_evenly_and_follow_from_the_seed() -> None:
    cases = draw_cases(500, seed=0)
    assert cases[:100] == draw_cases(100, seed=0) != draw_cases(100, seed=1)
    counts = Counter(case.kind for case in cases)
    assert set(counts) == set(ENDS) and max(counts.values()) - min(counts.values()) <= 1
    assert {case.stage for case in cases} == set(STAGES) and {
        case.reward for case in cases
    } == set(REWARDS)
    assert all(case.stage in ENDS[case.kind].stages for case in cases)
    assert len({case.name for case in cases}) == 500
