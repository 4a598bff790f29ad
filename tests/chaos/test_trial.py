"""The harness at work: a real run with the scripted engine, its trainer killed in a step, resumed, and compared."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.bench import Bench
from tests.chaos.job import Job, write_inputs
from tests.chaos.moments import PHASES, Moment
from tests.chaos.patches import copy_package
from tests.chaos.results import compare, read_result
from tests.chaos.runs import Setting
from tests.chaos.trial import kill, trial
from tests.chaos.witnesses import FLUSHES_VARIABLE, read_flushes


@pytest.mark.slow
def test_killed_and_resumed_is_never_killed(tmp_path: Path) -> None:
    job = Job(write_inputs(tmp_path / "inputs"), steps=5)
    setting = Setting(
        tmp_path,
        scripted={"--think-s": "0.01"},
        package=copy_package(tmp_path / "package"),
        environment={FLUSHES_VARIABLE: str(tmp_path / "flushes.log")},
    )
    with ThreadPoolExecutor(1) as pool:
        bench = Bench(job, setting, pool, seed=0, count=1, say=print, oracle_runs=1)
        oracle = bench.oracle()
    outcome = trial("killed", oracle, Moment(3, 0.5), kill("trainer"))
    assert outcome.passes, outcome
    assert outcome.landed and outcome.exits == (1, 0) and outcome.phase in PHASES
    flushed, others = read_flushes(tmp_path / "flushes.log")
    assert flushed > 2 * job.steps and others == []

    assert signal.SIGKILL.name in (tmp_path / "killed.log").read_text()
    shorter = read_result(oracle.folder)
    assert not compare(oracle.result, type(shorter)(shorter.rows[:-1], shorter.weights)).is_none
