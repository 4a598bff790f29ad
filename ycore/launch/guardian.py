"""Clear a run away: every process, socket and piece of shared memory, however its launcher ended, SIGKILL included.

The guardian is a small process beside the launcher (`python -m ycore.launch.guardian RUN_FOLDER`). It says that it is
there, waits until the pipe from the launcher closes, and then clears up. `guarded` is the launcher's side.

A process belongs to a run when it has one of the run's marks (`ownership`), or it descends from such a process now, or
did at an earlier look.
"""

import os
import select
import shutil
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
from ycore.launch.ownership import is_owned, kill_group, make_group, members_of, remove_group
from ycore.launch.segments import (
    Creations,
    Segment,
    held_segments,
    remove_segments,
    segments_changed_ns,
)
from ycore.run.claim import Claim
from ycore.run.files import make_private
from ycore.run.paths import RunFolder
from ycore.run.process_tree import is_alive
from ycore.run.reports import RUN_MARKER
from ycore.run.run_record import RunRecord, read_record

_KILL_WITHIN_S = 20.0
_TRACKER_ENDS_WITHIN_S = 1.0
_CLEARS_WITHIN_S = 30.0
_STARTS_WITHIN_S = 60.0
_LOOK_EVERY_S = 5.0  # a look takes 20 ms, and an idle run should cost nothing
_SEGMENTS_EVERY_S, _BETWEEN_LOOKS_S = 0.1, 0.5
_COUNT_EVERY_S = 0.02  # 0.2 ms each
_MARKED_WITHIN_S = 2.0  # of its start, as a fork of the launcher has no mark yet
_READY = b"ready\n"


class RunWatch:
    """The processes and shared memory of a run, remembered from look to look; without `keep` and this process."""

    def __init__(
        self, run_id: str, *, keep: Collection[int] = (), creations: Creations | None = None
    ) -> None:
        self._run_id = run_id
        self._keep = {os.getpid(), *keep}
        self._known: dict[
            tuple[int, float], psutil.Process
        ] = {}  # by process id and start time: ids are used again
        self._segments: set[Segment] = set()
        self._creations = creations
        self._members: tuple[
            set[int], ...
        ] = ()  # process ids in the run's cgroup, now and a moment ago
        self._counted = 0.0
        self._others: set[int] = set()  # process ids that were not the run's at the last look
        self._users = {os.geteuid()}

    def look(self) -> list[psutil.Process]:
        others, children = set[int](), defaultdict[int, list[psutil.Process]](list)
        for process in psutil.process_iter():
            self.look_at_new_segments()
            self._meet(process, others)
            with suppress(psutil.Error):
                children[process.ppid()].append(process)
        self._others = others
        parents = [process.pid for process in self._known.values() if is_alive(process)]
        while parents:
            below = children.pop(parents.pop(), [])
            parents += [child.pid for child in below]
            for child in below:
                self._remember(child)
        self._known = {key: process for key, process in self._known.items() if is_alive(process)}
        for process in list(self._known.values()):
            self.look_at_new_segments()
            self._segments |= held_segments(process.pid)
        return list(self._known.values())

    def look_at_new_segments(self) -> None:
        """Find out at once which new shared memory is the run's, before the maker may be gone.

        It is the run's where the kernel names the maker, and that one was in the run's cgroup just before. Else where a
        process of the run holds it: the youngest are asked first, then those that no look has met.
        """
        if self._creations is None:
            return
        if (
            time.monotonic() - self._counted > _COUNT_EVERY_S
        ):  # before reading: then a maker is in one of the two
            self._members = (members_of(self._run_id), *self._members[:1])
            self._counted = time.monotonic()
        makers = self._creations.read()
        self._segments |= {
            segment for segment, maker in makers.items() if any(maker in of for of in self._members)
        }
        made = makers.keys() - self._segments
        if not made:
            return
        known = {pid for pid, _ in self._known}
        for pid in sorted(
            {*psutil.pids()} - self._others, key=lambda pid: (pid in known, pid), reverse=True
        ):
            with suppress(psutil.Error):
                if pid in known or self._meet(psutil.Process(pid), self._others):
                    held = held_segments(pid) & made
                    self._segments |= held
                    made -= held
            if not made:
                return

    def _meet(self, process: psutil.Process, others: set[int]) -> bool:
        """Remember a process that has a mark of the run; add one without to `others`, once it is too old to get one."""
        if process.pid not in self._keep and is_owned(process, self._run_id):
            self._remember(process)
            return True
        with suppress(psutil.Error):
            if time.time() - process.create_time() > _MARKED_WITHIN_S:
                others.add(process.pid)
        return False

    def kill(self, *, grace_s: float = 3.0) -> int:
        """End every process of the run: SIGTERM first, SIGKILL after `grace_s`; returns how many there were."""
        met: set[tuple[int, float]] = set()
        force_from = time.monotonic() + grace_s
        while self.look():
            now = time.monotonic()
            if now > force_from + _TRACKER_ENDS_WITHIN_S and len(self._keep) == 1:
                kill_group(self._run_id)
            for key, process in self._known.items():
                if now >= force_from:
                    _kill(process, tracker_too=now > force_from + _TRACKER_ENDS_WITHIN_S)
                elif key not in met:
                    with suppress(psutil.Error):
                        process.terminate()
            met |= self._known.keys()
            if now > force_from + _KILL_WITHIN_S:
                break
            time.sleep(
                0.05
            )  # psutil.wait_procs would take the exit codes of this process's children
        return len(met)

    def remove_segments(self, *, began: float) -> None:
        """Unlink the shared memory that the run, which began then, has left (`segments`)."""
        remove_segments(self._segments, began=began, users=self._users)

    def _remember(self, process: psutil.Process) -> None:
        with suppress(psutil.Error):  # gone meanwhile
            if process.pid not in self._keep and is_alive(process):
                self._known[(process.pid, process.create_time())] = process
                self._users.add(process.uids().effective)


