"""What a tree of processes holds now, memory and scratch files, and an end for what holds too much.

Resource limits of the kernel count each process alone, and neither shared memory nor the number of files. So the sum is
taken from outside, every 50 ms. Only the standard library: this also runs in a confined process's trusted parent.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ycore.sandbox import Limits

INTERVAL_S = 0.05
_BLOCK = 512  # bytes: the unit of st_blocks
_KIB = 1024
_DEEPEST = 100  # folders within folders


class Usage(NamedTuple):
    """What a tree of processes holds: bytes of memory, processes, bytes in its scratch folder, files there."""

    memory: int = 0
    processes: int = 0
    scratch: int = 0
    files: int = 0

    def excess(self, limits: Limits) -> str | None:
        """What is over, in words, or None."""
        if self.memory > limits.memory:
            return f"{self.memory >> 20} MiB of memory, {limits.memory >> 20} MiB allowed"
        if self.processes > limits.processes:
            return f"{self.processes} processes, {limits.processes} allowed"
        if self.scratch > limits.scratch:
            return f"{self.scratch >> 20} MiB of files, {limits.scratch >> 20} MiB allowed"
        if self.files > limits.files:
            return f"{self.files} files, {limits.files} allowed"
        return None


def below(pid: int) -> list[int]:
    """Every process below `pid` now, parents first; none when it has ended."""
    found: list[int] = []
    waiting = [pid]
    children = None if _HAS_CHILDREN else _children_by_scan()
    while waiting:
        for child in (
            _children(waiting.pop()) if children is None else children.get(waiting.pop(), [])
        ):
            found.append(child)
            waiting.append(child)
    return found


def memory_of(pids: list[int], *, at_most: int) -> int:
    """Bytes of anonymous and shared memory, swapped ones included.

    The sum of the processes' own counts takes a page that two of them share after a fork twice. So where it exceeds
    `at_most`, and the kernel lets us, each page is divided among those who have it (PSS), which is slower to read.
    """
    total = sum(_counted(f"/proc/{pid}/status", _HELD) for pid in pids)
    if total <= at_most:
        return total
    shares = [_counted(f"/proc/{pid}/smaps_rollup", _SHARED_OUT) for pid in pids]
    return sum(shares) if all(shares) else total


def files_in(folder: str, *, at_most: int) -> tuple[int, int]:
    """Bytes and number of files and folders inside; the walk ends once it has met more than `at_most` of them.

    Folders nested too deeply count as too many files: a walk by name through them takes seconds.
    """
    num_bytes = num_files = 0
    waiting = [folder]
    deepest = folder.count(os.sep) + _DEEPEST
    while waiting and num_files <= at_most:
        inner = waiting.pop()
        if inner.count(os.sep) > deepest:
            return num_bytes, at_most + 1
        with suppress(OSError), os.scandir(inner) as entries:
            for entry in entries:
                num_files += 1
                with suppress(OSError):
                    num_bytes += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                if num_files > at_most:
                    break
    return num_bytes, num_files


def remove_tree(folder: str | Path) -> None:
    """Remove a scratch folder; one that was nested too deeply on purpose may stay, and raises nothing."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def deleted_bytes(pids: list[int]) -> int:
    """Bytes of the files that have no name any more and that one of the processes still has open."""
    held: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if status.st_nlink == 0 and status.st_blocks:
                        held[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK
    return sum(held.values())


def usage(pids: list[int], limits: Limits, scratch: str | None = None) -> Usage:
    """What these processes hold, and what lies in `scratch` where that is a plain folder."""
    memory = memory_of(pids, at_most=limits.memory)
    if scratch is None:
        return Usage(memory, len(pids))
    num_bytes, num_files = files_in(scratch, at_most=limits.files)
    return Usage(memory, len(pids), num_bytes + deleted_bytes(pids), num_files)


def end_all_below(pid: int, *, within_s: float = 5.0) -> bool:
    """Kill what is below `pid`, again and again until nothing is left; False where something was left all the same.

    They are stopped first, because a killed process of a fork bomb is replaced faster than the next is found. `pid` is
    a child subreaper, so that what leaves its parent stays below it.
    """
    deadline = time.monotonic() + within_s
    while pids := below(pid):
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for one in pids:
                with suppress(OSError):
                    os.kill(one, number)
        with suppress(ChildProcessError):
            while pid == os.getpid() and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


class Watch(threading.Thread):
    """Looks at the processes below `pid` every 50 ms until they hold too much or `stop` is called.

    Example: `watch = Watch(process.pid, limits, kill); watch.start()`; later `watch.stop()`, and `watch.excess` says
    what was too much, or None.
    """

    def __init__(
        self, pid: int, limits: Limits, kill: Callable[[], object], *, scratch: str | None = None
    ) -> None:
        """Start nothing yet.

        Args:
            kill: ends all of it; called once, on this thread.
            scratch: a plain folder whose files count; None where the kernel bounds them.
        """
        super().__init__(name=f"sandbox-watch-{pid}", daemon=True)
        self.excess: str | None = None
        self._pid, self._limits, self._kill, self._scratch = pid, limits, kill, scratch
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            if not os.path.exists(f"/proc/{self._pid}"):
                return
            self.excess = usage(below(self._pid), self._limits, self._scratch).excess(self._limits)
            if self.excess is not None and not self._over.is_set():
                self._kill()
                return

    def stop(self) -> None:
        """Look no more, and kill nothing from now on."""
        self._over.set()


_HELD = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
_SHARED_OUT = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")
_HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # CONFIG_PROC_CHILDREN


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())


def _children_by_scan() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    return children


def _counted(path: str, names: tuple[bytes, ...]) -> int:
    """The sum of these lines, in bytes; 0 for a process that has ended, or that we may not look at."""
    total = 0
    with suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(names):
                total += int(line.split()[1]) * _KIB
    return total
