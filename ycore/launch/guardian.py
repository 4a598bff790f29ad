"""Clearing away a run: every process, socket and piece of shared memory, whoever started it and however it ended.

The launcher's side of the guardian: start it first, and let it clear away the run at the end.

The guardian: clears the run away when the launcher is gone, however it went, SIGKILL included.

Not here: when that happens (`guardian`, `launcher`). Standard library and psutil only.

A process belongs to a run when its environment carries the run's marker, when it descends from one that does, or when
it did so at an earlier look: a daemon that cleared its environment and left its parent is known only from before.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ycore.run.claim import Claim
from ycore.run.files import temporary_folder
from ycore.run.paths import RunFolder
from ycore.run.process_tree import descendants, is_alive
from ycore.run.reports import RUN_MARKER

_SHARED_MEMORY = Path("/dev/shm")
_KILL_WITHIN_S = 20.0


class RunWatch:
    """What belongs to one run, remembered from look to look."""

    def __init__(self, run_id: str, *, keep: Collection[int] = ()) -> None:
        self._run_id = run_id
        self._keep = {os.getpid(), *keep}
        self._known: dict[tuple[int, float], psutil.Process] = {}
        self._segments: set[int] = set()

    def look(self) -> list[psutil.Process]:
        """The run's living processes, now; also remembers the shared memory they hold."""
        for process in psutil.process_iter():
            if self._is_marked(process):
                self._remember(process)
        for process in [process for process in self._known.values() if is_alive(process)]:
            for child in descendants(process.pid):
                self._remember(child)
        self._known = {key: process for key, process in self._known.items() if is_alive(process)}
        for process in self._known.values():
            self._segments |= _mapped_segments(process.pid)
        return list(self._known.values())

    def kill(self, *, grace_s: float = 3.0) -> int:
        """End every process of the run, politely at first; returns how many there were."""
        met: set[tuple[int, float]] = set()
        deadline = time.monotonic() + grace_s
        give_up = deadline + _KILL_WITHIN_S
        told: set[tuple[int, float]] = set()
        while self.look():
            met |= self._known.keys()
            for key, process in list(self._known.items()):
                if time.monotonic() >= deadline:
                    _signal(process, _last_resort(process, late=time.monotonic() > deadline + 1))
                elif key not in told:
                    _signal(process, signal.SIGTERM)
                    told.add(key)
            if time.monotonic() > give_up:
                break
            time.sleep(0.05)  # and no psutil.wait_procs: it would take the exit codes of this process's children
        return len(met)

    def remove_segments(self) -> int:
        """Unlink the shared memory that the run's processes held and that nobody left alive has mapped."""
        if not self._segments or not _SHARED_MEMORY.is_dir():
            return 0
        in_use: set[int] = set()
        for pid in psutil.pids():
            in_use |= _mapped_segments(pid)
        removed = 0
        for path in _SHARED_MEMORY.iterdir():
            if path.is_file() and path.lstat().st_ino in self._segments - in_use:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _remember(self, process: psutil.Process) -> None:
        if process.pid not in self._keep and is_alive(process):
            self._known[(process.pid, process.create_time())] = process

    def _is_marked(self, process: psutil.Process) -> bool:
        if process.pid in self._keep:
            return False
        try:
            environment: dict[str, str] = process.environ()
        except (psutil.Error, OSError):
            return False  # another user's, a zombie, or gone
        return environment.get(RUN_MARKER) == self._run_id


def kill_run(run_id: str, *, keep_pid: int | None = None, grace_s: float = 3.0) -> int:
    """End every process marked with `run_id`, and what it left in shared memory; returns how many processes."""
    watch = RunWatch(run_id, keep=() if keep_pid is None else (keep_pid,))
    killed = watch.kill(grace_s=grace_s)
    watch.remove_segments()
    return killed


def remove_leftovers(folder: RunFolder) -> None:
    """Remove the run's sockets, temporary files and shared memory folder."""
    for path in (folder.sockets, temporary_folder(folder), folder.shared_memory):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


def _last_resort(process: psutil.Process, *, late: bool) -> signal.Signals | None:
    """SIGKILL; but Python's resource tracker ends by itself, and cleans up, once those it serves are dead."""
    try:
        tracker = any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return None
    return None if tracker and not late else signal.SIGKILL


def _signal(process: psutil.Process, number: signal.Signals | None) -> None:
    if number is None:
        return
    try:
        process.send_signal(number)
    except psutil.Error:
        return  # gone meanwhile; the next look tells


def _mapped_segments(pid: int) -> set[int]:
    """Inodes under /dev/shm that a process has mapped: a semaphore's file is known there by a name it no longer has."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}


_CLEARS_WITHIN_S = 30.0


@contextmanager
def guarded(folder: RunFolder, held: Claim) -> Iterator[None]:
    """Within it, the run's processes may be started; after it none is left, nor a socket, nor shared memory."""
    kill_run(folder.run_id)  # what is left of a run whose guardian was killed too
    guardian = _start(folder, held)
    try:
        yield
    finally:
        _end(guardian, folder)


def _start(folder: RunFolder, held: Claim) -> "subprocess.Popen[bytes]":
    environment = {name: value for name, value in os.environ.items() if name != RUN_MARKER}
    log = os.open(folder.log("guardian"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "ycore.launch.guardian", str(folder.root.resolve())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=(held.descriptor,),
        )
    finally:
        os.close(log)


def _end(guardian: "subprocess.Popen[bytes]", folder: RunFolder) -> None:
    """Close the pipe and wait; a guardian that failed is stood in for."""
    assert guardian.stdin is not None
    guardian.stdin.close()
    try:
        cleared = guardian.wait(_CLEARS_WITHIN_S) == 0
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()
        cleared = False
    if not cleared:
        kill_run(folder.run_id)
        remove_leftovers(folder)


_LOOK_EVERY_S = 5.0  # a look costs 20 ms; an idle run should cost nothing


def guard(folder: RunFolder) -> None:
    """Wait for the launcher's end, then leave nothing of the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = RunWatch(folder.run_id)
    pipe = sys.stdin.fileno()
    while not select.select([pipe], [], [], _LOOK_EVERY_S)[0]:
        watch.look()
    watch.kill()
    watch.remove_segments()
    remove_leftovers(folder)


if __name__ == "__main__":
    guard(RunFolder(Path(sys.argv[1])))
