"""Rows: a run whose completions have turns, with a tool and an environment, is killed, stopped, or has a full disk.

The environment draws at every call. So its worlds are the same again only where a resume seeds them alike, and takes
what the journal has; the comparison covers each token and each answer of every round.
"""

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from tests.chaos.bench import Bench, Row, row_of
from tests.chaos.job import CALLED
from tests.chaos.moments import Moment, draw_moments, glimpse
from tests.chaos.rows_kill import DEADLINES, pause
from tests.chaos.runs import Run
from tests.chaos.trial import Deed, Oracle, Outcome, kill, trial, until_it_lands
from ycore.errors import RunError
from ycore.run.files import RunFolder

_FUNCTIONS = ("walk", "double")
_DISK_MB = 64
_TOOL_FOR_GOOD = "tool-for-good"
_MOST_LEFT = 200_000  # bytes that a full disk has left: a save of the tiny model takes more, a row of metrics less


def world_oracle(bench: Bench) -> Oracle:
    """The undisturbed run, of an engine that calls; RunError where no world was met."""
    scripted = {**(bench.setting.scripted or {}), "--calls": ",".join(_FUNCTIONS)}
    job = replace(bench.job, has_world=True)
    oracle = replace(bench, job=job, setting=replace(bench.setting, scripted=scripted)).oracle()
    turns = [
        completion[2]
        for round_ in oracle.result.written.values()
        for _, _, *group in round_
        for completion in group
    ]
    if max(map(len, turns)) < 5 or not any(
        len(completion_turns) < 2 for completion_turns in turns
    ):
        raise RunError(
            f"equality with the whole run would prove nothing: {sorted(map(len, turns))} turns"
        )
    return replace(oracle, pace=replace(oracle.pace, end_s=oracle.pace.until_model_s))


def kill_world_row(bench: Bench) -> Row:
    """SIGKILL of the launcher and of the trainer, in turn."""
    deeds = {"launcher": kill("launcher"), "trainer": kill("trainer")}
    return _row(
        bench,
        "kill-world",
        "kill -9 of launcher or trainer, with a tool and an environment",
        deeds,
    )


def _interrupt(run: Run) -> bool:
    run.process.send_signal(signal.SIGINT)
    return run.exit_code is None


def stop_world_row(bench: Bench) -> Row:
    """Ctrl-C; SIGSTOP of trainer and of a tool's process for a while; of the trainer for good.

    A tool's process that is stopped for good is ended at its deadline, and the policy is told. The transcript is then
    another one: what is asked of such a run is that it goes on to its end, and that it was told.
    """
    deeds: Mapping[str, Deed] = {
        "ctrl-c": _interrupt,
        "tool": pause("tool"),
        _TOOL_FOR_GOOD: _stop_tools,
        "trainer": pause("trainer"),
        "for-good": kill("trainer", signal.SIGSTOP),
    }
    return _row(
        bench,
        "stop-world",
        "Ctrl-C or SIGSTOP, with a tool and an environment",
        deeds,
        stops=True,
    )


def _stop_tools(run: Run) -> bool:
    """SIGSTOP, and never SIGCONT, to the process groups of all tools and environments, at the next call."""
    if not run.wait_for(lambda: bool(run.role("tool")), timeout_s=60.0):
        return False
    run_groups = {
        os.getpgid(process.pid)
        for role in ("launcher", "trainer")
        for process in run.role(role)
    }
    groups = {os.getpgid(process.pid) for process in run.role("tool")} - run_groups
    log = run.folder.log("tools")
    before = _num_calls(log)
    if not run.wait_for(lambda: _num_calls(log) > before, timeout_s=60.0):
        return False
    run.glimpsed = glimpse(run.folder)
    for group in groups:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGSTOP)
    return bool(groups)


def _num_calls(log: Path) -> int:
    return log.read_bytes().count(CALLED.encode())


def _was_told(run_folder: Path) -> bool:
    """Whether the policy read somewhere that an answer came too late."""
    return any(
        b"timeout after " in file.read_bytes()
        for file in RunFolder(run_folder).journal.iterdir()
    )


def disk_world_row(bench: Bench) -> Row:
    """A small disk of the run's own becomes full at a random moment; with room again, it goes on."""
    oracle, name = world_oracle(bench), "full-disk-world"
    moments = draw_moments(
        max(2, bench.count // 3), steps=bench.job.steps - 1, seed=bench.seed, row=name
    )

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        leave = random.Random(f"{bench.seed}/{name}/{number}").randint(0, _MOST_LEFT)

        def attempt(name: str, at: Moment) -> Outcome:
            with small_disk(bench.place / f"disk-of-{name}") as disk:
                return trial(f"{disk.name}/{name}", oracle, at, fills(disk, leave=leave))

        return until_it_lands(attempt, f"{name}-{number}", moment)

    outcomes = bench.all(run_case, list(enumerate(moments)))
    return row_of(
        name, "a disk that is full at a random moment, with a tool and an environment", outcomes
    )


def _row(
    bench: Bench, name: str, description: str, deeds: Mapping[str, Deed], *, stops: bool = False
) -> Row:
    """The deeds in turn, after the start where they are to be noticed by what goes on."""
    oracle = world_oracle(bench)
    if stops:  # the deadlines change nothing of the result
        words = tuple(
            word for key, value in DEADLINES.items() for word in ("--set", f"{key}={value}")
        )
        oracle = replace(oracle, job=replace(oracle.job, more=words))
    steps = bench.job.steps - stops
    moments = draw_moments(
        max(len(deeds), bench.count // 3), steps=steps, seed=bench.seed, row=name
    )

    def attempt(name: str, at: Moment, kind: str) -> Outcome:
        if kind != _TOOL_FOR_GOOD:
            return trial(name, oracle, at, deeds[kind])
        outcome = trial(name, replace(oracle, repeats=False), at, deeds[kind])
        return replace(
            outcome, landed=outcome.landed and _was_told(oracle.setting.place / name)
        )

    def run_case(case: tuple[int, Moment]) -> Outcome:
        number, moment = case
        kind = list(deeds)[number % len(deeds)]
        moment = replace(moment, steps=max(1, moment.steps)) if stops else moment
        return until_it_lands(
            lambda name, at: attempt(name, at, kind), f"{name}-{number}-{kind}", moment
        )

    return row_of(name, description, bench.all(run_case, list(enumerate(moments))))


def fills(disk: Path, *, leave: int) -> Deed:
    """Fill the disk but for so many bytes, and make room once the run has ended."""

    def deed(run: Run) -> bool:
        run.glimpsed = glimpse(run.folder)
        filler = disk / "filler"
        with suppress(OSError):  # full already, where the run writes meanwhile
            filler.write_bytes(b"\0" * max(0, shutil.disk_usage(disk).free - leave))
        run.wait(timeout_s=600.0)
        filler.unlink()
        return True

    return deed


@contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """A small disk; RunError where none may be mounted."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "none", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        raise RunError("no disk may be mounted here; run the row as root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
