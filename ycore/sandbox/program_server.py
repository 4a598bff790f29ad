"""The trusted server that runs programs: a fresh process, confined anew, for each.

It never sees a program, a test or an output: descriptors of these come with each message, and go to the new process.
So nothing of one program, and nothing of the tests, is in the memory that the next one inherits. It makes the process,
counts what it holds, keeps its deadline, kills it with all that it left, and says how it ended. Its parent is
`program_pool.ProgramServer`. Standard library only.

Messages are JSON datagrams on descriptor 0. The first one has the server's settings, and is answered by `{"ready":
true}`. Then a job `{"kinds", "num_fds", "deadline_s"}`, with the descriptors of each program in order, is answered by a
list of how each program ended. The first program of a job leads it: when it ends, the others are killed. A job's
programs share their network namespace with nothing but each other.

At the level `namespaces` the server itself runs in bubblewrap's, and a process is made in the way of `unshare --fork
--kill-child`: an intermediate process makes the namespaces and forks once more, because only a child is in a new
namespace of processes. That child is its first process: when it is killed, the kernel ends all others in it. At
`landlock` and `none` the server forks the process itself, and a job has ended when nothing is below the server.
"""

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypedDict

from ycore.sandbox import Level, Limits, drop_rights, landlock, watch
from ycore.sandbox.drop_rights import MS_NODEV, MS_NOSUID, mount
from ycore.sandbox.program_run import ProgramKind, run_program

MAX_MESSAGE = 65536  # bytes
_MAX_FDS = 64
_STDLIB = (
    "math re json random string itertools functools collections heapq bisect copy typing dataclasses enum operator "
    "datetime decimal fractions statistics hashlib io linecache abc textwrap calendar cmath time array queue"
)

# Linux: sched.h, sys/mount.h
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
_MS_RDONLY, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 0x1000, 0x4000, 0x40000
_HIGH = 200  # descriptors below it get their final numbers


class ServerSettings(TypedDict):
    """The first message to the server."""

    level: str
    uid: int | None  # root's programs become this user and those after it
    keep: int | None  # a capability that they keep all the same
    limits: dict[str, int]  # of each program with all that it starts: `Limits`
    filter: str  # of system calls, as hexadecimal digits; empty for none
    files: list[str]  # at `landlock`, what programs may read
    prefix: str  # of the paths of scratch folders, where these are not in memory
    path: list[str]  # where programs find modules
    modules: list[str]  # imported before the first program
    kept: list[str]  # folders under the scratch folder that programs see


@dataclass(slots=True)
class Program:
    """One program's process: the first of its namespace."""

    child: int  # the process itself, or at `namespaces` the intermediate one
    report: int  # a pipe with the process' id, and `ready` or what went wrong, a line each
    scratch: str | None  # its folder, where that is not in memory
    pid: int = 0
    ended_fd: int = -1  # a pidfd, readable once the process (and its namespace) has ended
    reason: str | None = None  # why the server killed it
    status: int | None = None  # exit code, or minus the signal
    problem: str | None = None  # it could not be made

    def await_start(self) -> None:
        """Wait until the program has begun, or cannot."""
        with os.fdopen(self.report, "rb") as file:
            lines = file.read().decode(errors="replace").splitlines()
        self.pid = next((int(line) for line in lines if line.isdigit()), 0)
        messages = [line for line in lines if not line.isdigit()]  # either line may come first
        if self.pid != self.child:
            os.waitpid(self.child, 0)
        if self.pid:
            self.ended_fd = os.pidfd_open(self.pid)
        else:
            self.status = -1
        if messages != ["ready"] or not self.pid:
            self.problem = messages[-1] if messages else "no report"

    def kill(self, reason: str) -> None:
        if self.status is None and self.reason is None:
            self.reason = reason
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.ended_fd)
        self.status = os.waitstatus_to_exitcode(status)


