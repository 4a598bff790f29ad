"""Plan against measured: the figures that are compared, and the run's own lengths in the plan's place."""

import pytest

from ycore.plan.devices import GIB, Device, Fleet
from ycore.plan.model_facts import model_facts
from ycore.plan.step_forecast import as_it_was, compare, figures_on_cpu, forecast_step
from ycore.plan.workload import Strategy, Workload

CORE = Device("core", 24 * GIB, 4e11, 3e10, 1e10, "a test's", on_cpu=True)
JOB = Workload(
    model_facts("smollm2-135m"),
    prompts_per_step=4,
    group_size=4,
    prompt_tokens=256,
    max_tokens=64,
)
WAY = Strategy(1, 2, micro_batch=16)
CORES = Fleet(CORE, 2)
METRICS = [
    {"step": step, "num_tokens": 16 * 90 * step, "completions/mean_length": 50.0, "ycore/sampling/drawn": 6,
     "ycore/time/step": 3.0, "ycore/time/train": 2.0, "ycore/time/round": 0.9, "ycore/time/sync": 0.1}
    for step in (1, 2, 3)
]  # fmt: skip


def test_lengths_and_draws_are_the_runs_own() -> None:
    work = as_it_was(JOB, METRICS)
    assert (work.prompt_tokens, work.completion_tokens, work.draws) == (40, 50, 1.5)
    assert as_it_was(JOB, []) == JOB


def test_each_role_and_phase_is_compared_once() -> None:
    peaks = {"trainer": 3 * GIB, "rollout-0": 2 * GIB, "rollout-1": 2 * GIB, "rewards": 7e7}
    rows = compare(JOB, WAY, CORES, peaks=peaks, metrics=METRICS)
    assert [row.what for row in rows] == [
        "memory/trainer",
        "memory/rollout",
        "time/sync",
        "time/round",
        "time/train",
        "time/step",
    ]
    rollout = rows[1]
    assert rollout.measured == 4.0
    assert rollout.as_json()["error"] == pytest.approx(rollout.planned / 4 - 1, abs=1e-3)


def test_what_was_planned_before_is_kept_beside_the_runs_own_lengths() -> None:
    before = figures_on_cpu(forecast_step(JOB, WAY, CORES))
    (row,) = compare(
        JOB, WAY, CORES, peaks={}, metrics=[{"step": 1, "ycore/time/step": 3.0}], before=before
    )
    assert (row.planned, row.planned_before) == (before["time/step"], before["time/step"])
    rows = compare(JOB, WAY, CORES, peaks={"trainer": GIB}, metrics=METRICS, before=before)
    assert [row.planned_before for row in rows] == [before[row.what] for row in rows]
    assert rows[-1].planned < before["time/step"] and rows[-1].as_json()[
        "planned_before"
    ] == round(rows[-1].planned_before or 0, 3)


def test_what_was_not_measured_is_not_compared() -> None:
    rows = compare(JOB, WAY, CORES, peaks={}, metrics=[{"step": 1, "ycore/time/step": 3.0}])
    assert [row.what for row in rows] == ["time/step"]
