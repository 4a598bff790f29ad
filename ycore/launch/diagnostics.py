"""Write the stack of every process of a run when one of them hangs."""

import os
import re
import signal
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from ycore.launch.processes import is_stopped

_STACK_WITHIN_S = 1.0
_STACK_ENDS_AFTER_S = 0.05  # a stack is complete when its log has not grown for so long


def write_stacks(processes: Iterable[psutil.Process], path: Path, *, why: str) -> Path:
    """Write the stack of each process to a file that only its owner can read; its first line is `why`.

    ycore's processes, and vLLM's engine core, write their stacks to their logs on SIGUSR2 (Python's faulthandler),
    even in the middle of a call that never ends. Of any other process, its state in the kernel is written instead.
    """
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(f"{why}\n")
        for process in processes:
            try:
                title = " ".join(process.cmdline()[:6])
            except psutil.Error:
                title = "ended"
            file.write(f"\n== process {process.pid}: {title}\n{_stack(process.pid)}\n")
    return path


def _stack(pid: int) -> str:
    wait_channel = _proc(pid, "wchan").strip("0\n")
    state = f"state {_status(pid, 'State') or 'gone'}"
    if wait_channel:
        state += f", in {wait_channel}"
    # A process without a handler would be ended by the signal.
    has_handler = int(_status(pid, "SigCgt") or "0", 16) >> (signal.SIGUSR2 - 1) & 1
    log = Path(os.path.realpath(f"/proc/{pid}/fd/2"))  # of standard error
    if not has_handler or not os.path.isfile(log):
        return f"cannot be asked for its stack; {state}"
    size_before = log.stat().st_size
    os.kill(pid, signal.SIGUSR2)
    if is_stopped(pid):
        os.kill(pid, signal.SIGCONT)  # it is killed next in any case, and can say where it was
        state += "; continued, to write its stack"
    stack = _appended(log, size_before)
    if not stack:
        return f"wrote no stack within {_STACK_WITHIN_S:.0f} s; {state}"
    return f"{state}\n{stack}"


def _status(pid: int, name: str) -> str:
    """Return a value of /proc/PID/status; empty for a process that has ended."""
    match = re.search(rf"^{name}:\s*(.*)", _proc(pid, "status"), re.MULTILINE)
    return match[1] if match else ""


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _appended(log: Path, size_before: int) -> str:
    """Return what was added to a log, once it has stopped growing."""
    deadline = time.monotonic() + _STACK_WITHIN_S
    size = size_before
    grew = time.monotonic()
    while time.monotonic() < deadline:
        now = log.stat().st_size
        if now > size:
            size = now
            grew = time.monotonic()
        elif size > size_before and time.monotonic() - grew > _STACK_ENDS_AFTER_S:
            break
        time.sleep(0.01)
    with log.open("rb") as file:
        file.seek(size_before)
        return file.read(size - size_before).decode(errors="replace").rstrip()
