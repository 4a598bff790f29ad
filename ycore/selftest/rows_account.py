"""Row: kills of a run with dynamic sampling and groups left over, after which the account of prompts must be even.

Not here: the account itself (`accounting`).
"""

from dataclasses import replace

from ycore.selftest.accounting import account, read_rounds
from ycore.selftest.bench import Bench, Row, row_of
from ycore.selftest.comparison import Difference
from ycore.selftest.job import Job
from ycore.selftest.moments import Moment, draw_moments
from ycore.selftest.oracle import Oracle
from ycore.selftest.phases import glimpse, phase_of
from ycore.selftest.runs import Run, Setting, let_end
from ycore.selftest.trial import Outcome, go_on, kill, wait_for_moment

_KEYS = ("sampling.dynamic=true", "sampling.max_age=100")


def dynamic(job: Job) -> Job:
    """The job with dynamic sampling, rows from which nothing can be learned, and a journal that is kept whole."""
    words = [word for key in _KEYS for word in ("--set", key)]
    return replace(job, reward="variety_or_dull", more=(*job.more, *words, "--keep-journal"))


def account_row(bench: Bench) -> Row:
    """Kills of the trainer at random moments."""
    oracle = bench.oracle()
    moments = draw_moments(max(2, bench.count // 3), steps=bench.job.steps, seed=bench.seed, row="account")
    cases = list(enumerate(moments))
    outcomes = bench.all(lambda case: account_trial(oracle, bench.setting, f"account-{case[0]}", case[1]), cases)
    return row_of("account", "dynamic sampling, kill -9: no prompt is lost or taken twice", outcomes)


def account_trial(oracle: Oracle, setting: Setting, name: str, moment: Moment) -> Outcome:
    """`oracle` is of the plain job: it lends its pace."""
    job = dynamic(oracle.job)
    run = Run(setting, job.words(setting.place / name), setting.place / name)
    try:
        landed = wait_for_moment(run, moment, oracle) and kill("trainer")(run)
        phase = phase_of(run.glimpsed or glimpse(run.folder), steps=job.steps, checkpoint_every=job.checkpoint_every)
        status, left = let_end(run, timeout_s=oracle.limit_s)
    finally:
        run.end()
    outcome = Outcome(name, (status,), phase=phase, left=left, said=run.tail(1), landed=landed)
    if status not in (None, 0):
        outcome = go_on(outcome, replace(oracle, job=job), setting)
    problems = account(read_rounds(run.folder.journal), steps=job.steps, seed=job.seed)
    return replace(outcome, difference=Difference(notes=tuple(problems)))
