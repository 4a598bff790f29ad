"""The trusted server that runs programs: a fresh process, confined anew, for each.

It never sees a program, a test or an output: descriptors of these come with each message, and go to the new process.
So nothing of one program, and nothing of the tests, is in the memory that the next one inherits. It makes the process,
counts what it holds, keeps its deadline, kills it with all that it left, and says how it ended. Its parent is
`program_runners.Runner`. Standard library only.

Messages are JSON datagrams on descriptor 0. The first one has the server's settings, and is answered by `{"ready":
true}`. Then a job `{"id", "kinds", "num_fds", "deadline_s"}`, with the descriptors of each program in order, is
answered by `{"id", "ended": [how each program ended]}`; meanwhile `{"kill": id}` ends it. The first program of a job
leads it: when it ends, the others are killed. A job's programs share their network namespace with nothing but each
other.

At the level `namespaces` the server itself runs in bubblewrap's, and a process is made in the way of `unshare --fork
--kill-child`: an intermediate process makes the namespaces and forks once more, because only a child is in a new
namespace of processes. That child is its first process: when it is killed, the kernel ends all others in it. At
`landlock` and `none` the server forks the process itself, and a job has ended when nothing is below the server.
"""

import array
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypedDict

from ycore.sandbox import Level, Limits, drop_rights, landlock, watch
from ycore.sandbox.drop_rights import MS_NODEV, MS_NOSUID, mount
from ycore.sandbox.program_run import Kind, run

MAX_MESSAGE = 65536  # bytes
_STDLIB = (
    *(
        "math",
        "re",
        "json",
        "random",
        "string",
        "itertools",
        "functools",
        "collections",
        "heapq",
        "bisect",
        "copy",
    ),
    *(
        "typing",
        "dataclasses",
        "enum",
        "operator",
        "datetime",
        "decimal",
        "fractions",
        "statistics",
        "hashlib",
        "io",
    ),
    *("linecache", "abc", "textwrap", "calendar", "cmath", "time", "array", "queue"),
)

# Linux: sched.h, sys/mount.h
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
_MS_RDONLY, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 0x1000, 0x4000, 0x40000
_HIGH = 200  # descriptors below it get their final numbers


class Settings(TypedDict):
    """The first message to the server."""

    level: str
    uid: (
        int | None
    )  # root's programs become this user and those after it; None makes a user namespace for each
    keep: int | None  # a capability that they keep all the same
    limits: dict[str, int]  # of each program with all that it starts: `Limits`
    filter: str  # of system calls, as hexadecimal digits; empty for none
    files: list[str]  # at `landlock`, what programs may read
    prefix: str  # of the paths of scratch folders, where these are not in memory
    path: list[str]  # where programs find modules
    modules: list[str]  # imported before the first program
    kept: list[str]  # folders under the scratch folder that programs see


@dataclass(slots=True)
class Running:
    """One program's process: the first of its namespace."""

    pid: int
    ended_fd: int  # a pidfd, readable once the process (and its namespace) has ended
    scratch: str | None = None  # its folder on a disk
    reason: str | None = None  # why the server killed it
    status: int | None = None  # exit code, or minus the signal
    problem: str | None = None  # it could not be made

    def kill(self, reason: str) -> None:
        if self.status is None and self.reason is None:
            self.reason = reason
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.ended_fd)
        self.status = os.waitstatus_to_exitcode(status)

    def report(self) -> dict[str, Any]:
        return {"status": self.status, "reason": self.reason, "problem": self.problem}


class Starting(NamedTuple):
    """A process that is being made."""

    child: int  # the process itself, or at `namespaces` the one in the middle
    report: int  # its id, and `ready` or what went wrong, a line each
    scratch: str | None

    def running(self) -> Running:
        """Once its program has begun, or cannot."""
        with os.fdopen(self.report, "rb") as file:
            lines = file.read().decode(errors="replace").splitlines()
        pid = next((int(line) for line in lines if line.isdigit()), None)
        if pid != self.child:
            os.waitpid(self.child, 0)
        others = [line for line in lines if not line.isdigit()]  # either line may come first
        problem = None if others == ["ready"] and pid else (others[-1:] or ["no report"])[0]
        if pid is None:
            return Running(0, -1, self.scratch, status=-1, problem=problem)
        return Running(pid, os.pidfd_open(pid), self.scratch, problem=problem)


