"""Rows: a stream of groups (`--max-staleness 3`) is disturbed at random moments and at named points of the code.

Which weights write which token depends on the clock, so no undisturbed run can be compared with. What is asked: the
steps before the disturbance come back the same, and no prompt is lost or taken twice.
"""

import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tests.chaos.bench import Bench, Row, row_of
from tests.chaos.moments import Moment, draw_moments
from tests.chaos.patches import STREAM_POINTS, Point, copy_package
from tests.chaos.results import account, compare_steps, read_result, read_rounds
from tests.chaos.rows_calls import account_trial, dynamic, refuse_idle
from tests.chaos.rows_kill import DEADLINES, pause
from tests.chaos.rows_world import fills, small_disk
from tests.chaos.runs import Run, Setting, let_end
from tests.chaos.trial import Deed, Oracle, Outcome, go_on, kill, until_it_lands
from tests.chaos.witnesses import dies_at

_TOKEN_S = "0.03"  # so that completions are under way when weights come
_DEADLINES = [word for key, value in DEADLINES.items() for word in ("--set", f"{key}={value}")]
_FULL_DISK = "full disk"
_DEEDS: Mapping[str, Deed] = {
    "engine dies": kill("rollout"),
    "engine stalls": pause("rollout"),
    "trainer stalls": pause("trainer"),
    "trainer hangs": kill("trainer", signal.SIGSTOP),
    "launcher dies": kill("launcher"),
}


def stream_faults_row(bench: Bench) -> Row:
    """An engine that dies or stalls with half a completion, a trainer that stalls or hangs, a full disk, in turn."""
    oracle, setting, name = _stream(bench), _setting(bench), "stream-faults"
    kinds = [*_DEEDS, _FULL_DISK]
    moments = draw_moments(
        max(len(kinds), bench.count // 3), steps=bench.job.steps - 1, seed=bench.seed, row=name
    )

    def attempt(trial_name: str, at: Moment, kind: str) -> Outcome:
        began = time.monotonic()
        if kind != _FULL_DISK:
            outcome = account_trial(oracle, setting, trial_name, at, deed=_DEEDS[kind])
            outcome = refuse_idle(outcome, setting)
        else:
            with small_disk(bench.place / f"disk-of-{trial_name}") as disk:
                in_disk = f"{disk.name}/{trial_name}"
                deed = fills(disk, leave=0)
                outcome = account_trial(oracle, setting, in_disk, at, deed=deed)
                outcome = refuse_idle(outcome, setting)
        return replace(outcome, seconds=time.monotonic() - began)

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        kind = kinds[number % len(kinds)]
        trial_name = f"{name}-{number}-{kind.replace(' ', '-')}"
        moment = replace(moment, steps=max(1, moment.steps))
        return until_it_lands(partial(attempt, kind=kind), trial_name, moment)

    outcomes = bench.all(run_case, list(enumerate(moments)))
    return row_of(name, "engine, trainer, launcher or disk fails in a stream", outcomes)


def stream_points_row(bench: Bench) -> Row:
    """SIGKILL of the trainer in a swap of weights, and between a round's commit and its hand-over."""
    oracle, setting, name = _stream(bench), _setting(bench), "stream-points"
    package = copy_package(
        bench.place / f"package-of-{name}", tuple(point.patch for point in STREAM_POINTS)
    )
    setting = replace(setting, package=package)
    hits = sorted({2, max(2, bench.job.steps // 2)})
    cases = [(point, hit) for point in STREAM_POINTS for hit in hits]
    outcomes = bench.all(lambda case: _die_at(name, oracle, setting, *case), cases)
    return row_of(name, "kill -9 at named points of a stream", outcomes)


def _die_at(row: str, oracle: Oracle, setting: Setting, point: Point, hit: int) -> Outcome:
    began = time.monotonic()
    name = f"{row}-{point.name.replace(' ', '-').replace(',', '')}-{hit}"
    marker = setting.place / f"{name}.reached"
    output = setting.place / name
    variables = {**setting.environment, **dies_at(point.name, hit, marker)}
    job = dynamic(oracle.job)
    run = Run(replace(setting, environment=variables), job.words(output), output)
    try:
        status, left = let_end(run, timeout_s=oracle.limit_s)
        before = read_result(run.folder)
    finally:
        run.end()
    outcome = Outcome(name, (status,), left=left, said=run.tail(1), landed=marker.exists())
    if status not in (None, 0):
        outcome = go_on(outcome, replace(oracle, job=job), setting)
    difference = compare_steps(before, read_result(run.folder))
    problems = account(read_rounds(run.folder.journal), steps=job.steps, seed=job.seed)
    difference = replace(difference, notes=(*difference.notes, *problems))
    outcome = replace(outcome, difference=difference, seconds=time.monotonic() - began)
    return refuse_idle(outcome, setting)


def _stream(bench: Bench) -> Oracle:
    oracle = bench.oracle()
    words = (*oracle.job.more, "--max-staleness", "3", *_DEADLINES)
    return replace(oracle, job=replace(oracle.job, more=words))


def _setting(bench: Bench) -> Setting:
    scripted = {**(bench.setting.scripted or {}), "--token-s": _TOKEN_S}
    return replace(bench.setting, scripted=scripted)
