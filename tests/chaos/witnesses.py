"""Code that runs inside the processes under test: it watches flushes, kills at named points and times functions.

It is loaded by a `sitecustomize` and by patches in a copy of the package (`patches`), never by the product. Standard
library only, because every Python process of a run imports it.

Flushes: SIGKILL does not show a missing flush, because the kernel keeps what was written; only a power cut would. So at
every rename that publishes a round or a checkpoint, each file must have been flushed since it was last written.

Points: random moments seldom land between a rename and the flush behind it. A call of `reach` does nothing unless the
environment names its point; then the process dies exactly there.
"""

import functools
import os
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

FLUSHES_VARIABLE = "YCORE_SELFTEST_FLUSHES"
"""The file to write to; where it is not set, nothing is watched."""

_FOLDERS = ("journal", "checkpoints")


def watch_flushes() -> None:
    """From here on, in this process."""
    target = os.environ.get(FLUSHES_VARIABLE)
    if target is None:
        return
    flushed: dict[tuple[int, int], int] = {}
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def watched_fsync(fd: Any) -> None:
        fsync(fd)
        status = os.fstat(fd if isinstance(fd, int) else fd.fileno())
        flushed[status.st_dev, status.st_ino] = status.st_mtime_ns

    def watched(original: Any) -> Any:
        def move(source: Any, place: Any, **more: Any) -> None:
            if _is_watched(Path(os.fspath(place))):
                _write_flush(
                    target, Path(os.fspath(place)), _unflushed(Path(os.fspath(source)), flushed)
                )
            original(source, place, **more)

        return move

    os.fsync, os.rename, os.replace = watched_fsync, watched(rename), watched(replace)


def read_flushes(log: Path) -> tuple[int, list[str]]:
    """How many files got their name flushed, and those that did not."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return sum(line.startswith("ok ") for line in lines), [
        line for line in lines if not line.startswith("ok ")
    ]


def _is_watched(place: Path) -> bool:
    """Whether it is a committed round or a published checkpoint."""
    return place.parent.name in _FOLDERS and place.name.startswith(("round-", "checkpoint-"))


def _unflushed(source: Path, flushed: dict[tuple[int, int], int]) -> list[str]:
    files = (
        [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
    )
    return [path.name for path in files if _is_unflushed(path.stat(), flushed)]


def _is_unflushed(status: os.stat_result, flushed: dict[tuple[int, int], int]) -> bool:
    return flushed.get((status.st_dev, status.st_ino), -1) != status.st_mtime_ns


def _write_flush(target: str, place: Path, unflushed: list[str]) -> None:
    with open(target, "a", encoding="utf-8") as log:
        log.write(
            f"not flushed: {place} ({', '.join(unflushed)})\n" if unflushed else f"ok {place}\n"
        )


POINT_VARIABLE = "YCORE_SELFTEST_POINT"
"""`NAME/COUNT/FILE`: die where NAME is reached for the COUNTth time, unless FILE is there, which is made then."""

_reached: Counter[str] = Counter()


def reach(name: str) -> None:
    """SIGKILL to this process, once in a run and its resume."""
    wanted, count, marker = (os.environ.get(POINT_VARIABLE, "") + "//").split("/", 2)
    if name != wanted:
        return
    _reached[name] += 1
    path = Path("/" + marker.strip("/"))
    if _reached[name] == int(count) and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def dies_at(name: str, count: int, marker: Path) -> dict[str, str]:
    """The environment of a run that is to die there; `marker` exists afterwards if it did."""
    return {POINT_VARIABLE: f"{name}/{count}{marker.resolve()}"}


TIMES_VARIABLE = "YCORE_SELFTEST_TIMES"
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
                _write_time(part, time.perf_counter() - began)

        return call  # type: ignore[return-value]

    return decorate


def read_times(log: Path) -> dict[str, float]:
    """Seconds by part."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else []:
        part, _, took = line.rpartition(" ")
        seconds[part] += float(took)
    return dict(seconds)


def _write_time(part: str, seconds: float) -> None:
    target = os.environ.get(TIMES_VARIABLE)
    if target is not None:
        with open(target, "a", encoding="utf-8") as log:
            log.write(f"{part} {seconds:.9f}\n")
