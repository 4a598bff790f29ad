"""The most memory that each role of a run has held, and the stack of every process when one of them hangs.

A process's peak is the kernel's own, VmHWM in /proc/PID/status, so a look every two seconds misses no peak of a process
that lives longer than that. A role's peak is the largest sum over its processes that live at the same time. Memory that
several processes share is counted for each of them.
"""

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from ycore.launch.guardian import RunWatch
from ycore.launch.processes import is_stopped

_LOOK_EVERY_S = 2.0  # a look takes 20 ms
_SETTLED_AFTER_S = 1.0
"""Until then a new process may still have the command line of the one that started it."""
_HELPER = "helper"
_HELPERS = (
    "accelerate.commands.launch",
    "ycore.launch.guardian",
    "resource_tracker",
    "ycore.models",
)
_ROLES = {
    "ycore.trainer": "trainer",
    "ycore.evaluation.evaluator": "evaluator",
    "ycore.evaluation.preflight": "preflight",
    "ycore.rewards.worker": "rewards",
}
"""Roles by the module that `python -m` runs."""
_STACK_WITHIN_S = 1.0
_STACK_ENDS_AFTER_S = 0.05  # a stack is complete when its log has not grown for so long


class RunProcesses:
    """The living processes of a run, by role."""

    def __init__(self, run_id: str) -> None:
        self._watch = RunWatch(run_id)
        self._roles: dict[int, str] = {}  # by process id

    def by_role(self) -> list[tuple[str, psutil.Process]]:
        """Return those that live now, without helpers, which only start others or clear up after them."""
        roles = ((self._role(process), process) for process in self._watch.look())
        return [
            (role, process) for role, process in roles if role is not None and role != _HELPER
        ]

    def _role(self, process: psutil.Process) -> str | None:
        """Return a process's role by its command line, else its parent's; None while it may still change."""
        if process.pid in self._roles:
            return self._roles[process.pid]
        try:
            if time.time() - process.create_time() < _SETTLED_AFTER_S:
                return None
            role = role_of(process.cmdline()) or self._roles.get(process.ppid()) or _HELPER
        except psutil.Error:
            return None  # it has ended
        self._roles[process.pid] = role
        return role


class MemoryPeaks:
    """The most memory that each role of a run has held: `peaks`, in bytes."""

    def __init__(self, run_id: str) -> None:
        self.peaks: dict[str, int] = {}
        self._processes = RunProcesses(run_id)
        self._next_look = 0.0

    def look(self) -> None:
        """Read every process of the run, every two seconds at most."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_EVERY_S
        totals: Counter[str] = Counter()
        for role, process in self._processes.by_role():
            totals[role] += peak_bytes(process.pid) or 0
        for role, total in totals.items():
            self.peaks[role] = max(total, self.peaks.get(role, 0))


def role_of(command: Sequence[str]) -> str | None:
    """Return a process's role by its command line, such as `trainer` or an engine's name; None where it has none."""
    if any(name in word for word in command for name in _HELPERS):
        return _HELPER
    if "--uds" in command:
        return Path(command[command.index("--uds") + 1]).stem
    return next((_ROLES[word] for word in command if word in _ROLES), None)


def peak_bytes(pid: int) -> int | None:
    """Return the most memory that a process has held; None where it has ended or the system does not say."""
    peak = _status(pid, "VmHWM")  # 123456 kB
    return int(peak.split()[0]) * 1024 if peak else None


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
