"""One process of a run: started in its own session, marked, logged, and able to say how it ended.

The trainer's ranks on this machine, seen as one process: how they fare, which failed first, how to stop them.

Not here: finding processes that nobody holds a handle of (`reaper`).
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ycore.errors import Interrupted
from ycore.run.paths import RunFolder
from ycore.run.process_tree import descendants, is_alive
from ycore.run.reports import RUN_MARKER, Report, read_report

_TAIL_BYTES = 64 * 1024
_LOOKS_AT_LEAST_EVERY_S = 10.0  # a launcher that was stopped itself does not hold it against the others
_PREFIX = re.compile(
    r"^(?:\([A-Za-z_]+(?:[-_ ]?\w+)*(?: pid=\d+)?\)\s*)?"  # (EngineCore pid=12)
    r"(?:(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\]\s*)?)?"
)
_NOISE = re.compile(
    r"nanobind|^\s*- (?:leaked|\.\.\.)|resource_tracker|warnings\.warn|DeprecationWarning|FutureWarning|UserWarning"
    r"|^\s*(?:File \"|\^+|~+|raise |return |await |warn)|Traceback \(most recent|Engine core initialization failed"
    r"|^\s*\{'[\w/]+': "  # a step's figures, as TRL prints them
    r"|During handling of|direct cause of|\[shutdown\]|^[\s─╭╰│═*=.-]*$|it/s\]|Exception ignored|destroy_process_group"
)
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Failure)\b|error:|fatal)", re.IGNORECASE)


class ManagedProcess:
    """A child whose output goes to one log file."""

    def __init__(self, name: str, popen: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.log = log
        self._popen = popen

    @classmethod
    def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        run_id: str,
        log: Path,
        cores: Sequence[int] | None = None,
    ) -> "ManagedProcess":
        """Start `command` in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            popen = subprocess.Popen(
                list(command),
                env={**environment, RUN_MARKER: run_id},
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        if cores is not None:
            _pin(popen.pid, cores)
        return cls(name, popen, log)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when a signal ended it."""
        return self._popen.poll()

    def send(self, number: signal.Signals) -> None:
        """Signal the process itself, and none of its children."""
        if self.exit_code is None:
            self._popen.send_signal(number)

    def wait(self, *, timeout_s: float) -> int | None:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def how_it_ended(self) -> str:
        """`exit status 1` or `killed by SIGKILL`, for a sentence."""
        code = self.exit_code
        if code is None:
            return "still running"
        if code >= 0:
            return f"exit status {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def members(self) -> dict[str, int]:
        """Process ids, by a name for a sentence."""
        return {self.name: self.pid}

    def tree(self) -> list[psutil.Process]:
        """It and every process below it, now."""
        try:
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
        except psutil.Error:
            return []

    def children(self) -> dict[str, psutil.Process]:
        """Every process below this one, now, by a name and number for a sentence."""
        try:
            return {f"{process.name()} ({process.pid})": process for process in descendants(self.pid)}
        except psutil.Error:
            return {}

    def last_line(self) -> str:
        """The log's last meaningful line: the last that names an error, else the last that is not noise.

        Empty after a SIGKILL: it comes without warning, and what was logged before has nothing to do with it.
        """
        return "" if self.exit_code == -signal.SIGKILL else meaningful_line(self._tail())

    def user_error(self) -> str | None:
        """What follows the last `error: ` at the start of a line, if the process said so."""
        said = [line for line in self._tail() if line.startswith("error: ")]
        return said[-1].removeprefix("error: ").strip() if said else None

    def _tail(self) -> list[str]:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()


class StopWatch:
    """How long one of some processes has been stopped (SIGSTOP, Ctrl-Z), once that is longer than allowed."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._since: dict[int, float] = {}
        self._looked = time.monotonic()

    def look(self, pids: Sequence[int]) -> float | None:
        """Seconds, or None while all of them may run. Time in which nobody looked is not counted."""
        now = time.monotonic()
        paused, self._looked = max(0.0, now - self._looked - _LOOKS_AT_LEAST_EVERY_S), now
        stopped = {pid for pid in pids if is_stopped(pid)}
        self._since = {pid: self._since.get(pid, now) + (paused if pid in self._since else 0.0) for pid in stopped}
        longest = max((now - since for since in self._since.values()), default=0.0)
        return longest if longest > self._allowed_s else None


def is_stopped(pid: int) -> bool:
    """Whether the kernel lets it wait for SIGCONT; read from /proc, which is cheap enough to do often."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"


def meaningful_line(lines: Sequence[str]) -> str:
    """The line of a log that says what went wrong, without prefixes of loggers; empty when there is none."""
    plain = [_PREFIX.sub("", line).rstrip() for line in lines]
    kept = [line for line in plain if line.strip() and not _NOISE.search(line)]
    errors = [line for line in kept if _ERROR.match(line.strip())]
    chosen = errors[-1] if errors else (kept[-1] if kept else "")
    return chosen.strip()[:500]


def _pin(pid: int, cores: Sequence[int]) -> None:
    """Keep a process just started, and so all its threads and children, on these cores."""
    if sys.platform == "linux":
        try:
            psutil.Process(pid).cpu_affinity(list(cores))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return  # already gone, which is found out elsewhere; or a container that forbids it, where nothing is lost


_OTHERS_WITHIN_S = 3.0  # what other ranks have, after one has failed, to end by themselves
_LOST = 1


class RankedTrainer:
    """Has what the supervisor asks of a `ManagedProcess`."""

    def __init__(self, launcher: ManagedProcess, folder: RunFolder, *, num_ranks: int) -> None:
        self._launcher = launcher
        self._folder = folder
        self._num_ranks = num_ranks
        self._seen: dict[int, psutil.Process | None] = {}
        self._failed_at: float | None = None

    @property
    def exit_code(self) -> int | None:
        """None while they work; a failed rank's as soon as the others have had time to end."""
        reports, code = self._reports(), self._launcher.exit_code
        failed = _first_failed(reports)
        if code is not None:
            return failed.exit_code if failed is not None and failed.exit_code is not None else code
        is_over = failed is not None and failed.exit_code != Interrupted.exit_code
        if not is_over and self._lost(reports) is None:
            return None
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at < _OTHERS_WITHIN_S:
            return None
        return failed.exit_code if failed is not None else _LOST

    @property
    def name(self) -> str:
        culprit = self._culprit()
        return self._launcher.name if culprit is None else f"{self._launcher.name} rank {culprit.number}"

    @property
    def log(self) -> Path:
        culprit = self._culprit()
        return self._launcher.log if culprit is None else self._folder.log(f"trainer-{culprit.number}")

    def send(self, number: signal.Signals) -> None:
        """To every rank; to torchrun as well only what cannot be caught, since it would end the ranks on any other."""
        self._reports()
        alive = [process for process in self._seen.values() if process is not None and is_alive(process)]
        for process in alive:
            process.send_signal(number)
        if number == signal.SIGKILL or not alive:
            self._launcher.send(number)

    def members(self) -> dict[str, int]:
        """Process ids of the ranks that work, by a name for a sentence."""
        working = [report for report in self._reports() if report.exit_code is None]
        return {f"{self._launcher.name} rank {report.number}": report.pid for report in working}

    def how_it_ended(self) -> str:
        culprit = self._culprit()
        if culprit is None:
            return self._launcher.how_it_ended()
        return "a signal, killed or out of memory" if culprit.exit_code is None else f"exit status {culprit.exit_code}"

    def last_line(self) -> str:
        culprit = self._culprit()
        return self._launcher.last_line() if culprit is None else culprit.message

    def user_error(self) -> str | None:
        failed = _first_failed(self._reports())
        return None if failed is None else failed.message

    def _reports(self) -> list[Report]:
        reports = [read_report(self._folder, local) for local in range(self._num_ranks)]
        known = [report for report in reports if report is not None]
        for report in known:
            if report.pid not in self._seen:
                self._seen[report.pid] = _process(report.pid)
        return known

    def _culprit(self) -> Report | None:
        """The rank whose end is the cause: one that vanished, unless another had failed with an error of ycore's."""
        reports = self._reports()
        failed, lost = _first_failed(reports), self._lost(reports)
        return failed if lost is None or (failed is not None and failed.expected) else lost

    def _lost(self, reports: list[Report]) -> Report | None:
        """A rank that is gone and has not said how."""
        silent = [report for report in reports if report.exit_code is None]
        gone = [report for report in silent if (process := self._seen[report.pid]) is None or not is_alive(process)]
        return gone[0] if gone else None


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _first_failed(reports: list[Report]) -> Report | None:
    """The earliest failure; being interrupted is one only where nothing worse happened."""
    failed = [report for report in reports if report.exit_code]
    return min(failed, key=lambda report: (report.exit_code == Interrupted.exit_code, report.at), default=None)
