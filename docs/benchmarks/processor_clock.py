"""Processor seconds of every role of a run, step by step, and its most memory, read from outside during the run.

Wall time says how long a step took, with other work on the machine included. Processor seconds over the number of
cores say how long it takes on an idle machine, if both cores are kept busy, as they are here.

A process's peak of memory is the kernel's own, VmHWM in /proc/PID/status, so that no look misses it. A role's peak is the
largest sum over its processes that live at the same time; memory that several of them share is counted for each.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ycore.launch.guardian import RunWatch
from ycore.run.files import RunFolder
from ycore.run.metrics import read_metrics

_LOOK_EVERY_S = 0.2
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


def role_of(command: Sequence[str]) -> str | None:
    """Return a process's role by its command line, such as `trainer` or an engine's name; None where it has none."""
    if any(name in word for word in command for name in _HELPERS):
        return _HELPER
    title, _, name = " ".join(command).strip().partition(" ")
    if title == "ycore.engine.serve":  # a fork, which has its name for a title
        return name
    if "--uds" in command:
        return Path(command[command.index("--uds") + 1]).stem
    return next((_ROLES[word] for word in command if word in _ROLES), None)


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has held; 0 where it has ended."""
    with suppress(OSError):
        peak = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
        return int(peak[1]) * 1024 if peak else 0
    return 0


class ProcessorClock:
    """Within `with ProcessorClock(run) as clock:`; afterwards `clock.a_step()` and `clock.peaks`, in bytes, by role."""

    def __init__(self, run: Path) -> None:
        folder = RunFolder(run)
        self._metrics = folder.metrics
        self._processes = RunProcesses(folder.run_id)
        self._at_step: dict[int, Counter[str]] = {}
        self.peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_EVERY_S):
            self.look_at_memory()
            steps = len(read_metrics(self._metrics))
            if steps and steps not in self._at_step:
                self._at_step[steps] = self._look()

    def look_at_memory(self) -> None:
        totals: Counter[str] = Counter()
        for role, process in self._processes.by_role():
            totals[role] += peak_bytes(process.pid)
        for role, total in totals.items():
            self.peaks[role] = max(total, self.peaks.get(role, 0))

    def _look(self) -> Counter[str]:
        seconds: Counter[str] = Counter()
        for role, process in self._processes.by_role():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue  # it has just ended
            seconds[role] += times.user + times.system
        return seconds

    def a_step(self) -> dict[str, float]:
        """Return the mean processor seconds of a step by role, from the end of the first step to the end of the last."""
        first, last = min(self._at_step, default=0), max(self._at_step, default=0)
        if last <= first:
            return {}
        before, after = self._at_step[first], self._at_step[last]
        return {role: (after[role] - before[role]) / (last - first) for role in after}
