"""The trainer's ranks on this machine, seen as one process: how they fare, which failed first, how to stop them.

accelerate starts them through torchrun, whose own exit status says little; each rank reports for itself
(`roles.ranks`), and what the first that failed said is what the run failed with.

Not here: one process alone (`processes`), and what its end means (`supervise`).
"""

import signal
import time
from pathlib import Path

import psutil

from ycore.errors import Interrupted
from ycore.launch.processes import ManagedProcess, is_alive
from ycore.roles.ranks import Report, read_report
from ycore.run_folder.paths import RunFolder

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
