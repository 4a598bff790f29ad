"""A thread that counts the lines of a run's metrics while the run is in another process."""

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Self

_POLL_S = 0.05


class MetricsWatch(ABC):
    """Watches a run from `with` on; `see` gets the number of whole lines, a step each, again and again."""

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    @abstractmethod
    def see(self, num_steps: int) -> None:
        """Note what there is to note after this many steps."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            if self._metrics.is_file():
                self.see(self._metrics.read_bytes().count(b"\n"))
