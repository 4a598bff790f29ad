"""Rows: processes killed and stopped at moments drawn from the seed.

Not here: kills aimed at a save (`rows_save`), and what a kill leaves behind when nothing goes on (`rows_exits`).
"""

import signal
import time
from dataclasses import replace

from ycore.selftest.bench import Bench, Row, row_of
from ycore.selftest.moments import Moment, draw_moments
from ycore.selftest.runs import Run
from ycore.selftest.trial import Deed, Outcome, kill, trial

KILLED = ("launcher", "trainer", "rollout", "reward")
JUDGE = "judge"
RANK = "rank"
_RANKS = 2
_RANKED = 1 + _RANKS  # accelerate's launcher, then its ranks
_SHORT_S = 3.0
_DEADLINES = {"engine.health_timeout_s": 8, "engine.request_timeout_s": 15, "step_timeout_s": 60}


def kill_row(bench: Bench, role: str) -> Row:
    """SIGKILL of one process of the role."""
    oracle = bench.oracle(replace(bench.job, has_judge=role == JUDGE))
    if role != "launcher":  # the others are gone while the launcher still sums up
        oracle = replace(oracle, pace=replace(oracle.pace, end_s=oracle.pace.until_model_s))
    name = f"kill-{role}"
    moments = draw_moments(bench.count, steps=bench.job.steps, seed=bench.seed, row=name)
    numbered = list(enumerate(moments))
    outcomes = bench.all(lambda item: trial(f"{name}-{item[0]}", oracle, item[1], kill(role)), numbered)
    return row_of(name, f"kill -9 of the {role} at a random moment", outcomes)


def rank_row(bench: Bench) -> Row:
    """SIGKILL of accelerate's launcher or of a rank, in turn, where the trainer has two ranks."""
    oracle = bench.oracle(replace(bench.job, ranks=_RANKS))
    oracle = replace(oracle, pace=replace(oracle.pace, end_s=oracle.pace.until_model_s))
    name = f"kill-{RANK}"
    moments = draw_moments(max(_RANKED, bench.count // 2), steps=bench.job.steps, seed=bench.seed, row=name)

    def one(item: tuple[int, Moment]) -> Outcome:
        number, moment = item
        return trial(f"{name}-{number}", oracle, moment, kill("trainer", which=number % _RANKED))

    outcomes = bench.all(one, list(enumerate(moments)))
    return row_of(name, f"kill -9 of accelerate or of one of {_RANKS} ranks", outcomes)


def stop_row(bench: Bench, role: str) -> Row:
    """SIGSTOP: for a while and then SIGCONT, where nothing may change; and for good, which must be noticed.

    A launcher that is stopped for good is a shell's Ctrl-Z, and nobody is there to notice: it is stopped for a while.
    """
    deadlines = tuple(word for key, value in _DEADLINES.items() for word in ("--set", f"{key}={value}"))
    oracle = replace(bench.oracle(), job=replace(bench.job, more=deadlines))  # they change nothing of the result
    name = f"stop-{role}"
    moments = draw_moments(max(2, bench.count // 5), steps=bench.job.steps - 1, seed=bench.seed, row=name)
    numbered = [(number, replace(moment, steps=max(1, moment.steps))) for number, moment in enumerate(moments)]

    def one(item: tuple[int, Moment]) -> Outcome:
        number, moment = item
        for_good = number % 2 == 1 and role != "launcher"
        deed = kill(role, signal.SIGSTOP) if for_good else pause(role)
        return trial(f"{name}-{number}{'-for-good' if for_good else ''}", oracle, moment, deed)

    return row_of(name, f"SIGSTOP of the {role}: for {_SHORT_S:.0f} s, or for good", bench.all(one, numbered))


def pause(role: str) -> Deed:
    """Stop one process of the role, and let it go on after a while."""

    def deed(run: Run) -> bool:
        stopped = run.role(role)[:1]
        if not run.send(role, signal.SIGSTOP):
            return False
        time.sleep(_SHORT_S)
        for process in stopped or run.role(role)[:1]:
            process.send_signal(signal.SIGCONT)
        return True

    return deed
