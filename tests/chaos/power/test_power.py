"""The proof in small, with a real run: no cut breaks a promise, and every missing flush shows."""

from pathlib import Path

import pytest

from tests.chaos.job import write_inputs
from tests.chaos.power.cuts import CONTROLS, draw_cuts, judge_cuts, resume_cuts, run_controls
from tests.chaos.power.proof import subject_of, unlike
from tests.chaos.power.recording import build_recorder
from tests.chaos.power.scenarios import record, rollout_parts
from tests.chaos.runs import Setting
from ycore.errors import RunError


@pytest.mark.slow
@pytest.mark.verify
@pytest.mark.timeout(900)
def test_no_cut_of_a_real_run_breaks_a_promise_and_every_missing_flush_shows(
    tmp_path: Path,
) -> None:
    try:
        build_recorder(tmp_path)
    except RunError as error:
        pytest.skip(str(error))
    setting = Setting(tmp_path, scripted={"--think-s": "0.01"})
    recording = record(
        "rl", rollout_parts(write_inputs(tmp_path / "inputs"), steps=4)[:2], setting
    )
    subject, world = subject_of(recording)
    assert unlike(world.files(), tmp_path / "rl" / "recorded") == []
    assert {promise.kind for promise in subject.witness.promises} == {
        "run.json", "identity.json", "round", "checkpoint", "finished"
    }  # fmt: skip

    cuts = draw_cuts([subject], count=300, seed=1)
    tally = judge_cuts(cuts)
    assert tally.failures == []
    assert set(tally.outcomes) >= {"begins", "resumes", "finished"} and tally.total == 300

    middle = next(
        cut
        for cut in cuts
        if cut.after > recording.phases[1].first and cut.order == "independent"
    )
    assert resume_cuts([middle], setting, say=print).failures == []

    failed_cuts = run_controls([subject], count=150, seed=1, say=print)
    assert {name for name in CONTROLS if not failed_cuts[name]} == set()
