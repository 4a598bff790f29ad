"""Clear a run away: every process, socket and piece of shared memory, however its launcher ended, SIGKILL included.

The guardian is a small process beside the launcher (`python -m ycore.launch.guardian RUN_FOLDER`). It reports that it
has started, waits until the pipe from the launcher closes, and then clears up. `guarded` is the launcher's side.

A process belongs to a run when its environment has the run's id, or when it descends from such a process now or did
at an earlier look.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ycore.errors import RunError
from ycore.run.claim import Claim
from ycore.run.files import RunFolder, make_private, open_private
from ycore.run.reports import RUN_MARKER, is_alive
from ycore.sandbox.watch import remove_tree

_KILL_WITHIN_S = 20.0
_TRACKER_ENDS_WITHIN_S = 1.0
_CLEARS_WITHIN_S = 30.0
_STARTS_WITHIN_S = 60.0
_LOOK_EVERY_S = 2.0  # a look takes 20 ms
_READY = b"ready\n"


class RunWatch:
    """The living processes of a run, remembered from look to look; `keep` and this process are not among them."""

    def __init__(self, run_id: str, *, keep: Collection[int] = ()) -> None:
        self._run_id = run_id
        self._keep = {os.getpid(), *keep}
        # Equal by process id and start time: the kernel uses ids again.
        self._known = set[psutil.Process]()

    def look(self) -> list[psutil.Process]:
        """Return the run's processes: those with its id, what they started, and what earlier looks have met."""
        children = defaultdict[int, list[psutil.Process]](list)
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                children[process.ppid()].append(process)
            with suppress(psutil.Error, OSError):  # another user's, a zombie, or gone
                if process.environ().get(RUN_MARKER) == self._run_id:
                    self._remember(process)
        parents = [process.pid for process in self._known if is_alive(process)]
        while parents:
            started = children.pop(parents.pop(), [])
            parents += [child.pid for child in started]
            for child in started:
                self._remember(child)
        self._known = set(filter(is_alive, self._known))
        return list(self._known)

    def kill(self, *, grace_s: float = 3.0) -> int:
        """End every process of the run, SIGTERM first and SIGKILL after `grace_s`; return how many there were."""
        terminated = set[psutil.Process]()
        force_from = time.monotonic() + grace_s
        while self.look():
            now = time.monotonic()
            for process in self._known:
                if now >= force_from:
                    _kill(process, tracker_too=now > force_from + _TRACKER_ENDS_WITHIN_S)
                elif process not in terminated:
                    with suppress(psutil.Error):
                        process.terminate()
            terminated |= self._known
            if now > force_from + _KILL_WITHIN_S:
                break
            # psutil.wait_procs would take the exit codes of this process's children.
            time.sleep(0.05)
        return len(terminated)

    def _remember(self, process: psutil.Process) -> None:
        with suppress(psutil.Error):  # gone meanwhile
            if process.pid not in self._keep and is_alive(process):
                self._known.add(process)


def _kill(process: psutil.Process, *, tracker_too: bool) -> None:
    """Send SIGKILL. Python's resource tracker may end by itself, after it has removed its processes' shared memory."""
    with suppress(psutil.Error):
        is_tracker = any(
            "multiprocessing.resource_tracker" in word for word in process.cmdline()
        )
        if tracker_too or not is_tracker:
            process.kill()


def clear_run(watch: RunWatch, folder: RunFolder) -> None:
    """End the run's processes, and remove its sockets, temporary files and shared memory."""
    watch.kill()
    remove_leftovers(folder)


def remove_leftovers(folder: RunFolder) -> None:
    """Remove the run's sockets, temporary files and shared memory folder."""
    temporary = folder.temporary
    scratch = temporary.parent.glob(f"{temporary.name}-scratch-*")  # of confined processes
    for path in (folder.sockets, temporary, folder.shared_memory, *scratch):
        if path.is_dir() and not path.is_symlink():
            remove_tree(path)


@contextmanager
def guarded(folder: RunFolder, claim: Claim | None = None) -> Iterator[None]:
    """Allow the run's processes to be started; leave none of them, no socket and no shared memory at the end.

    The guardian keeps a claim on the folder until everything is cleared away. RunError where it does not start.
    """
    # A run whose launcher and guardian were both killed may have left something.
    clear_run(RunWatch(folder.run_id), folder)
    guardian = _start_guardian(folder, claim)
    try:
        for private in (folder.sockets, folder.temporary):
            make_private(private)
        yield
    finally:
        with suppress(subprocess.TimeoutExpired):
            guardian.communicate(timeout=_CLEARS_WITHIN_S)  # closes its pipe first
        if guardian.returncode != 0:
            guardian.kill()
            guardian.wait()
            clear_run(RunWatch(folder.run_id), folder)


def _start_guardian(folder: RunFolder, claim: Claim | None) -> "subprocess.Popen[bytes]":
    log = folder.log("guardian")
    with open_private(log) as output:
        guardian = subprocess.Popen(
            # -P: a file called select.py where the user stands must not be imported in place of Python's own
            [sys.executable, "-P", "-m", "ycore.launch.guardian", str(folder.root.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={name: value for name, value in os.environ.items() if name != RUN_MARKER},
            start_new_session=True,
            pass_fds=() if claim is None else (claim.descriptor,),
        )
    assert guardian.stdout is not None, "it has a pipe"
    has_answered = bool(select.select([guardian.stdout], [], [], _STARTS_WITHIN_S)[0])
    if not has_answered or os.read(guardian.stdout.fileno(), len(_READY)) != _READY:
        guardian.kill()
        guardian.communicate()
        lines = log.read_text(errors="replace").splitlines() if has_answered else []
        why = lines[-1].strip() if lines else f"no word from it within {_STARTS_WITHIN_S:.0f} s"
        raise RunError(
            f"the process that clears up after a run did not start: {why} (see {log})"
        )
    return guardian


def guard(folder: RunFolder) -> None:
    """Wait for the launcher's end, then leave nothing of the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = RunWatch(folder.run_id)
    with suppress(BrokenPipeError):  # the launcher is gone already
        os.write(sys.stdout.fileno(), _READY)
    while not select.select([sys.stdin.fileno()], [], [], _LOOK_EVERY_S)[0]:
        watch.look()
    clear_run(watch, folder)


if __name__ == "__main__":
    guard(RunFolder(Path(sys.argv[1])))
