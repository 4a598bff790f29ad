"""A witness of flushes: whether a file was on the disk, with all that was written, before it got the name that counts.

SIGKILL does not show a missing flush, because the kernel keeps what was written; only a power cut would. So the order
is watched instead, in the processes of a selftest: at every rename to a name that counts, each file must have been
flushed since it was last written. One line of `flushes.log` for each.

Not here: who reads it (`rows_files`). It is loaded by a `sitecustomize` in a copy of the package, never by the product.
"""

import os
from pathlib import Path
from typing import Any

VARIABLE = "YCORE_SELFTEST_FLUSHES"
"""The file to write to; where it is not set, nothing is watched."""

_FOLDERS = ("journal", "checkpoints")


def watch_flushes() -> None:
    """From here on, in this process."""
    target = os.environ.get(VARIABLE)
    if target is None:
        return
    flushed: dict[tuple[int, int], int] = {}
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def watched_fsync(fd: Any) -> None:
        fsync(fd)
        told = os.fstat(fd if isinstance(fd, int) else fd.fileno())
        flushed[told.st_dev, told.st_ino] = told.st_mtime_ns

    def watched(original: Any) -> Any:
        def move(source: Any, place: Any, **more: Any) -> None:
            if _counts(Path(os.fspath(place))):
                _tell(target, Path(os.fspath(place)), _unflushed(Path(os.fspath(source)), flushed))
            original(source, place, **more)

        return move

    os.fsync, os.rename, os.replace = watched_fsync, watched(rename), watched(replace)


def read_flushes(log: Path) -> tuple[int, list[str]]:
    """How many files got their name flushed, and those that did not."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return sum(line.startswith("ok ") for line in lines), [line for line in lines if not line.startswith("ok ")]


def _counts(place: Path) -> bool:
    """Whether it is a committed round or a published checkpoint."""
    return place.parent.name in _FOLDERS and place.name.startswith(("round-", "checkpoint-"))


def _unflushed(source: Path, flushed: dict[tuple[int, int], int]) -> list[str]:
    files = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
    return [path.name for path in files if _is_unflushed(path.stat(), flushed)]


def _is_unflushed(told: os.stat_result, flushed: dict[tuple[int, int], int]) -> bool:
    return flushed.get((told.st_dev, told.st_ino), -1) != told.st_mtime_ns


def _tell(target: str, place: Path, unflushed: list[str]) -> None:
    with open(target, "a", encoding="utf-8") as log:
        log.write(f"not flushed: {place} ({', '.join(unflushed)})\n" if unflushed else f"ok {place}\n")
