"""Rows: an engine that drops calls, answers late or with an error, and one that does not take its weights.

The engine is the scripted one: a real one cannot be asked to.

Not here: the misbehaviour itself (`scripted_engine.Faults`).
"""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ycore.selftest.bench import Bench, Row, row_of
from ycore.selftest.comparison import Difference, compare, read_result
from ycore.selftest.oracle import Oracle
from ycore.selftest.runs import Run, Setting, let_end
from ycore.selftest.trial import Outcome
from ycore.selftest.trial import go_on as resume

KINDS: Mapping[str, Mapping[str, float]] = {
    "dropped": {"close": 0.05},
    "late": {"late": 0.05, "late_s": 1.5},
    "errors": {"error": 0.05},
    "failing": {"error": 0.6},  # more than asking again can mend: the run must fail, and go on
    "all": {"close": 0.03, "late": 0.02, "late_s": 1.0, "error": 0.01},
}


def calls_row(bench: Bench) -> Row:
    """Shares of the calls go wrong; what comes of it, by itself or after one resume, is what came without."""
    oracle = bench.oracle()
    each = max(1, bench.count // 6)
    cases = [(kind, bench.seed * 1000 + number) for kind in KINDS for number in range(each)]
    outcomes = bench.all(lambda case: calls_trial(oracle, bench.setting, *case), cases)
    return row_of("calls", "calls dropped, answered late or with status 500", outcomes)


def calls_trial(oracle: Oracle, setting: Setting, kind: str, seed: int) -> Outcome:
    """A run with such an engine; where it ends with an error, one resume with one that behaves."""
    return _with_faults(oracle, setting, f"calls-{kind}-{seed}", {**KINDS[kind], "seed": seed})


def stale_row(bench: Bench) -> Row:
    """The engine keeps old weights and says that it has the new ones: an error on that very step."""
    oracle = bench.oracle()
    loads = [1 + number % bench.job.steps for number in range(max(2, bench.count // 3))]
    outcomes = bench.all(lambda case: stale_trial(oracle, bench.setting, *case), list(enumerate(loads)))
    return row_of("stale-weights", "an engine that skips a sync: an error on that step", outcomes)


def stale_trial(oracle: Oracle, setting: Setting, number: int, load: int) -> Outcome:
    """The `load`th sync, counted from 0, is skipped; it serves step `load` + 1."""
    outcome = _with_faults(oracle, setting, f"stale-{number}-load-{load}", {"stale_from": load})
    notes = [*outcome.difference.notes]
    if outcome.exits[0] == 0:
        notes.append("the skipped sync was not noticed")
    elif outcome.steps_before_resume != load:
        notes.append(f"noticed after {outcome.steps_before_resume} steps, not {load}")
    return replace(outcome, difference=Difference(outcome.difference.largest, tuple(notes)))


def _with_faults(oracle: Oracle, setting: Setting, name: str, faults: Mapping[str, Any]) -> Outcome:
    began, output = time.monotonic(), setting.place / name
    troubled = replace(setting, scripted={**(setting.scripted or {}), "--faults": json.dumps(dict(faults))})
    run = Run(troubled, oracle.job.words(output), output)
    try:
        first, left = let_end(run, timeout_s=oracle.limit_s)
    finally:
        run.end()
    outcome = Outcome(name, (first,), left=left, said=run.tail(1), steps_before_resume=run.num_steps())
    if first not in (None, 0):
        outcome = resume(outcome, oracle, setting)
    seen = compare(oracle.result, read_result(run.folder))
    return replace(outcome, difference=seen, seconds=time.monotonic() - began)
