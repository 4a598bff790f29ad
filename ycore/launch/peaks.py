"""The most memory that each role of a run has held, read from /proc while it runs and left in `memory.json`.

A process's peak is the kernel's own, `VmHWM` of /proc/PID/status: a look every second misses no peak of a process that
lives longer than that. A role's is the largest sum over those of its processes that live at the same time. Pages that
several processes share are counted in each.

Not here: what was expected (`ycore.planning`), and devices' memory, of which the engine and torch tell.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ycore.roles import RUN_MARKER
from ycore.run_folder.files import write_json_atomic

_LOOK_EVERY_S = 1.0
_HELPER = "helper"
_HELPERS = ("accelerate.commands.launch", "ycore.launch.guardian", "resource_tracker", "ycore.models")
"""What is in the command line of a process that starts others or clears up after them."""

_KNOWN_AFTER_S = 1.0
"""Until then a process may still have the command line of the one that started it."""


class RunProcesses:
    """The processes that carry a run's mark, by role."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._roles: dict[int, str | None] = {}

    def by_role(self) -> list[tuple[str, psutil.Process]]:
        """Those that live now; helpers, which hold nothing of the run, are left out."""
        found = ((self._role(process), process) for process in psutil.process_iter())
        return [(role, process) for role, process in found if role is not None and role != _HELPER]

    def _role(self, process: psutil.Process) -> str | None:
        """The role of a process of this run, or its parent's where its own command line does not say; else None."""
        if process.pid in self._roles:
            return self._roles[process.pid]
        try:
            mine = process.pid != os.getpid() and process.environ().get(RUN_MARKER) == self._run_id
            if time.time() - process.create_time() < _KNOWN_AFTER_S:
                return None
            role = (role_of(process.cmdline()) or self._roles.get(process.ppid()) or _HELPER) if mine else None
        except psutil.Error:
            return None  # ended, or another user's
        self._roles[process.pid] = role
        return role


class MemoryPeaks:
    """Within `with MemoryPeaks(run_id, file):`, the peaks of every process of the run."""

    def __init__(self, run_id: str, file: Path) -> None:
        self._processes = RunProcesses(run_id)
        self._file = file
        self._peaks: dict[str, int] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        write_json_atomic(self._file, self._peaks)

    @property
    def now(self) -> Mapping[str, int]:
        """Bytes by role, so far."""
        return dict(self._peaks)

    def _watch(self) -> None:
        while not self._done.wait(_LOOK_EVERY_S):
            self.look()

    def look(self) -> None:
        """Read every process of the run once."""
        now: Counter[str] = Counter()
        for role, process in self._processes.by_role():
            now[role] += peak_bytes(process.pid) or 0
        for role, total in now.items():
            self._peaks[role] = max(total, self._peaks.get(role, 0))


def role_of(command: Sequence[str]) -> str | None:
    """Whose process a command line is: `trainer`, `rewards`, an engine by its socket; None where it is silent."""
    if any(name in word for word in command for name in _HELPERS):
        return _HELPER
    if "--uds" in command:
        return Path(command[command.index("--uds") + 1]).stem
    for word in command:
        room, _, name = word.removeprefix("ycore.").partition(".")
        if word.startswith("ycore.") and room in ("roles", "rewards", "judging"):
            return name if room == "roles" else "rewards"
    return None


def peak_bytes(pid: int) -> int | None:
    """The kernel's peak of a process's resident memory; None where it is gone or the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) * 1024
