"""Rows: processes killed or stopped at random moments and at named points, and what each kind of exit leaves behind.

In the row of exits, the reward starts a daemon in its own session and with an empty environment: only its parent
process shows that it belongs to the run.
"""

import hashlib
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import psutil

from tests.chaos.bench import Bench, Row, is_good, row_of
from tests.chaos.job import DAEMON
from tests.chaos.moments import Moment, draw_moments
from tests.chaos.patches import POINTS, Point, copy_package
from tests.chaos.results import Difference, compare, read_result
from tests.chaos.runs import Run, Setting, leftovers, let_end
from tests.chaos.trial import (
    INTERRUPTED,
    Deed,
    Oracle,
    Outcome,
    go_on,
    has_finished,
    kill,
    trial,
    until_it_lands,
    wait_for_moment,
)
from tests.chaos.witnesses import dies_at

KILLED = ("launcher", "trainer", "rollout", "reward")
JUDGE = "judge"
RANK = "rank"
ALLOCATOR = "allocator"
_RANKS = 2
_RANKED = 1 + _RANKS  # accelerate's launcher, then its ranks
_CURRICULUM = (
    "--set",
    "sampling.curriculum=true",
    "--set",
    "limit=6",
)  # a few rows, which come again and again
_AHEAD = ("--max-staleness", "1")
_SHORT_S = 3.0
DEADLINES = {"engine.health_timeout_s": 8, "engine.request_timeout_s": 15, "step_timeout_s": 60}


def kill_row(bench: Bench, role: str) -> Row:
    """SIGKILL of one process of the role."""
    oracle = bench.oracle(replace(bench.job, has_judge=role == JUDGE))
    if role != "launcher":  # the others are gone while the launcher still sums up
        oracle = replace(oracle, pace=replace(oracle.pace, end_s=oracle.pace.until_model_s))
    name = f"kill-{role}"
    moments = draw_moments(bench.count, steps=bench.job.steps, seed=bench.seed, row=name)

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        return until_it_lands(
            lambda name, at: trial(name, oracle, at, kill(role)), f"{name}-{number}", moment
        )

    outcomes = bench.all(run_case, list(enumerate(moments)))
    return row_of(name, f"kill -9 of the {role} at a random moment", outcomes)


def allocator_row(bench: Bench) -> Row:
    """SIGKILL of the process that decides for the slots that two ranks share."""
    description = f"kill -9 of the allocator of {_RANKS} ranks"
    return _ranked(
        bench, f"kill-{ALLOCATOR}", description, lambda number: kill(ALLOCATOR), least=2
    )


def rank_row(bench: Bench) -> Row:
    """SIGKILL of accelerate's launcher or of a rank, in turn, where the trainer has two ranks."""
    description = f"kill -9 of accelerate or of one of {_RANKS} ranks"

    def one_of(number: int) -> Deed:
        return kill("trainer", which=number % _RANKED)

    return _ranked(bench, f"kill-{RANK}", description, one_of, least=_RANKED, more=_CURRICULUM)


