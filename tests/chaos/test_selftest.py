"""A trainer that is killed and resumed equals an undisturbed run to the bit, with the engine that starts in seconds."""

import signal
from pathlib import Path

import pytest

from tests.chaos.job import Job, write_inputs
from tests.chaos.results import compare, read_result
from tests.chaos.runs import Run, Setting, let_end

STEPS = 5
KILL_AFTER_STEPS = 3


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_exactly_here(tmp_path: Path) -> None:
    job = Job(write_inputs(tmp_path / "inputs"), engine="transformers", steps=STEPS, seed=1)
    setting = Setting(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    undisturbed = Run(setting, job.words(whole), whole)
    assert let_end(undisturbed, timeout_s=300) == (0, ()), undisturbed.tail()
    expected = read_result(undisturbed.folder)
    assert len({row["loss"] for row in expected.rows}) > 1
    assert expected.weights

    run = Run(setting, job.words(killed), killed)
    assert run.wait_for(lambda: run.num_steps() >= KILL_AFTER_STEPS, timeout_s=300), run.tail()
    assert run.send("trainer", signal.SIGKILL)
    status, left = let_end(run, timeout_s=300)
    assert status == 1 and left == () and "SIGKILL" in run.tail()

    resumed = Run(setting, [*job.words(killed), "--resume"], killed)
    assert let_end(resumed, timeout_s=300) == (0, ()), resumed.tail()
    difference = compare(expected, read_result(resumed.folder))
    assert difference.is_none, str(difference)