class _Server:
    def __init__(self, control: socket.socket, settings: ServerSettings) -> None:
        self._control = control
        self._settings = settings
        self._limits = Limits(**settings["limits"])

    def serve(self) -> NoReturn:
        """Do one job after the other, until the parent is gone."""
        while True:
            programs = self._do(*_receive(self._control))
            ended = [
                {"status": program.status, "reason": program.reason, "problem": program.problem}
                for program in programs
            ]
            self._control.send(json.dumps(ended).encode())

    def _do(self, job: Mapping[str, Any], fds: list[int]) -> list[Program]:
        deadline = time.monotonic() + job["deadline_s"]
        programs: list[Program] = []
        first = 0
        for kind, num_fds in zip(job["kinds"], job["num_fds"], strict=True):
            programs.append(self._start(kind, fds[first : first + num_fds], len(programs)))
            first += num_fds
        for descriptor in fds:
            os.close(descriptor)
        for program in programs:
            program.await_start()
        self._wait(programs, deadline)
        watch.end_all_below(os.getpid())
        for program in programs:
            if program.scratch is not None:
                watch.remove_tree(program.scratch)
        return programs

    def _wait(self, programs: Sequence[Program], deadline: float) -> None:
        """Wait until every program has ended; the first one's end or the deadline ends them."""
        if any(program.problem for program in programs):
            _kill_all(programs, "problem")
        last_look = time.monotonic()
        while running := [program for program in programs if program.status is None]:
            timeout_s = max(0.0, min(deadline - time.monotonic(), watch.INTERVAL_S))
            ended_fds = [program.ended_fd for program in running]
            ready, _, _ = select.select(ended_fds, [], [], timeout_s)
            for program in running:
                if program.ended_fd in ready:
                    program.reap()
            if programs[0].status is not None:
                _kill_all(programs, "leader ended")
            if time.monotonic() >= deadline:
                _kill_all(programs, "deadline")
            if time.monotonic() - last_look >= watch.INTERVAL_S:
                self._look(programs)
                last_look = time.monotonic()

    def _look(self, programs: Sequence[Program]) -> None:
        """Kill what holds too much. What has left its parent's tree counts for every program of the job."""
        everything = watch.below(os.getpid())
        running = [program for program in programs if program.status is None]
        trees = {program.pid: {program.pid, *watch.below(program.pid)} for program in running}
        for program in running:
            foreign = set().union(*(tree for pid, tree in trees.items() if pid != program.pid))
            pids = [pid for pid in everything if pid not in foreign]
            if watch.usage(pids, self._limits, program.scratch).excess(self._limits):
                program.kill("memory")

    def _start(self, kind: ProgramKind, fds: Sequence[int], index: int) -> Program:
        """Begin to make a new process, which runs a program with these descriptors from 0 on."""
        uid = self._settings["uid"]
        uid = None if uid is None else uid + index
        scratch = None
        if self._settings["level"] != Level.NAMESPACES:
            folder, prefix = os.path.split(self._settings["prefix"])
            scratch = tempfile.mkdtemp(
                prefix=prefix, dir=folder
            )  # else programs inherit a default
            if uid is not None:
                os.chown(scratch, uid, uid)
        report, report_end = os.pipe()
        child = os.fork()
        if not child:
            _in_child(report_end, lambda: self._begin(kind, fds, uid, report_end, scratch))
        os.close(report_end)
        return Program(child, report, scratch)

    def _begin(
        self,
        kind: ProgramKind,
        fds: Sequence[int],
        uid: int | None,
        report: int,
        scratch: str | None,
    ) -> None:
        """Confine the new process, report that it is ready and run the program."""
        if scratch is None:
            self._enter_namespaces(report)
        else:
            os.write(report, f"{os.getpid()}\n".encode())
        os.setsid()
        report = _renumber(fds, report)
        _in_child(report, lambda: self._run(kind, uid, report, scratch))

    def _run(
        self, kind: ProgramKind, uid: int | None, report: int, scratch: str | None
    ) -> None:
        self._confine(uid, scratch)
        os.write(report, b"ready\n")
        os.close(report)
        run_program(kind, range(3, report), list(sys.path))

    def _enter_namespaces(self, report: int) -> None:
        """Make the namespaces, and the process in them, which alone returns."""
        user_flag = _NEWUSER if self._settings["uid"] is None else 0
        uid = os.geteuid()
        gid = os.getegid()
        flags = _NEWPID | _NEWNS | _NEWIPC | user_flag
        drop_rights.checked(drop_rights.LIBC.unshare(flags), "unshare")
        if user_flag:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{uid} {uid} 1")
            _write("/proc/self/gid_map", f"{gid} {gid} 1")
        program = os.fork()
        if program:
            os.write(report, f"{program}\n".encode())
            os._exit(0)

    def _confine(self, uid: int | None, scratch: str | None) -> None:
        settings = self._settings
        if scratch is None:
            _mount_all(self._limits, settings["kept"])
        else:
            os.environ["HOME"] = os.environ["TMPDIR"] = scratch
            os.chdir(scratch)
        if settings["level"] == Level.LANDLOCK and scratch is not None:
            rules = landlock.LandlockRules(
                files=settings["files"],
                scratch=scratch,
                working=scratch,
                uid=uid,
                keep=settings["keep"],
                program=settings["filter"],
                limits=settings["limits"],
            )
            landlock.confine(rules, landlock.change_user(rules))
        else:
            drop_rights.limit_resources(self._limits)
            refused = bytes.fromhex(settings["filter"])
            drop_rights.give_up_rights(uid, keep=settings["keep"], refused=refused)
        if scratch is not None:
            drop_rights.prctl(drop_rights.PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    settings, _ = _receive(control)
    sys.path[:] = settings["path"]
    drop_rights.end_with_parent()
    signal.signal(signal.SIGTERM, _end)
    drop_rights.prctl(
        drop_rights.PR_SET_PDEATHSIG, signal.SIGTERM
    )  # to end first what is below
    for name in (*_STDLIB.split(), *settings["modules"]):
        importlib.import_module(name)
    del settings["modules"]
    gc.collect()
    gc.freeze()  # a program's garbage collection leaves the pages that all share as they are
    control.send(json.dumps({"ready": True}).encode())
    _Server(control, settings).serve()


def _receive(control: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors; end the process when the parent is gone."""
    data, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, _MAX_FDS)
    if not data:
        _end()
    return json.loads(data), fds


def _end(*_signal: object) -> NoReturn:
    watch.end_all_below(os.getpid())
    os._exit(0)


def _kill_all(programs: Sequence[Program], reason: str) -> None:
    for program in programs:
        program.kill(reason)


def _in_child(report: int, work: Callable[[], object]) -> NoReturn:
    """Do the work of a child of the server, which never returns; what goes wrong is its last line to the server."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
    except BaseException as error:  # noqa: BLE001 (the border of a process)
        line = f"{type(error).__name__}: {error}".replace("\n", " ")
        with suppress(OSError):
            os.write(report, line.encode() + b"\n")
    finally:
        os._exit(70)


def _renumber(fds: Sequence[int], report: int) -> int:
    """Give the program its descriptors from 0 on, and close all others but the report's, whose new number this is."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in [*fds, report]]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(len(high), 2**31 - 1)
    return len(fds)


def _mount_all(limits: Limits, kept: Sequence[str]) -> None:
    """Mount empty, bounded folders in memory over what earlier programs could write to, and nothing in /proc."""
    flags = MS_NOSUID | MS_NODEV
    scratch = f"size={limits.scratch},nr_inodes={limits.files},mode=1777"
    mount("none", "/", None, _MS_REC | _MS_PRIVATE, "")
    folders = {folder: os.open(folder, os.O_PATH) for folder in kept}
    mount("tmpfs", "/tmp", "tmpfs", flags, scratch)
    for (
        folder,
        descriptor,
    ) in folders.items():  # Python's own, where it lies in the scratch folder
        os.makedirs(folder, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", folder, None, _MS_BIND | _MS_REC, "")
        os.close(descriptor)
    mount("tmpfs", "/dev/shm", "tmpfs", flags, "size=16m,nr_inodes=1000,mode=1777")
    mount("tmpfs", "/proc", "tmpfs", flags | _MS_RDONLY, "size=4k,nr_inodes=2")
    os.chdir("/tmp")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
