"""Rows: command lines that are wrong, command lines that are right, and thousands of made-up configurations.

Not here: the command lines (`command_lines`) and the making up (`made_up`).
"""

import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ycore.selftest.bench import Bench, Row
from ycore.selftest.command_lines import BAD, GOOD, GRPO, write_place
from ycore.selftest.made_up import check_made_up
from ycore.selftest.runs import Setting

_WITHIN_S = 10.0
_NUM_MADE_UP = 10_000
_SETTLED_S = 60.0  # a machine that is busy with other things is no reason to call an answer wrong; it is told apart


def bad_input_row(bench: Bench, *, only: int | None = None) -> Row:
    """Exit status 2, one line that says what is expected, nothing else, in 10 s."""
    place = write_place(bench.place / "bad-input")
    cases = BAD[:: max(1, len(BAD) // only)] if only else BAD
    problems = list(bench.pool.map(lambda case: _problem_of_bad(bench.setting, place, *case), cases))
    return _row("bad-input", "wrong command lines refused in one line, in 10 s", [more for more, _ in cases], problems)


def good_input_row(bench: Bench, *, only: int | None = None) -> Row:
    """Exit status 0."""
    place = write_place(bench.place / "good-input")
    cases = GOOD[:only]
    problems = list(bench.pool.map(lambda more: _problem_of_good(bench.setting, place, more), cases))
    return _row("good-input", "right command lines, none refused", cases, problems)


def made_up_row(bench: Bench, *, count: int = _NUM_MADE_UP) -> Row:
    """In this process: a configuration is accepted or refused in ycore's own words; nothing else may come of it."""
    accepted, failures = check_made_up(count, seed=bench.seed)
    return Row(
        "made-up",
        "made-up configurations without an unhandled exception",
        count - len(failures),
        count,
        failures=tuple(failures),
        more={"accepted": accepted, "refused": count - accepted - len(failures)},
    )


def _row(name: str, what: str, cases: Sequence[str], problems: Sequence[str | None]) -> Row:
    failures = tuple(
        f"{case or '(nothing more)'}: {problem}" for case, problem in zip(cases, problems, strict=True) if problem
    )
    return Row(name, what, len(cases) - len(failures), len(cases), failures=failures)


def _problem_of_bad(setting: Setting, place: Path, more: str, words: str) -> str | None:
    done, seconds = _run(setting, place, more)
    if done is None or seconds > _WITHIN_S:
        return f"no answer within {_WITHIN_S:.0f} s"
    if done.returncode != 2:
        return f"exit status {done.returncode}"
    if done.stdout or done.stderr.count("\n") != 1 or not done.stderr.startswith("error: "):
        return f"not one error line: {(done.stdout + done.stderr)[:200]!r}"
    expected = words.format(place=place)
    return None if expected in done.stderr else f"no {expected!r} in {done.stderr[:200]!r}"


def _problem_of_good(setting: Setting, place: Path, more: str) -> str | None:
    done, _ = _run(setting, place, more)
    if done is None:
        return f"no answer within {_SETTLED_S:.0f} s"
    return None if done.returncode == 0 else f"exit status {done.returncode}: {done.stderr.strip()[:300]}"


def _run(setting: Setting, place: Path, more: str) -> tuple["subprocess.CompletedProcess[str] | None", float]:
    words = (GRPO + more).format(place=place).split()
    began = time.monotonic()
    try:
        done = subprocess.run(
            replace(setting, scripted=None).command(words),
            cwd=setting.place,
            env=setting.full_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SETTLED_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        done = None
    return done, time.monotonic() - began
