"""Row: what is left ten seconds after each way in which a run can end.

Every run here has a reward that starts a daemon in a session of its own and with an empty environment, of which nothing
but its parent tells.

Not here: other rows, which look for leftovers too, after every run.
"""

import hashlib
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import psutil

from ycore.selftest.bench import Bench, Row, row_of
from ycore.selftest.comparison import Difference
from ycore.selftest.job import DAEMON
from ycore.selftest.moments import Moment, draw_moments
from ycore.selftest.runs import Run, leftovers
from ycore.selftest.trial import INTERRUPTED, Outcome, wait_for_moment

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
    each = max(1, bench.count // 3)
    moments = draw_moments(each * len(ENDS), steps=bench.job.steps - 1, seed=bench.seed, row="exits")
    kinds = [kind for kind in ENDS for _ in range(each)]
    cases = [(number, kind, moment) for number, (kind, moment) in enumerate(zip(kinds, moments, strict=True))]
    outcomes = bench.all(lambda case: end_one(bench, *case), cases, good=_is_good)
    return row_of("leftovers", "nothing is left 10 s after an exit of each kind", outcomes, good=_is_good)


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
        left = [*leftovers(run), *(f"a daemon, process {process.pid}" for process in _named(daemon))]
    finally:
        run.end()
        for process in _named(daemon):
            process.kill()
    notes = () if status in right else (f"exit status {status}, not {' or '.join(map(str, right))}",)
    difference, seconds = Difference(notes=notes), time.monotonic() - began
    return Outcome(name, (status,), difference, left=tuple(left), said=run.tail(1), seconds=seconds, landed=landed)


def _is_good(outcome: Outcome) -> bool:
    return outcome.landed and outcome.is_clean and outcome.difference.is_none


def _a_name_for_the_daemon(bench: Bench, name: str) -> str:
    return DAEMON + hashlib.sha256(f"{bench.place}/{name}".encode()).hexdigest()[:12]


def _named(daemon: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if daemon in (process.info["cmdline"] or ())]
