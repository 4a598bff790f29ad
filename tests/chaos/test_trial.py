"""The harness at work: a real run with the scripted engine, its trainer killed in a step, resumed, and compared."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import rows_kill
from tests.chaos.bench import Bench
from tests.chaos.job import Job, write_inputs
from tests.chaos.moments import PHASES, Moment, Pace
from tests.chaos.patches import copy_package
from tests.chaos.results import Result, compare, read_result
from tests.chaos.rows_world import world_oracle
from tests.chaos.runs import Setting
from tests.chaos.scorecard import ROWS
from tests.chaos.trial import Oracle, Outcome, kill, trial
from tests.chaos.witnesses import FLUSHES_VARIABLE, read_flushes
from ycore.run.files import RunFolder


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.timeout(
    900
)  # three whole runs, of which each imports transformers four times, on a machine that may be busy
def test_killed_and_resumed_is_never_killed(tmp_path: Path) -> None:
    """Its completions have turns, with a tool and an environment that draws at every call."""
    job = Job(write_inputs(tmp_path / "inputs"), steps=5)
    setting = Setting(
        tmp_path,
        scripted={"--think-s": "0.01"},
        package=copy_package(tmp_path / "package"),
        environment={FLUSHES_VARIABLE: str(tmp_path / "flushes.log")},
    )
    with ThreadPoolExecutor(1) as pool:
        bench = Bench(job, setting, pool, seed=0, count=1, say=print, oracle_runs=1)
        oracle = world_oracle(bench)
    outcome = trial("killed", oracle, Moment(3, 0.5), kill("trainer"))
    assert outcome.passes, outcome
    assert outcome.landed and outcome.exits == (1, 0) and outcome.phase in PHASES
    flushed, unflushed = read_flushes(tmp_path / "flushes.log")
    assert flushed > 2 * job.steps and unflushed == []

    assert signal.SIGKILL.name in (tmp_path / "killed.log").read_text()
    shorter = read_result(oracle.folder)
    assert not compare(oracle.result, type(shorter)(shorter.rows[:-1], shorter.weights)).is_none


@pytest.mark.parametrize("row", ["kill-trainer", "kill-rank", "kill-allocator", "stop-trainer"])
def test_what_came_after_a_runs_end_is_done_again_sooner(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: dict[str, float] = {}

    def late_at_first(name: str, oracle: Oracle, moment: Moment, deed: Any) -> Outcome:
        shares[name] = moment.share
        return Outcome(name, (0,), landed="-again-" in name)

    monkeypatch.setattr(rows_kill, "trial", late_at_first)
    job, setting = Job(tmp_path), Setting(tmp_path)
    pace = Pace(start_s=1, step_s=1, end_s=1)
    oracle = Oracle(job, setting, Result([], {}), RunFolder(tmp_path), pace, limit_s=1)
    monkeypatch.setattr(
        Bench, "oracle", lambda self, wanted=None: replace(oracle, job=wanted or job)
    )
    with ThreadPoolExecutor(1) as pool:
        made = ROWS["scripted"][row](Bench(job, setting, pool, seed=0, count=2, say=print))
    assert made.passed == made.total > 0 and len(shares) == 2 * made.total
    again = {
        name.partition("-again-")[0]: share
        for name, share in shares.items()
        if "-again-" in name
    }
    assert again == {name: share / 2 for name, share in shares.items() if "-again-" not in name}
