"""Processor seconds of every role of a run, step by step, read from outside during the run.

Wall time says how long a step took, with other work on the machine included. Processor seconds over the number of
cores say how long it takes on an idle machine, if both cores are kept busy, as they are here.
"""

import threading
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from ycore.launch.diagnostics import RunProcesses
from ycore.run.metrics import read_metrics
from ycore.run.paths import RunFolder

_LOOK_EVERY_S = 0.2


class ProcessorClock:
    """Within `with ProcessorClock(run) as clock:`; afterwards `clock.a_step()` by role."""

    def __init__(self, run: Path) -> None:
        folder = RunFolder(run)
        self._metrics = folder.metrics
        self._processes = RunProcesses(folder.run_id)
        self._at_step: dict[int, Counter[str]] = {}
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
            steps = len(read_metrics(self._metrics))
            if steps and steps not in self._at_step:
                self._at_step[steps] = self._look()

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
        """Mean processor seconds of a step by role, from the end of the first step to the end of the last."""
        first, last = min(self._at_step, default=0), max(self._at_step, default=0)
        if last <= first:
            return {}
        before, after = self._at_step[first], self._at_step[last]
        return {role: (after[role] - before[role]) / (last - first) for role in after}