def _kill(process: psutil.Process, *, tracker_too: bool) -> None:
    """SIGKILL. Python's resource tracker may end by itself, after it has cleaned up for the processes it serves."""
    with suppress(psutil.Error):
        if tracker_too or not any(
            "multiprocessing.resource_tracker" in word for word in process.cmdline()
        ):
            process.kill()


def clear_run(watch: RunWatch, folder: RunFolder, record: RunRecord) -> None:
    """End the run's processes, and remove its cgroup, sockets, temporary files and shared memory."""
    watch.kill()
    watch.remove_segments(began=record.began)
    remove_group(record.run_id)
    remove_leftovers(folder)


def remove_leftovers(folder: RunFolder) -> None:
    """Remove the run's sockets, temporary files and shared memory folder."""
    scratch = folder.temporary.parent.glob(
        f"{folder.temporary.name}-scratch-*"
    )  # of confined processes
    for path in (folder.sockets, folder.temporary, folder.shared_memory, *scratch):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def guarded(folder: RunFolder, held: Claim) -> Iterator[None]:
    """A context in which the run's processes may be started; after it none is left, nor a socket, nor shared memory.

    The guardian keeps the claim on the folder until everything is cleared away. RunError where it does not start.
    """
    run_id = folder.run_id
    clear_run(
        RunWatch(run_id), folder, held.record
    )  # what is left of a run whose guardian was killed too
    held.begin()
    guardian = _start_guardian(folder, held)
    try:
        for private in (folder.sockets, folder.temporary):
            make_private(private)
        make_group(run_id)
        yield
    finally:
        with suppress(subprocess.TimeoutExpired):
            guardian.communicate(timeout=_CLEARS_WITHIN_S)  # closes its pipe first
        if guardian.returncode != 0:
            guardian.kill()
            guardian.wait()
            clear_run(RunWatch(run_id), folder, held.record)


def _start_guardian(folder: RunFolder, held: Claim) -> "subprocess.Popen[bytes]":
    log = folder.log("guardian")
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        guardian = subprocess.Popen(
            # -P: a file called select.py where the user stands must not be imported in place of Python's own
            [sys.executable, "-P", "-m", "ycore.launch.guardian", str(folder.root.resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env={name: value for name, value in os.environ.items() if name != RUN_MARKER},
            start_new_session=True,
            pass_fds=(held.descriptor,),
        )
    assert guardian.stdout is not None, "it has a pipe"
    is_there = bool(select.select([guardian.stdout], [], [], _STARTS_WITHIN_S)[0])
    if not is_there or os.read(guardian.stdout.fileno(), len(_READY)) != _READY:
        guardian.kill()
        guardian.communicate()
        lines = log.read_text(errors="replace").splitlines() if is_there else []
        why = lines[-1].strip() if lines else f"no word from it within {_STARTS_WITHIN_S:.0f} s"
        raise RunError(f"the process that clears up after a run did not start: {why} (see {log})")
    return guardian


def guard(folder: RunFolder) -> None:
    """Wait for the launcher's end, then leave nothing of the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    record = read_record(folder.lock)
    assert record is not None and record.run_id == folder.run_id, (
        "the launcher has claimed the folder"
    )
    creations = Creations()
    watch = RunWatch(record.run_id, creations=creations)
    with suppress(BrokenPipeError):  # the launcher is gone already
        os.write(sys.stdout.fileno(), _READY)
    pipe, looked, seen = sys.stdin.fileno(), 0.0, -1
    while pipe not in select.select([pipe, *creations.descriptors], [], [], _SEGMENTS_EVERY_S)[0]:
        used = time.process_time()
        watch.look_at_new_segments()
        time.sleep(
            4 * (time.process_time() - used)
        )  # a fifth of a core at most, however many others make
        changed = segments_changed_ns()
        if time.monotonic() - looked > (_LOOK_EVERY_S if changed == seen else _BETWEEN_LOOKS_S):
            watch.look()
            looked, seen = time.monotonic(), changed
    clear_run(watch, folder, record)


if __name__ == "__main__":
    guard(RunFolder(Path(sys.argv[1])))