@dataclass(slots=True)
class Server:
    """The parent's end is `control`, a socket of datagrams."""

    control: socket.socket
    settings: Settings

    def serve(self) -> None:
        """Do one job after the other, until the parent is gone."""
        while True:
            message, fds = receive(self.control)
            if "id" not in message:
                continue  # a kill that came too late
            ended = self.run(message, fds)
            self.control.send(
                json.dumps({"id": message["id"], "ended": [one.report() for one in ended]}).encode()
            )

    def run(self, job: Mapping[str, Any], fds: Sequence[int]) -> list[Running]:
        deadline = time.monotonic() + job["deadline_s"]
        starting, first = list[Starting](), 0
        for index, (kind, count) in enumerate(zip(job["kinds"], job["num_fds"], strict=True)):
            starting.append(self.start(kind, fds[first : first + count], index))
            first += count
        for descriptor in fds:
            os.close(descriptor)
        programs = [one.running() for one in starting]
        self.wait(job["id"], programs, deadline)
        watch.end_all_below(os.getpid())
        for program in programs:
            if program.scratch is not None:
                watch.remove_tree(program.scratch)
        return programs

    def wait(self, job_id: int, programs: Sequence[Running], deadline: float) -> None:
        """Until every program has ended; the first one's end, the deadline or the parent ends them."""
        if any(program.problem for program in programs):
            _kill_all(programs, "problem")
        looked = time.monotonic()
        while left := [program for program in programs if program.status is None]:
            waits_s = max(0.0, min(deadline - time.monotonic(), watch.INTERVAL_S))
            control = self.control.fileno()
            ready, _, _ = select.select(
                [control, *(program.ended_fd for program in left)], [], [], waits_s
            )
            for program in left:
                if program.ended_fd in ready:
                    program.reap()
            if programs[0].status is not None:
                _kill_all(programs, "leader ended")
            if control in ready and receive(self.control)[0].get("kill") == job_id:
                _kill_all(programs, "parent")
            if time.monotonic() >= deadline:
                _kill_all(programs, "deadline")
            if time.monotonic() - looked >= watch.INTERVAL_S:
                self.look(programs)
                looked = time.monotonic()

    def look(self, programs: Sequence[Running]) -> None:
        """Kill what holds too much. What has left its parent's tree counts for every program of the job."""
        limits, everything = Limits(**self.settings["limits"]), watch.below(os.getpid())
        trees = {
            one.pid: {one.pid, *watch.below(one.pid)} for one in programs if one.status is None
        }
        for program in programs:
            others = {
                pid for leader, tree in trees.items() if leader != program.pid for pid in tree
            }
            held = [pid for pid in everything if pid not in others]
            if program.status is None and watch.usage(held, limits, program.scratch).excess(limits):
                program.kill("memory")

    def start(self, kind: Kind, fds: Sequence[int], index: int) -> "Starting":
        """Begin to make a new process, which runs a program with these descriptors from 0 on."""
        uid, scratch = self.settings["uid"], None
        if self.settings["level"] != Level.NAMESPACES:
            folder, prefix = os.path.split(self.settings["prefix"])
            scratch = tempfile.mkdtemp(
                prefix=prefix, dir=folder
            )  # without `dir`, programs would inherit the default
            if uid is not None:
                os.chown(scratch, uid + index, uid + index)
        report, written = os.pipe()
        child = os.fork()
        if not child:
            _in_child(written, lambda: self._begin(kind, fds, index, written, scratch))
        os.close(written)
        return Starting(child, report, scratch)

    def _begin(
        self, kind: Kind, fds: Sequence[int], index: int, written: int, scratch: str | None
    ) -> NoReturn:
        if scratch is None:
            self._enter_namespaces(written)
        else:
            os.write(written, f"{os.getpid()}\n".encode())
        os.setsid()
        report = _renumbered(fds, written)
        _in_child(report, lambda: self._run(kind, report, index, scratch))

    def _enter_namespaces(self, written: int) -> None:
        """In the middle process: the namespaces, and the process in them, which alone returns."""
        uid = self.settings["uid"]
        flags = _NEWPID | _NEWNS | _NEWIPC | (_NEWUSER if uid is None else 0)
        outer, group = os.geteuid(), os.getegid()
        drop_rights.checked(drop_rights.LIBC.unshare(flags), "unshare")
        if uid is None:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{outer} {outer} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
        program = os.fork()
        if program:
            os.write(written, f"{program}\n".encode())
            os._exit(0)

    def _run(self, kind: Kind, report: int, index: int, scratch: str | None) -> NoReturn:
        this = self.settings
        self._confine(None if this["uid"] is None else this["uid"] + index, scratch)
        os.write(report, b"ready\n")
        os.close(report)
        run(kind, range(3, report), list(sys.path))

    def _confine(self, uid: int | None, scratch: str | None) -> None:
        this, limits = self.settings, Limits(**self.settings["limits"])
        if scratch is None:
            _mount_all(limits.scratch, limits.files, this["kept"])
        else:
            os.environ["HOME"] = os.environ["TMPDIR"] = scratch
            os.chdir(scratch)
        if this["level"] == Level.LANDLOCK and scratch is not None:
            rules = landlock.Rules(
                this["files"], scratch, scratch, uid, this["keep"], this["filter"], this["limits"]
            )
            landlock.confine(rules, landlock.change_user(rules))
        else:
            drop_rights.limit_resources(limits)
            drop_rights.give_up_rights(
                uid, keep=this["keep"], refused=bytes.fromhex(this["filter"])
            )
        if scratch is not None:
            drop_rights.prctl(drop_rights.PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    settings, _ = receive(control)
    sys.path[:] = settings["path"]
    drop_rights.end_with_parent()
    signal.signal(signal.SIGTERM, _end)
    drop_rights.prctl(drop_rights.PR_SET_PDEATHSIG, signal.SIGTERM)  # to end first what is below
    for name in (*_STDLIB, *settings["modules"]):
        importlib.import_module(name)
    del settings["modules"]
    gc.collect()
    gc.freeze()  # a program's garbage collection leaves the pages that all share as they are
    control.send(json.dumps({"ready": True}).encode())
    Server(control, settings).serve()


def receive(control: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors; ends the process when the parent is gone."""
    fds = array.array("i")
    data, ancillary, _, _ = control.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(64 * fds.itemsize))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if not data:
        _end()
    return json.loads(data), list(fds)


def _end(*_signal: object) -> NoReturn:
    watch.end_all_below(os.getpid())
    os._exit(0)


def _kill_all(programs: Sequence[Running], reason: str) -> None:
    for program in programs:
        program.kill(reason)


def _in_child(written: int, work: Any) -> NoReturn:
    """Whatever happens in a child of the server stays in it; what went wrong is its last line to the server."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
    except BaseException as error:  # noqa: BLE001 (the border of a process)
        with suppress(OSError):
            os.write(
                written, f"{type(error).__name__}: {error}".replace("\n", " ").encode() + b"\n"
            )
    finally:
        os._exit(70)


def _renumbered(fds: Sequence[int], written: int) -> int:
    """Give the program its descriptors from 0 on, and close all others but the report's, whose new number this is."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _HIGH) for descriptor in fds]
    kept = fcntl.fcntl(written, fcntl.F_DUPFD, _HIGH + len(fds))
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.dup2(kept, len(high))
    os.closerange(len(high) + 1, 2**31 - 1)
    return len(high)


def _mount_all(scratch: int, files: int, kept: Sequence[str]) -> None:
    """Empty, bounded folders in memory over what earlier programs could write to, and nothing in /proc."""
    mount("none", "/", None, _MS_REC | _MS_PRIVATE, "")
    with _held(kept) as folders:
        mount(
            "tmpfs",
            "/tmp",
            "tmpfs",
            MS_NOSUID | MS_NODEV,
            f"size={scratch},nr_inodes={files},mode=1777",
        )
        for (
            folder,
            descriptor,
        ) in folders.items():  # Python's own, where it lies in the scratch folder
            os.makedirs(folder, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", folder, None, _MS_BIND | _MS_REC, "")
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=16m,nr_inodes=1000,mode=1777")
    mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | _MS_RDONLY, "size=4k,nr_inodes=2")
    os.chdir("/tmp")


@contextmanager
def _held(folders: Sequence[str]) -> Iterator[dict[str, int]]:
    held = {folder: os.open(folder, os.O_PATH) for folder in folders}
    yield held
    for descriptor in held.values():
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
