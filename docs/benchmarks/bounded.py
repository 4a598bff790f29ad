"""Run one process of the benchmark: its output goes to a file, its time is limited, and it leaves nothing behind."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_END_WITHIN_S = 30.0
_POLL_S = 0.1
_TAIL = 2000


class RunFailed(Exception):
    """A process that ended badly or not in time; the message ends with the end of its log."""


class Stopped(Exception):
    """Somebody asked for the end; what was running is gone."""


def run_bounded(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    stop: threading.Event,
) -> float:
    """Run in `folder`, output to `folder/log.txt`; return the seconds it took.

    A signal should set `stop` and do no more: an exception in the midst of starting a process would lose sight of it.
    """
    log = folder / "log.txt"
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = _wait(process, stop, deadline=began + timeout_s)
        finally:
            _end(process)
    if status is None:
        raise RunFailed(
            failure_message(command, f"still running after {timeout_s:g} s; see --timeout", log)
        )
    if status != 0:
        raise RunFailed(failure_message(command, f"exit status {status}", log))
    return time.monotonic() - began


def _wait(
    process: subprocess.Popen[bytes], stop: threading.Event, *, deadline: float
) -> int | None:
    """Return the exit status, or None at the deadline; raise Stopped as soon as `stop` is set."""
    while (status := process.poll()) is None:
        if stop.wait(_POLL_S):
            raise Stopped
        if time.monotonic() > deadline:
            return None
    return status


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask first, so that a run can clear away its own children; then end the whole group."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_WITHIN_S)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def failure_message(command: Sequence[str], reason: str, log: Path) -> str:
    tail = log.read_text(errors="replace")[-_TAIL:]
    return f"{Path(command[0]).name} {command[1]}: {reason} (its output is in {log})\n{tail}"
