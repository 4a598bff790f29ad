"""One trial: a real run, one disturbance at a moment, at most one resume, and a comparison with the undisturbed run.

The undisturbed run is the oracle. It is run twice, so that equality with it means something, and timed, so that kills
can be placed.
"""

import signal
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.job import Job
from tests.chaos.moments import Moment, Pace, Phase, glimpse, pace_of, phase_of
from tests.chaos.results import (
    SAME,
    Difference,
    Result,
    compare,
    compare_steps,
    is_lively,
    read_result,
)
from tests.chaos.runs import Run, Setting, leftovers, let_end
from ycore.errors import RunError
from ycore.run.files import RunFolder, read_json

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


def make_oracle(
    job: Job, setting: Setting, pool: Executor, *, name: str = "whole", times: int = 2
) -> Oracle:
    """Make the oracle; RunError where a run fails, leaves something, proves nothing, or (scripted) does not repeat."""
    runs = [
        pool.submit(whole_run, job, setting, name=f"{name}-{number}") for number in range(times)
    ]
    (folder, pace), *other_runs = [run.result() for run in runs]
    result = read_result(folder)
    problem = is_lively(result)
    if problem is not None:
        raise RunError(
            f"equality with the whole run would prove nothing: {problem}; see {folder.root}"
        )
    differences = [compare(result, read_result(other)) for other, _ in other_runs]
    repeats = all(difference.is_none for difference in differences)
    if not repeats and job.tier == "scripted":
        raise RunError(
            f"the whole run does not repeat: {differences[0]}; see {folder.root} and {other_runs[0][0].root}"
        )
    length = pace.start_s + job.steps * pace.step_s + pace.end_s
    limit_s = max(_LEAST_LIMIT_S, _PATIENCE * length)
    return Oracle(job, setting, result, folder, pace, limit_s=limit_s, repeats=repeats)


def whole_run(job: Job, setting: Setting, *, name: str) -> tuple[RunFolder, Pace]:
    """Make one run from its start to its end, and say when its steps came; RunError unless it ends well."""
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


INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one trial."""

    name: str
    exits: tuple[int | None, ...]
    """The exit status of the run and, where there was one, of the resume; None is a run that hung."""

    difference: Difference = SAME
    phase: Phase | None = None
    left: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0
    landed: bool = True
    """Whether what was to be done was done, before the run had ended."""

    steps_before_resume: int | None = None
    differs_from_whole: bool = False
    """Whether it ended unlike the whole run; reported, not judged, in a tier whose whole run does not repeat."""

    had_finished: bool = False
    """Whether the run was through, as its summary says: who is killed after that leaves nothing to resume."""

    @property
    def is_equal(self) -> bool:
        return (self.exits[-1] == 0 or self.had_finished) and self.difference.is_none

    @property
    def is_wrong(self) -> bool:
        """The worst there is: another result, and exit status 0."""
        return self.exits[-1] == 0 and not self.difference.is_none

    @property
    def is_clean(self) -> bool:
        return not self.left

    @property
    def passes(self) -> bool:
        return self.is_equal and self.is_clean

    def __str__(self) -> str:
        parts = [f"{self.name}: exit {', then '.join(map(str, self.exits))}"]
        parts += [f"in {self.phase}"] if self.phase else []
        parts += [] if self.landed else ["it did not land"]
        parts += [f"difference {self.difference}"] if not self.difference.is_none else []
        parts += [f"left {', '.join(self.left)}"] if self.left else []
        parts += [self.said] if self.said and not self.passes else []
        return "; ".join(parts)


Deed = Callable[[Run], bool]
"""Does something to a run, and returns whether it could."""


def kill(role: str, number: signal.Signals = signal.SIGKILL, *, which: int = 0) -> Deed:
    """Signal one process of a role."""
    return lambda run: run.send(role, number, which=which)


def wait_for_moment(run: Run, moment: Moment, oracle: Oracle) -> bool:
    """Return at the moment; False where the run had ended before."""
    if not run.wait_for(lambda: run.num_steps() >= moment.steps, timeout_s=oracle.limit_s):
        return False
    due = time.monotonic() + moment.delay_s(oracle.pace, of=oracle.job.steps)
    return (
        run.wait_for(lambda: time.monotonic() >= due, timeout_s=oracle.limit_s)
        and run.exit_code is None
    )


def trial(
    name: str, oracle: Oracle, moment: Moment, deed: Deed, *, setting: Setting | None = None
) -> Outcome:
    """Start, do the deed at the moment, let it end, resume it once where it did not finish, and compare."""
    setting, job, began = setting or oracle.setting, oracle.job, time.monotonic()
    output = setting.place / name
    run = Run(setting, job.words(output), output)
    try:
        in_time = wait_for_moment(run, moment, oracle)
        landed = in_time and deed(run)
        phase = phase_of(
            run.glimpsed or glimpse(run.folder),
            steps=job.steps,
            checkpoint_every=job.checkpoint_every,
        )
        first, left = let_end(run, timeout_s=oracle.limit_s)
        said, before = run.tail(1), read_result(run.folder)
    finally:
        run.end()
    finished = has_finished(run.folder)
    outcome = Outcome(
        name, (first,), phase=phase, left=left, said=said, landed=landed, had_finished=finished
    )
    if first not in (None, 0) and not finished:
        outcome = go_on(outcome, oracle, setting)
    after = read_result(run.folder)
    seen = compare(oracle.result, after)
    difference = seen if oracle.repeats else compare_steps(before, after)
    seconds = time.monotonic() - began
    return replace(
        outcome, difference=difference, differs_from_whole=not seen.is_none, seconds=seconds
    )


_AIMS = 4


def until_it_lands(
    attempt: Callable[[str, Moment], Outcome], name: str, moment: Moment
) -> Outcome:
    """A trial whose deed came after the run's end shows nothing: it is made again, each time for half the share.

    One that fails is never made again, and one whose deed never lands is returned as such, and fails.
    """
    for number in range(_AIMS):
        outcome = attempt(f"{name}-again-{number}" if number else name, moment)
        if outcome.landed or not outcome.passes:
            break
        moment = replace(moment, share=moment.share / 2)
    return outcome


def has_finished(folder: RunFolder) -> bool:
    """Whether the run's last word was that it is through."""
    return folder.summary.is_file() and read_json(folder.summary).get("status") == "finished"


def go_on(outcome: Outcome, oracle: Oracle, setting: Setting) -> Outcome:
    """Resume the one time that a trial may."""
    output = setting.place / outcome.name
    run = Run(setting, resume_words(oracle.job, output), output)
    try:
        status, left = let_end(run, timeout_s=oracle.limit_s)
    finally:
        run.end()
    said = run.tail(1) if status != 0 else outcome.said
    return replace(
        outcome, exits=(*outcome.exits, status), left=(*outcome.left, *left), said=said
    )


def resume_words(job: Job, output: Path) -> list[str]:
    """Return the same command with `--resume`; a run that was killed before it had a folder is simply begun."""
    words = job.words(output)
    return [*words, "--resume"] if (output / "run.json").is_file() else words
