"""Any file operation of a run may fail: the run ends in one line, and its resume equals the undisturbed run."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model

HERE = Path(__file__).parent
ERRORS = {
    "open": ("EMFILE", "EROFS", "EIO"),
    "write": ("ENOSPC", "EIO", "EPIPE", "EINTR"),
    "fsync": ("EIO", "ENOSPC", "EINTR"),
    "rename": ("EROFS", "EIO", "ENOSPC"),
    "unlink": ("EROFS", "EIO"),
    "mkdir": ("ENOSPC", "EROFS"),
}
PARTS = 5
"""Tests that the faults are shared between, each of some minutes."""


class FaultyRuns:
    """The process of tests/chaos/faulty_runs.py."""

    def __init__(self, place: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("there is no C compiler (cc), and the shim that fails calls is in C")
        library = place / "faults.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", library, HERE / "faults.c", "-ldl"], check=True
        )
        write_tiny_model(place / "model")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.faulty_runs", str(place)],
            cwd=HERE.parents[1],
            env={
                **os.environ,
                "LD_PRELOAD": str(library),
                "PYTHONPATH": str(HERE.parents[1]),
                "OMP_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def outcome(self, fault: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(fault, file=self._process.stdin, flush=True)
        outcome: dict[str, Any] = json.loads(self._process.stdout.readline())
        return outcome

    def close(self) -> None:
        self._process.communicate()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyRuns]:
    runs = FaultyRuns(tmp_path_factory.mktemp("faults").resolve())
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def undisturbed(runs: FaultyRuns) -> dict[str, Any]:
    outcome = runs.outcome("none")
    assert outcome["status"] == 0, outcome["output"]
    assert len(outcome["rows"]) == 6 and min(outcome["counts"].values()) > 0
    return outcome


def faults(counts: dict[str, int], turn: int) -> list[str]:
    """Each operation of a run once, with one error of its kind; over all turns with each. Every third time all later
    ones fail too.

    EINTR comes once: a call that was interrupted is made again, by Python itself.
    """
    listed = []
    for kind, count in counts.items():
        errors = ERRORS[kind]
        for number in range(count if turn < len(errors) else 0):
            error = getattr(errno, errors[(number + turn) % len(errors)])
            last = 10**9 if number % 3 == 2 and error != errno.EINTR else number
            listed.append(f"{kind}:{error}:{number}:{last}")
    return listed


def problem_of(outcome: dict[str, Any], undisturbed: dict[str, Any]) -> str | None:
    """Say how an outcome breaks the promise; None where it keeps it."""
    lines = outcome["output"].splitlines()
    if "Traceback" in outcome["output"]:
        return "a traceback"
    if outcome["status"]:
        if outcome["status"] not in (1, 2):
            return "another exit status than 1 and 2"
        if sum(line.startswith("error: ") for line in lines) != 1 or ";" not in lines[-1]:
            return "not one line with a way out at the end"
        began = any(line.startswith("step ") for line in lines)
        is_said = "summary.json could not be written" in outcome["output"]
        if began and outcome["summary"] is None and not is_said:
            return "no summary, and not a word of that"
        if outcome["summary"] is not None and outcome["summary"]["status"] != "failed":
            return "its summary does not say that it failed"
        if not outcome["resumed"].startswith("exit status 0\n"):
            return "its resume fails"
    if outcome["rows"] != undisturbed["rows"] or outcome["model"] != undisturbed["model"]:
        return "other results than undisturbed"
    return None


@pytest.mark.verify
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("part", range(PARTS))
def test_a_failed_file_operation_is_one_line_and_an_exact_resume(
    runs: FaultyRuns, undisturbed: dict[str, Any], part: int, turn: int
) -> None:
    problems = []
    tried = faults(undisturbed["counts"], turn)[part::PARTS]
    for fault in tried:
        outcome = runs.outcome(fault)
        if problem := problem_of(outcome, undisturbed):
            problems.append(
                f"{fault} at {outcome['failed_path']}: {problem}\n{outcome['output'][-1500:]}\n{outcome['resumed'][-500:]}"
            )
    print(f"{len(tried)} faults, {len(problems)} problems")
    assert not problems, "\n\n".join(problems)