def ahead_row(bench: Bench) -> Row:
    """SIGKILL of the trainer, the rollout engine or the launcher, in turn, where rounds are one step ahead."""
    roles, name = ("trainer", "rollout", "launcher"), "kill-ahead"
    oracle = bench.oracle(replace(bench.job, more=(*bench.job.more, *_AHEAD)))
    oracle = replace(oracle, pace=replace(oracle.pace, end_s=oracle.pace.until_model_s))
    moments = draw_moments(
        max(len(roles), bench.count // 2), steps=bench.job.steps, seed=bench.seed, row=name
    )

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        deed = kill(roles[number % len(roles)])
        return until_it_lands(
            lambda name, at: trial(name, oracle, at, deed), f"{name}-{number}", moment
        )

    return row_of(
        name,
        "kill -9 where rounds are one step ahead",
        bench.all(run_case, list(enumerate(moments))),
    )


def interrupt_row(bench: Bench) -> Row:
    """Ctrl-C, as the launcher gets it, of two ranks that share slots with a judge."""

    def interrupt(run: Run) -> bool:
        run.process.send_signal(signal.SIGINT)
        return True

    def good(outcome: Outcome) -> bool:
        return is_good(outcome) and (outcome.exits[0] == INTERRUPTED or outcome.had_finished)

    description = f"Ctrl-C of {_RANKS} ranks and a judge"
    return _ranked(
        bench,
        "ctrl-c-ranks",
        description,
        lambda number: interrupt,
        least=2,
        has_judge=True,
        good=good,
    )


def _ranked(
    bench: Bench,
    name: str,
    description: str,
    deed_of: Callable[[int], Deed],
    *,
    least: int,
    has_judge: bool = False,
    good: Callable[[Outcome], bool] = is_good,
    more: tuple[str, ...] = (),
) -> Row:
    """Trials with two ranks, half as many as of others. `deed_of`: by the trial's number."""
    oracle = bench.oracle(
        replace(bench.job, ranks=_RANKS, has_judge=has_judge, more=(*bench.job.more, *more))
    )
    oracle = replace(oracle, pace=replace(oracle.pace, end_s=oracle.pace.until_model_s))
    moments = draw_moments(
        max(least, bench.count // 2), steps=bench.job.steps, seed=bench.seed, row=name
    )

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        return until_it_lands(
            lambda name, at: trial(name, oracle, at, deed_of(number)),
            f"{name}-{number}",
            moment,
        )

    outcomes = bench.all(run_case, list(enumerate(moments)), good=good)
    return row_of(name, description, outcomes, good=good)


def stop_row(bench: Bench, role: str) -> Row:
    """SIGSTOP: for a while and then SIGCONT, where nothing may change; and for good, which must be noticed.

    A launcher that is stopped for good is a shell's Ctrl-Z, and nobody is there to notice: it is stopped for a while.
    """
    deadlines = tuple(
        word for key, value in DEADLINES.items() for word in ("--set", f"{key}={value}")
    )
    oracle = replace(
        bench.oracle(), job=replace(bench.job, more=deadlines)
    )  # they change nothing of the result
    name = f"stop-{role}"
    moments = draw_moments(
        max(2, bench.count // 5), steps=bench.job.steps - 1, seed=bench.seed, row=name
    )
    numbered = [
        (number, replace(moment, steps=max(1, moment.steps)))
        for number, moment in enumerate(moments)
    ]

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        for_good = number % 2 == 1 and role != "launcher"
        deed = kill(role, signal.SIGSTOP) if for_good else pause(role)
        trial_name = f"{name}-{number}{'-for-good' if for_good else ''}"
        return until_it_lands(
            lambda name, at: trial(name, oracle, at, deed), trial_name, moment
        )

    return row_of(
        name,
        f"SIGSTOP of the {role}: for {_SHORT_S:.0f} s, or for good",
        bench.all(run_case, numbered),
    )


def pause(role: str) -> Deed:
    """Stop one process of the role, and let it go on after a while."""

    def deed(run: Run) -> bool:
        stopped = run.role(role)[:1]
        if not run.send(role, signal.SIGSTOP):
            return False
        time.sleep(_SHORT_S)
        for process in stopped or run.role(role)[:1]:
            with suppress(
                psutil.NoSuchProcess
            ):  # a tool's process may have been given up meanwhile
                process.send_signal(signal.SIGCONT)
        return True

    return deed


def points_row(
    bench: Bench, *, more: tuple[str, ...] = (), name: str = "kill-at-points"
) -> Row:
    """Each point, at several of the times that a run comes there."""
    oracle = bench.oracle(replace(bench.job, more=(*bench.job.more, *more)))
    package = copy_package(
        bench.place / f"package-of-{name}", tuple(point.patch for point in POINTS)
    )
    setting = replace(bench.setting, package=package)
    cases = [(point, count) for point in POINTS for count in _counts(point, bench)]
    outcomes = bench.all(lambda case: _die_at(name, oracle, setting, *case), cases)
    return row_of(name, "kill -9 at named points of the code", outcomes)


def points_ahead_row(bench: Bench) -> Row:
    return points_row(bench, more=_AHEAD, name="points-ahead")


def _counts(point: Point, bench: Bench) -> list[int]:
    """Which of its times; at 30 moments three, or as many as there are."""
    hits = point.hits(bench.job.steps)
    source = random.Random(f"{bench.seed}/points/{point.name}")
    return sorted(source.sample(range(1, hits + 1), min(hits, max(1, bench.count // 10))))


def _die_at(row: str, oracle: Oracle, setting: Setting, point: Point, count: int) -> Outcome:
    name, began = (
        f"{row}-{point.name.replace(' ', '-').replace(',', '')}-{count}",
        time.monotonic(),
    )
    marker, output = setting.place / f"{name}.reached", setting.place / name
    setting = replace(
        setting, environment={**setting.environment, **dies_at(point.name, count, marker)}
    )
    run = Run(setting, oracle.job.words(output), output)
    try:
        status, left = let_end(run, timeout_s=oracle.limit_s)
    finally:
        run.end()
    finished = has_finished(run.folder)
    outcome = Outcome(
        name,
        (status,),
        left=left,
        said=run.tail(1),
        landed=marker.exists(),
        had_finished=finished,
    )
    if status not in (None, 0) and not finished:
        outcome = go_on(outcome, oracle, setting)
    difference = compare(oracle.result, read_result(run.folder))
    return replace(outcome, difference=difference, seconds=time.monotonic() - began)


End = Callable[[Run], None]
_BETWEEN_S = 0.3


def _signal(number: signal.Signals) -> End:
    return lambda run: run.process.send_signal(number)


def _twice(run: Run) -> None:
    run.process.send_signal(signal.SIGINT)
    time.sleep(_BETWEEN_S)
    run.process.send_signal(signal.SIGINT)


def _nothing(run: Run) -> None:
    pass


ENDS: Mapping[str, tuple[End, tuple[int, ...]]] = {
    "success": (_nothing, (0,)),
    "error": (_nothing, (1,)),
    "ctrl-c": (_signal(signal.SIGINT), (INTERRUPTED,)),
    "ctrl-c-twice": (_twice, (INTERRUPTED,)),
    "sigterm": (_signal(signal.SIGTERM), (INTERRUPTED,)),
    "sighup": (_signal(signal.SIGHUP), (INTERRUPTED,)),
    "terminal-closed": (Run.close_terminal, (INTERRUPTED,)),
    "sigkill": (_signal(signal.SIGKILL), (-signal.SIGKILL,)),
}
"""How a run is ended, and with which exit status it then should."""


def exits_row(bench: Bench) -> Row:
    """Processes, sockets, shared memory, temporary files: nothing."""
    bench.oracle()
    per_kind = max(1, bench.count // 3)
    moments = draw_moments(
        per_kind * len(ENDS), steps=bench.job.steps - 1, seed=bench.seed, row="exits"
    )
    kinds = [kind for kind in ENDS for _ in range(per_kind)]
    cases = [
        (number, kind, moment)
        for number, (kind, moment) in enumerate(zip(kinds, moments, strict=True))
    ]
    outcomes = bench.all(lambda case: end_one(bench, *case), cases, good=_is_clean_end)
    return row_of(
        "leftovers",
        "nothing is left 10 s after an exit of each kind",
        outcomes,
        good=_is_clean_end,
    )


def end_one(bench: Bench, number: int, kind: str, moment: Moment) -> Outcome:
    """One run, ended in this way."""
    name, began = f"exit-{kind}-{number}", time.monotonic()
    end, right = ENDS[kind]
    daemon = _a_name_for_the_daemon(bench, name)
    words = replace(bench.job, reward="with_daemon").words(bench.place / name)
    words += ["--set", f"rewards.0.args.name={daemon}"]
    words += ["--learning-rate", "1e38"] if kind == "error" else []
    run = Run(bench.setting, words, bench.place / name, in_terminal=kind == "terminal-closed")
    try:
        landed = kind in ("success", "error") or wait_for_moment(run, moment, bench.oracle())
        end(run)
        status = run.wait(timeout_s=bench.oracle().limit_s)
        left = [
            *leftovers(run),
            *(f"a daemon, process {process.pid}" for process in _named(daemon)),
        ]
    finally:
        run.end()
        for process in _named(daemon):
            process.kill()
    notes = (
        ()
        if status in right
        else (f"exit status {status}, not {' or '.join(map(str, right))}",)
    )
    difference, seconds = Difference(notes=notes), time.monotonic() - began
    return Outcome(
        name,
        (status,),
        difference,
        left=tuple(left),
        said=run.tail(1),
        seconds=seconds,
        landed=landed,
    )


def _is_clean_end(outcome: Outcome) -> bool:
    return outcome.landed and outcome.is_clean and outcome.difference.is_none


def _a_name_for_the_daemon(bench: Bench, name: str) -> str:
    return DAEMON + hashlib.sha256(f"{bench.place}/{name}".encode()).hexdigest()[:12]


def _named(daemon: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if daemon in (process.info["cmdline"] or ())
    ]
