"""How long the parts of the protection take, in a copy of the package in which they are timed (`cost`).

Not here: what is timed. The product has no such switch.
"""

import functools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

VARIABLE = "YCORE_SELFTEST_TIMES"
"""The file to write to: a line a call, its part and its seconds."""

F = TypeVar("F", bound=Callable[..., Any])

_running = threading.local()


def timed(part: str) -> Callable[[F], F]:
    """A decorator; a timed call inside another is the other's."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            if vars(_running).get("is_timed"):
                return function(*args, **more)
            _running.is_timed = True
            began = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                _running.is_timed = False
                _tell(part, time.perf_counter() - began)

        return call  # type: ignore[return-value]

    return decorate


def read_times(log: Path) -> dict[str, float]:
    """Seconds by part."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else []:
        part, _, told = line.rpartition(" ")
        seconds[part] += float(told)
    return dict(seconds)


def _tell(part: str, seconds: float) -> None:
    target = os.environ.get(VARIABLE)
    if target is not None:
        with open(target, "a", encoding="utf-8") as log:
            log.write(f"{part} {seconds:.9f}\n")
