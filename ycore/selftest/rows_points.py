"""Row: a process kills itself at a named point of the code; one resume, and nothing may differ.

Not here: the points (`points`), and kills at random moments (`rows_kill`).
"""

import random
import time
from dataclasses import replace

from ycore.selftest.bench import Bench, Row, row_of
from ycore.selftest.comparison import compare, read_result
from ycore.selftest.copies import copy_package
from ycore.selftest.oracle import Oracle
from ycore.selftest.points import POINTS, Point, dies_at
from ycore.selftest.runs import Run, Setting, let_end
from ycore.selftest.trial import Outcome, go_on, has_finished


def points_row(bench: Bench) -> Row:
    """Each point, at several of the times that a run comes there."""
    oracle = bench.oracle()
    package = copy_package(bench.place / "package-with-points", tuple(point.patch for point in POINTS))
    setting = replace(bench.setting, package=package)
    cases = [(point, count) for point in POINTS for count in _counts(point, bench)]
    outcomes = bench.all(lambda case: _one(oracle, setting, *case), cases, good=_is_good)
    return row_of("kill-at-points", "kill -9 at named points of the code", outcomes, good=_is_good)


def _counts(point: Point, bench: Bench) -> list[int]:
    """Which of its times; at 30 moments three, or as many as there are."""
    hits = point.hits(bench.job.steps)
    source = random.Random(f"{bench.seed}/points/{point.name}")
    return sorted(source.sample(range(1, hits + 1), min(hits, max(1, bench.count // 10))))


def _one(oracle: Oracle, setting: Setting, point: Point, count: int) -> Outcome:
    name, began = f"point-{point.name.replace(' ', '-').replace(',', '')}-{count}", time.monotonic()
    marker, output = setting.place / f"{name}.reached", setting.place / name
    setting = replace(setting, environment={**setting.environment, **dies_at(point.name, count, marker)})
    run = Run(setting, oracle.job.words(output), output)
    try:
        status, left = let_end(run, timeout_s=oracle.limit_s)
    finally:
        run.end()
    finished = has_finished(run.folder)
    outcome = Outcome(name, (status,), left=left, said=run.tail(1), landed=marker.exists(), had_finished=finished)
    if status not in (None, 0) and not finished:
        outcome = go_on(outcome, oracle, setting)
    difference = compare(oracle.result, read_result(run.folder))
    return replace(outcome, difference=difference, seconds=time.monotonic() - began)


def _is_good(outcome: Outcome) -> bool:
    return outcome.landed and outcome.passes
