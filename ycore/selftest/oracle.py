"""The whole run: taken twice, so that equality with it means something, and timed, so that kills can be placed.

Not here: what is done to other runs (`trial`).
"""

import time
from concurrent.futures import Executor
from dataclasses import dataclass

from ycore.errors import RunError
from ycore.run.paths import RunFolder
from ycore.selftest.comparison import Result, compare, is_lively, read_result
from ycore.selftest.job import Job
from ycore.selftest.moments import Pace, pace_of
from ycore.selftest.runs import Run, Setting, leftovers

_FIRST_WITHIN_S = 600.0
_LEAST_LIMIT_S = 120.0
_PATIENCE = 4.0  # times the whole run's length, after which a run counts as hung


@dataclass(frozen=True, slots=True)
class Oracle:
    """The run that nothing was done to."""

    job: Job
    setting: Setting
    result: Result
    folder: RunFolder
    pace: Pace
    limit_s: float
    """How long a run may take before it counts as hung."""

    repeats: bool = True
    """Whether a second whole run was the same; a real engine may answer otherwise the second time."""


def make_oracle(job: Job, setting: Setting, pool: Executor, *, name: str = "whole", times: int = 2) -> Oracle:
    """RunError where the run fails, leaves something, cannot tell right from wrong, or (scripted) does not repeat."""
    runs = [pool.submit(whole_run, job, setting, name=f"{name}-{number}") for number in range(times)]
    (folder, pace), *others = [run.result() for run in runs]
    result = read_result(folder)
    problem = is_lively(result)
    if problem is not None:
        raise RunError(f"equality with the whole run would prove nothing: {problem}; see {folder.root}")
    differences = [compare(result, read_result(other)) for other, _ in others]
    repeats = all(difference.is_none for difference in differences)
    if not repeats and job.tier == "scripted":
        raise RunError(f"the whole run does not repeat: {differences[0]}; see {folder.root} and {others[0][0].root}")
    length = pace.start_s + job.steps * pace.step_s + pace.end_s
    limit_s = max(_LEAST_LIMIT_S, _PATIENCE * length)
    return Oracle(job, setting, result, folder, pace, limit_s=limit_s, repeats=repeats)


def whole_run(job: Job, setting: Setting, *, name: str) -> tuple[RunFolder, Pace]:
    """One run from its start to its end, and when its steps came; RunError unless it ends well."""
    output = setting.place / name
    run = Run(setting, job.words(output), output)
    appeared: list[float] = []
    modelled = 0.0
    try:
        while run.exit_code is None and time.monotonic() - run.began < _FIRST_WITHIN_S:
            new = run.num_steps() - len(appeared)
            appeared += [time.monotonic() - run.began] * new
            if modelled == 0.0 and run.folder.model.is_dir():
                modelled = time.monotonic() - run.began
            time.sleep(0.005)
        ended, status = time.monotonic() - run.began, run.exit_code
        left = leftovers(run)
    finally:
        run.end()
    if status != 0 or left or len(appeared) != job.steps:
        raise RunError(
            f"the whole run ended with {status} after {len(appeared)} steps: {run.tail(1)}"
            + (f"; it left {', '.join(left)}" if left else "")
            + f" (see {run.log})"
        )
    return run.folder, pace_of(appeared, modelled=modelled, ended=ended)
