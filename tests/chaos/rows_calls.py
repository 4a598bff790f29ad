"""Rows: an engine that misbehaves, prompts accounted for after kills, and the time that the protection costs.

The misbehaving engine is the scripted one (`scripted_engine.Faults`). The cost is measured with a real engine and a
real model: the protection cannot be switched off, so its functions are timed in a copy of the package, and their sum is
compared with the time of the steps. Work inside the engine counts in full, because the trainer waits for it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tests.chaos.bench import Bench, Row, row_of
from tests.chaos.job import Job
from tests.chaos.moments import Moment, draw_moments, glimpse, phase_of
from tests.chaos.patches import PARTS, copy_package
from tests.chaos.results import (
    Difference,
    account,
    compare,
    compare_steps,
    read_result,
    read_rounds,
)
from tests.chaos.runs import Run, Setting, let_end
from tests.chaos.trial import (
    Deed,
    Oracle,
    Outcome,
    go_on,
    kill,
    until_it_lands,
    wait_for_moment,
)
from tests.chaos.witnesses import TIMES_VARIABLE, read_times
from ycore.errors import RunError
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics

KINDS: Mapping[str, Mapping[str, float]] = {
    "dropped": {"close": 0.05},
    "late": {"late": 0.05, "late_s": 1.5},
    "errors": {"error": 0.05},
    "failing": {"error": 0.6},  # more than asking again can mend: the run must fail, and go on
    "all": {"close": 0.03, "late": 0.02, "late_s": 1.0, "error": 0.01},
}


def calls_row(bench: Bench) -> Row:
    """Shares of the calls go wrong; the result, by itself or after one resume, is that of the undisturbed run."""
    oracle = bench.oracle()
    per_kind = max(1, bench.count // 6)
    cases = [(kind, bench.seed * 1000 + number) for kind in KINDS for number in range(per_kind)]
    outcomes = bench.all(lambda case: calls_trial(oracle, bench.setting, *case), cases)
    return row_of("calls", "calls dropped, answered late or with status 500", outcomes)


def calls_trial(oracle: Oracle, setting: Setting, kind: str, seed: int) -> Outcome:
    """A run with such an engine; where it ends with an error, one resume with one that behaves."""
    return _with_faults(oracle, setting, f"calls-{kind}-{seed}", {**KINDS[kind], "seed": seed})


def stale_row(bench: Bench) -> Row:
    """The engine keeps old weights and says that it has the new ones: an error on that very step."""
    oracle = bench.oracle()
    loads = [1 + number % bench.job.steps for number in range(max(2, bench.count // 3))]
    outcomes = bench.all(
        lambda case: stale_trial(oracle, bench.setting, *case), list(enumerate(loads))
    )
    return row_of(
        "stale-weights", "an engine that skips a sync: an error on that step", outcomes
    )


def stale_trial(oracle: Oracle, setting: Setting, number: int, load: int) -> Outcome:
    """The `load`th sync, counted from 0, is skipped; it serves step `load` + 1."""
    outcome = _with_faults(oracle, setting, f"stale-{number}-load-{load}", {"stale_from": load})
    notes = [*outcome.difference.notes]
    if outcome.exits[0] == 0:
        notes.append("the skipped sync was not noticed")
    elif outcome.steps_before_resume != load:
        notes.append(f"noticed after {outcome.steps_before_resume} steps, not {load}")
    return replace(outcome, difference=Difference(outcome.difference.largest, tuple(notes)))


def _with_faults(
    oracle: Oracle, setting: Setting, name: str, faults: Mapping[str, Any]
) -> Outcome:
    began, output = time.monotonic(), setting.place / name
    troubled = replace(
        setting, scripted={**(setting.scripted or {}), "--faults": json.dumps(dict(faults))}
    )
    run = Run(troubled, oracle.job.words(output), output)
    try:
        first, left = let_end(run, timeout_s=oracle.limit_s)
    finally:
        run.end()
    outcome = Outcome(
        name, (first,), left=left, said=run.tail(1), steps_before_resume=run.num_steps()
    )
    if first not in (None, 0):
        outcome = go_on(outcome, oracle, setting)
    seen = compare(oracle.result, read_result(run.folder))
    return replace(outcome, difference=seen, seconds=time.monotonic() - began)


_KEYS = ("sampling.dynamic=true", "sampling.max_age=100")


def dynamic(job: Job) -> Job:
    """The job with dynamic sampling, rows from which nothing can be learned, and a journal that is kept whole."""
    words = [word for key in _KEYS for word in ("--set", key)]
    return replace(job, reward="variety_or_dull", more=(*job.more, *words, "--keep-journal"))


def account_row(bench: Bench) -> Row:
    """Kills of the trainer at random moments; in turn it goes on with as many ranks, with fewer and with more."""
    oracle = bench.oracle()
    moments = draw_moments(
        max(len(RANKS), bench.count // 3),
        steps=bench.job.steps,
        seed=bench.seed,
        row="account",
    )

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        before, after = RANKS[number % len(RANKS)]
        attempt = partial(account_trial, oracle, bench.setting, before=before, after=after)
        return until_it_lands(attempt, f"account-{number}-{before}-to-{after}", moment)

    outcomes = bench.all(run_case, list(enumerate(moments)))
    return row_of("account", "kill -9, other ranks: no prompt is lost or taken twice", outcomes)


def carried_row(bench: Bench, name: str, option: Sequence[str], ranks: Sequence[Any]) -> Row:
    """Kills of the trainer at random moments, where completions go on in later rounds; an engine takes its time for
    each token, so that rounds end with some under way. `ranks`: pairs of their numbers before and after, in turn."""
    oracle = bench.oracle()
    moments = draw_moments(
        max(3, bench.count // 3), steps=bench.job.steps, seed=bench.seed, row=name
    )
    setting = replace(
        bench.setting, scripted={**(bench.setting.scripted or {}), "--token-s": "0.03"}
    )
    slow = replace(oracle, job=replace(oracle.job, more=(*oracle.job.more, *option)))

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        before, after = ranks[number % len(ranks)]
        attempt = partial(account_trial, slow, setting, before=before, after=after)
        outcome = until_it_lands(attempt, f"{name}-{number}", moment)
        return refuse_idle(outcome, setting)

    outcomes = bench.all(run_case, list(enumerate(moments)))
    return row_of(
        name,
        "kill -9 where completions take several rounds: none is lost or taken twice",
        outcomes,
    )


def refuse_idle(outcome: Outcome, setting: Setting) -> Outcome:
    """Fail a trial that shows nothing, because no round left a completion under way."""
    rounds = read_rounds(RunFolder(setting.place / outcome.name).journal)
    if any(state["unfinished_groups"] for round_ in rounds for state in round_["states"]):
        return outcome
    note = "no round left a completion under way"
    return replace(outcome, difference=Difference(notes=(note,)))


RANKS = ((1, 1), (2, 1), (1, 2))


_KILL = kill("trainer")


def account_trial(
    oracle: Oracle,
    setting: Setting,
    name: str,
    moment: Moment,
    *,
    before: int = 1,
    after: int = 1,
    deed: Deed = _KILL,
) -> Outcome:
    """A run of `before` ranks, which goes on with `after`. `oracle` is of the plain job: it lends its pace."""
    job = dynamic(replace(oracle.job, ranks=before))
    run = Run(setting, job.words(setting.place / name), setting.place / name)
    try:
        landed = wait_for_moment(run, moment, oracle) and deed(run)
        phase = phase_of(
            run.glimpsed or glimpse(run.folder),
            steps=job.steps,
            checkpoint_every=job.checkpoint_every,
        )
        status, left = let_end(run, timeout_s=oracle.limit_s)
        said, at_kill = run.tail(1), read_result(run.folder)
    finally:
        run.end()
    outcome = Outcome(name, (status,), phase=phase, left=left, said=said, landed=landed)
    if status not in (None, 0):
        outcome = go_on(outcome, replace(oracle, job=replace(job, ranks=after)), setting)
    problems = account(read_rounds(run.folder.journal), steps=job.steps, seed=job.seed)
    seen = compare_steps(at_kill, read_result(run.folder)) if before == after else Difference()
    return replace(outcome, difference=Difference(seen.largest, (*seen.notes, *problems)))


MOST_COST = 0.03


"""The share of step time that protection may take."""


_COST_STEPS = 10


_COST_LIMIT_S = 1800.0


def cost_row(bench: Bench) -> Row:
    """Steps of the quickstart, whose model is a real one; the share of its step time that the parts took."""
    package = copy_package(bench.place / "timed-package", PARTS)
    times = bench.place / "times.log"
    setting = replace(bench.setting, package=package, environment={TIMES_VARIABLE: str(times)})
    output = bench.place / "cost"
    words = [
        "grpo",
        "--recipe",
        "quickstart",
        "--steps",
        str(_COST_STEPS),
        "--output",
        str(output),
    ]
    words += [
        "--set",
        f"engine.environment=[{TIMES_VARIABLE}]",
    ]  # engines get no variable that is not named
    run = Run(setting, words, output)
    try:
        status = run.wait(timeout_s=_COST_LIMIT_S)
    finally:
        run.end()
    if status != 0:
        raise RunError(f"the quickstart ended with {status}: {run.tail(1)} (see {run.log})")
    seconds = read_times(times)
    steps = sum(row["ycore/time/step"] for row in read_metrics(run.folder.metrics))
    share = sum(seconds.values()) / steps
    missing = [patch.name for patch in PARTS if patch.name.removeprefix("time ") not in seconds]
    listed = ", ".join(f"{part} {100 * took / steps:.2f} %" for part, took in seconds.items())
    is_good = share <= MOST_COST and not missing
    return Row(
        "cost",
        f"protection takes {100 * share:.2f} % of step time, at most {100 * MOST_COST:.0f} % ({listed})",
        int(is_good),
        1,
        failures=() if is_good else (f"{share:.4f} of step time; not met at all: {missing}",),
        more={"share": share, "seconds": seconds, "step_seconds": steps},
    )
