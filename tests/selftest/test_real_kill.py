"""The harness at work: a real run with the scripted engine, its trainer killed in a step, resumed, and compared."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ycore.selftest.bench import Bench
from ycore.selftest.comparison import compare, read_result
from ycore.selftest.copies import copy_package
from ycore.selftest.flushes import VARIABLE, read_flushes
from ycore.selftest.job import Job, write_inputs
from ycore.selftest.moments import Moment
from ycore.selftest.phases import PHASES
from ycore.selftest.runs import Setting
from ycore.selftest.trial import kill, trial


@pytest.mark.slow
def test_killed_and_resumed_is_never_killed(tmp_path: Path) -> None:
    job = Job(write_inputs(tmp_path / "inputs"), steps=5)
    setting = Setting(
        tmp_path,
        scripted={"--think-s": "0.01"},
        package=copy_package(tmp_path / "package"),
        environment={VARIABLE: str(tmp_path / "flushes.log")},
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
