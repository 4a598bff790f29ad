"""Measure the memory and scratch files of a tree of processes, and end the tree where they are too much.

Resource limits of the kernel count each process alone, and neither shared memory nor the number of files. So the sum is
taken from outside, every 50 ms. Only the standard library: this also runs in a confined process's trusted parent.
"""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from ycore.sandbox import END_S, Limits

INTERVAL_S = 0.05
_BLOCK = 512  # bytes: the unit of st_blocks
_KIB = 1024
_DEEPEST = 100  # folders within folders


def below(pid: int) -> list[int]:
    """Return every process below `pid` now, parents first; none when it has ended."""
    children_of = _children if _HAS_CHILDREN else _children_by_scan()
    pids = [pid]
    for parent in pids:  # grows
        pids += children_of(parent)
    return pids[1:]


def memory_of(pids: list[int], *, at_most: int) -> int:
    """Return the bytes of anonymous and shared memory, swapped ones included.

    The sum of the processes' own counts takes a page that two of them share after a fork twice. So where it exceeds
    `at_most`, and the kernel lets us, each page is divided among those who have it (PSS), which is slower to read.
    """
    total = sum(_sum_of_lines(f"/proc/{pid}/status", _MEMORY) for pid in pids)
    if total <= at_most:
        return total
    shares = [_sum_of_lines(f"/proc/{pid}/smaps_rollup", _SHARES) for pid in pids]
    return sum(shares) if all(shares) else total


def files_in(folder: str, *, at_most: int) -> tuple[int, int]:
    """Return the bytes and the number of files and folders inside; the walk ends after `at_most` of them.

    Folders nested too deeply count as too many files: a walk by name through them takes seconds.
    """
    num_bytes = 0
    num_files = 0
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
    """Remove a scratch folder, with folders closed to their owner and ones nested deeper than Python's own walk goes."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            with suppress(OSError):
                subprocess.run([*command, folder], stderr=subprocess.DEVNULL, check=False)


def deleted_bytes(pids: list[int]) -> int:
    """Return the bytes of the files that have no name any more and that one of the processes still has open."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if status.st_nlink == 0 and status.st_blocks:
                        sizes[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK
    return sum(sizes.values())


def excess_of(pids: list[int], limits: Limits, scratch: str | None = None) -> str | None:
    """Say which limit these processes exceed together, with what lies in `scratch` where that is a plain folder."""
    memory = memory_of(pids, at_most=limits.memory)
    if memory > limits.memory:
        return f"{memory >> 20} MiB of memory, {limits.memory >> 20} MiB allowed"
    num_tasks = _num_tasks(pids)
    if num_tasks > limits.processes:
        return f"{num_tasks} processes and threads, {limits.processes} allowed"
    if scratch is None:
        return None
    num_bytes, num_files = files_in(scratch, at_most=limits.files)
    num_bytes += deleted_bytes(pids)
    if num_bytes > limits.scratch:
        return f"{num_bytes >> 20} MiB of files, {limits.scratch >> 20} MiB allowed"
    if num_files > limits.files:
        return f"{num_files} files, {limits.files} allowed"
    return None


def end_all_below(pid: int) -> bool:
    """End what is below `pid`, until nothing is left; False where something was left all the same.

    Everything is stopped before the first is killed: else a fork bomb fills each free place before the next is found. A
    bomb takes the time of the processor too, so this goes on for long. `pid` is a child subreaper, so that what leaves
    its parent stays below it.
    """
    deadline = time.monotonic() + END_S
    while pids := below(pid):
        stopped: set[int] = set()
        while new := [descendant for descendant in pids if descendant not in stopped]:
            _send(signal.SIGSTOP, new)
            stopped.update(new)
            pids = below(pid)
        _send(signal.SIGKILL, pids)
        with suppress(ChildProcessError):
            while pid == os.getpid() and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def _send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, number)


class Watch(threading.Thread):
    """Looks at the processes below `pid` every 50 ms until they hold too much or `stop` is called.

    Example: `watch = Watch(process.pid, limits, kill); watch.start()`; later `watch.stop()`, and `watch.excess` says
    what was too much, or None.
    """

    def __init__(
        self,
        pid: int,
        limits: Limits,
        kill: Callable[[], object],
        *,
        scratch: Path | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            kill: ends all of it; called once, on this thread.
            scratch: a plain folder whose files count; None where the kernel bounds them.
        """
        super().__init__(name=f"sandbox-watch-{pid}", daemon=True)
        self.excess: str | None = None
        self._pid = pid
        self._limits = limits
        self._kill = kill
        self._scratch = None if scratch is None else str(scratch)
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            if not os.path.exists(f"/proc/{self._pid}"):
                return
            self.excess = excess_of(below(self._pid), self._limits, self._scratch)
            if self.excess is not None and not self._stopped.is_set():
                self._kill()
                return

    def stop(self) -> None:
        """Look no more, and kill nothing from now on."""
        self._stopped.set()


_MEMORY = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
_SHARES = (b"Pss_Anon:", b"Pss_Shmem:", b"SwapPss:")
_HAS_CHILDREN = os.path.exists(
    f"/proc/self/task/{os.getpid()}/children"
)  # CONFIG_PROC_CHILDREN


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                yield from map(int, file.read().split())


def _children_by_scan() -> Callable[[int], list[int]]:
    children = defaultdict[int, list[int]](list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children[parent].append(int(name))
    return children.__getitem__


def _num_tasks(pids: list[int]) -> int:
    """Return the number of processes and threads: a folder in /proc has a link for each thread, and two more."""
    count = 0
    for pid in pids:
        with suppress(OSError):
            count += os.stat(f"/proc/{pid}/task").st_nlink - 2
    return count


def _sum_of_lines(path: str, names: tuple[bytes, ...]) -> int:
    """Return the sum of these lines, in bytes; 0 for a process that has ended, or that we may not look at."""
    total = 0
    with suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.startswith(names):
                total += int(line.split()[1]) * _KIB
    return total
