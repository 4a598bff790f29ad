"""Clear a run away: every process, socket and piece of shared memory, however its launcher ended, SIGKILL included.

The guardian is a small process beside the launcher (`python -m ycore.launch.guardian RUN_FOLDER`). It waits until the
pipe from the launcher closes, and then clears up. `guarded` is the launcher's side.

A process belongs to a run when its environment has the run's marker, or it descends from such a process now, or did at
an earlier look: a daemon that cleared its environment and left its parent is known only from before.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ycore.run.claim import Claim
from ycore.run.paths import RunFolder
from ycore.run.process_tree import descendants, is_alive
from ycore.run.reports import RUN_MARKER

_SHARED_MEMORY = Path("/dev/shm")
_KILL_WITHIN_S = 20.0
_TRACKER_ENDS_WITHIN_S = 1.0
_CLEARS_WITHIN_S = 30.0
_LOOK_EVERY_S = 5.0  # a look takes 20 ms, and an idle run should cost nothing


class RunWatch:
    """The processes and shared memory of a run, remembered from look to look; without `keep` and this process."""

    def __init__(self, run_id: str, *, keep: Collection[int] = ()) -> None:
        self._run_id = run_id
        self._keep = {os.getpid(), *keep}
        self._known: dict[tuple[int, float], psutil.Process] = {}  # by process id and start time: ids are used again
        self._segments: set[int] = set()

    def look(self) -> list[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # another user's, a zombie, or gone
                if process.pid not in self._keep and process.environ().get(RUN_MARKER) == self._run_id:
                    self._remember(process)
        for process in [process for process in self._known.values() if is_alive(process)]:
            for child in descendants(process.pid):
                self._remember(child)
        self._known = {key: process for key, process in self._known.items() if is_alive(process)}
        for process in self._known.values():
            self._segments |= _mapped_segments(process.pid)
        return list(self._known.values())

    def kill(self, *, grace_s: float = 3.0) -> int:
        """End every process of the run: SIGTERM first, SIGKILL after `grace_s`; returns how many there were."""
        met: set[tuple[int, float]] = set()
        force_from = time.monotonic() + grace_s
        while self.look():
            now = time.monotonic()
            for key, process in self._known.items():
                if now >= force_from:
                    _kill(process, tracker_too=now > force_from + _TRACKER_ENDS_WITHIN_S)
                elif key not in met:
                    with suppress(psutil.Error):
                        process.terminate()
            met |= self._known.keys()
            if now > force_from + _KILL_WITHIN_S:
                break
            time.sleep(0.05)  # psutil.wait_procs would take the exit codes of this process's children
        return len(met)

    def remove_segments(self) -> None:
        """Unlink the shared memory that the run's processes had mapped and no living process has."""
        if not self._segments or not _SHARED_MEMORY.is_dir():
            return
        in_use = {segment for pid in psutil.pids() for segment in _mapped_segments(pid)}
        for path in _SHARED_MEMORY.iterdir():
            if path.is_file() and path.lstat().st_ino in self._segments - in_use:
                path.unlink(missing_ok=True)

    def _remember(self, process: psutil.Process) -> None:
        if process.pid not in self._keep and is_alive(process):
            self._known[(process.pid, process.create_time())] = process


def _kill(process: psutil.Process, *, tracker_too: bool) -> None:
    """SIGKILL. Python's resource tracker may end by itself, after it has cleaned up for the processes it serves."""
    with suppress(psutil.Error):
        if tracker_too or not any("multiprocessing.resource_tracker" in word for word in process.cmdline()):
            process.kill()


def _mapped_segments(pid: int) -> set[int]:
    """Inodes under /dev/shm that a process has mapped; the name there may differ from the file's, as a semaphore's."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {int(line.split()[4]) for line in lines if f" {_SHARED_MEMORY}/" in line}


def kill_run(run_id: str, *, grace_s: float = 3.0) -> int:
    """End every process of a run, and unlink its shared memory; returns how many processes there were."""
    watch = RunWatch(run_id)
    killed = watch.kill(grace_s=grace_s)
    watch.remove_segments()
    return killed


def remove_leftovers(folder: RunFolder) -> None:
    """Remove the run's sockets, temporary files and shared memory folder."""
    for path in (folder.sockets, folder.temporary, folder.shared_memory):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def guarded(folder: RunFolder, held: Claim) -> Iterator[None]:
    """A context in which the run's processes may be started; after it none is left, nor a socket, nor shared memory.

    Args:
        held: the claim on the run's folder; the guardian keeps it until everything is cleared away.
    """
    kill_run(folder.run_id)  # what is left of a run whose guardian was killed too
    log = folder.log("guardian")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        guardian = subprocess.Popen(
            [sys.executable, "-m", "ycore.launch.guardian", str(folder.root.resolve())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if name != RUN_MARKER},
            start_new_session=True,
            pass_fds=(held.descriptor,),
        )
    try:
        yield
    finally:
        with suppress(subprocess.TimeoutExpired):
            guardian.communicate(timeout=_CLEARS_WITHIN_S)  # closes its pipe first
        if guardian.returncode != 0:
            guardian.kill()
            guardian.wait()
            kill_run(folder.run_id)
            remove_leftovers(folder)


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
