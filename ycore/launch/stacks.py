"""The stack of every process of a run, in one file, when one of them did not answer in time.

Our own processes, and vLLM's engine core through ycore's extension, write their stacks to their logs on SIGUSR2
(Python's faulthandler), which they can do in the midst of a call that never ends. What they wrote is collected here.
Of a process that cannot be asked, what the kernel tells stands instead: its state, and what it waits for.

Not here: when that is done (`supervise`).
"""

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from ycore.launch.processes import is_stopped

_WITHIN_S = 1.0
_QUIET_S = 0.05  # a stack is whole when the log has not grown for so long


def write_stacks(processes: Iterable[psutil.Process], path: Path, *, why: str) -> Path:
    """Ask each of them in turn; returns `path`, readable by its owner only."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8") as file:
        file.write(f"{why}\n")
        for process in processes:
            file.write(f"\n{_title(process)}\n{_stack(process.pid)}\n")
    return path


def _title(process: psutil.Process) -> str:
    try:
        return f"== process {process.pid}: {' '.join(process.cmdline()[:6])}"
    except psutil.Error:
        return f"== process {process.pid}: ended"


def _stack(pid: int) -> str:
    log = _log_of(pid)
    if log is None or not _catches(pid, signal.SIGUSR2):
        return f"cannot be asked for its stack; {_as_the_kernel_sees_it(pid)}"
    state = _as_the_kernel_sees_it(pid)
    before = log.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    if is_stopped(pid):
        os.kill(pid, signal.SIGCONT)  # it is to be killed in any case, and so says where it was
        state += "; let go on, so that it could tell"
    said = _what_grew(log, before)
    return f"{state}\n{said}" if said else f"did not tell its stack within {_WITHIN_S:.0f} s; {state}"


def _log_of(pid: int) -> Path | None:
    """The file that a process's standard error goes to, if it is one."""
    try:
        target = Path(os.readlink(f"/proc/{pid}/fd/2"))
    except OSError:
        return None
    return target if target.is_file() else None


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether it has a handler; any other process would end of the signal."""
    caught = _status(pid).get("SigCgt")
    return caught is not None and bool(int(caught, 16) >> (number - 1) & 1)


def _as_the_kernel_sees_it(pid: int) -> str:
    state = _status(pid).get("State", "gone")
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except OSError:
        where = ""
    return f"state {state}" + (f", in {where}" if where else "")


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _what_grew(log: Path, before: int) -> str:
    deadline = time.monotonic() + _WITHIN_S
    size, grew = before, time.monotonic()
    while time.monotonic() < deadline:
        now = log.stat().st_size
        if now > size:
            size, grew = now, time.monotonic()
        elif size > before and time.monotonic() - grew > _QUIET_S:
            break
        time.sleep(0.01)
    with log.open("rb") as file:
        file.seek(before)
        return file.read(size - before).decode(errors="replace").rstrip()
