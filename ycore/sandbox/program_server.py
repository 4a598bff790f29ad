"""The trusted server that runs programs: a fresh process, confined anew, for each.

It never sees a program, a test or an output: descriptors of these come with each message, and go to the new process.
So nothing of one program, and nothing of the tests, is in the memory that the next one inherits. It makes the process,
counts what it holds, keeps its deadline, kills it with all that it left, and says how it ended. Its parent is
`program_pool.ProgramServer`. Standard library only.

Its argument is `ServerSettings`. Messages are JSON datagrams on descriptor 0: a job `{"programs": [[kind, number of
descriptors], ...], "deadline_s"}`, with the descriptors in order, is answered by a list of how each program ended. The
first program of a job leads it: when it ends, the other is killed. The last descriptor of each is a connection between
the two.

At the level `namespaces` the server itself runs in bubblewrap's, and each program is the first process of a namespace
of its own: when it is killed, the kernel ends all others in it. At `landlock` and `none` a job has ended when nothing
is below the server.

Nothing that a program writes is believed about itself. A script gives its output; a called program gives values, and
the tests that judge them run in another process (`unit_tests`).
"""

import atexit
import fcntl
import gc
import importlib
import json
import linecache
import os
import select
import signal
import site
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any, Literal, NoReturn, TypedDict

from ycore.sandbox import END_S, Limits, stage, watch
from ycore.sandbox.remote_calls import Gone, ProgramConnection, serve_calls
from ycore.sandbox.stage import MS_NODEV, MS_NOSUID, StageSteps, checked, mount
from ycore.sandbox.unit_tests import run_unit_tests

ProgramKind = Literal["script", "callee", "tests"]

MAX_MESSAGE = 65536  # bytes
_MAX_FDS = 64
_STDLIB = (
    "math re json random string itertools functools collections heapq bisect copy typing dataclasses enum operator "
    "datetime decimal fractions statistics hashlib io linecache abc textwrap calendar cmath time array queue"
)
_FILE_NAME = "program.py"

# Linux: sched.h, sys/mount.h
_NEWNS = 0x20000
_NEWIPC = 0x8000000
_NEWPID = 0x20000000
_MS_RDONLY = 1
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_HIGH = 200  # descriptors below it get their final numbers


class ServerSettings(TypedDict):
    """The server's argument."""

    steps: StageSteps  # of each program; root's programs become `uid` and the users after it
    prefix: str  # of the paths of scratch folders, where these are not in memory
    path: list[str]  # where programs find the standard library
    site: list[str]  # folders of packages, with the `.pth` files of editable installs
    modules: list[str]  # imported before the first program
    kept: list[str]  # files and folders under the scratch folder that programs see


@dataclass
class Program:
    """One program's process."""

    pid: int
    ended_fd: int  # a pidfd, readable once the process (and its namespace) has ended
    report: int  # a pipe that holds why it could not begin
    reason: str | None = None  # why the server killed it
    status: int | None = None  # exit code, or minus the signal

    def kill(self, reason: str) -> None:
        if self.status is None and self.reason is None:
            self.reason = reason
            os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        os.close(self.ended_fd)
        self.status = os.waitstatus_to_exitcode(status)

    def summary(self) -> dict[str, Any]:
        with os.fdopen(self.report, "rb") as file:
            problem = file.read().decode(errors="replace")
        return {"status": self.status, "reason": self.reason, "problem": problem}


def serve_programs() -> None:
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    settings: ServerSettings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    for folder in settings["site"]:
        site.addsitedir(folder)
    settings["path"] = list(sys.path)
    stage.end_with_parent()
    signal.signal(signal.SIGTERM, stage.end_everything)
    # To end first what is below.
    stage.checked_prctl(stage.PR_SET_PDEATHSIG, signal.SIGTERM)
    for name in (*_STDLIB.split(), *settings["modules"]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a program's garbage collection leaves the pages that all share as they are
    while True:
        message, fds, _, _ = socket.recv_fds(control, MAX_MESSAGE, _MAX_FDS)
        if not message:
            stage.end_everything()
        control.send(json.dumps(_do(settings, json.loads(message), fds)).encode())


def _do(
    settings: ServerSettings, job: Mapping[str, Any], fds: Sequence[int]
) -> list[dict[str, Any]]:
    """Run the programs of a job, and say how each ended."""
    deadline = time.monotonic() + job["deadline_s"]
    scratch = None
    if not settings["steps"]["in_namespaces"]:
        folder, prefix = os.path.split(settings["prefix"])
        # With its folder: else programs inherit what tempfile found out.
        scratch = tempfile.mkdtemp(prefix=prefix, dir=folder)
        os.chmod(scratch, 0o711)
    connection = [end.detach() for end in socket.socketpair()]
    programs: list[Program] = []
    remaining = iter(fds)
    for index, (kind, num_fds) in enumerate(job["programs"]):
        passed = [*islice(remaining, num_fds), connection[index]]
        programs.append(_start(settings, kind, passed, index, scratch))
    for descriptor in (*fds, *connection):
        os.close(descriptor)
    _wait(programs, settings["steps"], scratch, deadline)
    is_over = watch.end_all_below(os.getpid())
    if scratch is not None:
        watch.remove_tree(scratch)
    summaries = [program.summary() for program in programs]
    if not is_over:  # the next program does not run beside them
        summaries[0]["problem"] = f"processes of the program were left after {END_S:g} s"
    return summaries


def _wait(
    programs: Sequence[Program], steps: StageSteps, scratch: str | None, deadline: float
) -> None:
    """Wait until every program has ended. The first one's end, the deadline or too much memory end them."""
    next_look = time.monotonic() + watch.INTERVAL_S
    while running := [program for program in programs if program.status is None]:
        timeout_s = max(0.0, min(deadline, next_look) - time.monotonic())
        ended_fds = [program.ended_fd for program in running]
        ready, _, _ = select.select(ended_fds, [], [], timeout_s)
        for program in running:
            if program.ended_fd in ready:
                program.reap()
        reason = None
        if programs[0].status is not None:
            reason = "leader ended"
        elif time.monotonic() >= deadline:
            reason = "deadline"
        elif time.monotonic() >= next_look:
            reason = "memory" if _is_excess(steps, scratch) else None
            next_look = time.monotonic() + watch.INTERVAL_S
        if reason is not None:
            for program in running:
                program.kill(reason)


def _is_excess(steps: StageSteps, scratch: str | None) -> bool:
    """Whether the programs hold too much. In a container, root may not look at another user's open files as root."""
    pids = watch.below(os.getpid())
    limits = Limits(**steps["limits"])
    if watch.excess_of(pids, limits, scratch):
        return True
    if steps["uid"] is None or scratch is None:
        return False
    parent = os.getppid()
    try:
        for user in (steps["uid"], steps["uid"] + 1):
            stage.LIBC.setfsgid(user)
            stage.LIBC.setfsuid(user)
            # It took away the rights that the programs may have kept.
            stage.set_capabilities(stage.capabilities())
            if watch.deleted_bytes(pids) > limits.scratch:
                return True
        return False
    finally:
        stage.LIBC.setfsuid(0)
        stage.LIBC.setfsgid(0)
        # The kernel forgets this with a change of user, and no signal comes of a parent that ended meanwhile.
        stage.checked_prctl(stage.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            stage.end_everything()


def _start(
    settings: ServerSettings,
    kind: ProgramKind,
    fds: Sequence[int],
    index: int,
    folder: str | None,
) -> Program:
    """Begin to make a new process, which runs a program with these descriptors from 0 on."""
    steps = settings["steps"].copy()
    if steps["uid"] is not None:
        steps["uid"] += index
    if folder is None:
        _give_next_child_a_namespace()
    else:
        steps["scratch"] = os.path.join(folder, str(index))
        os.mkdir(steps["scratch"], 0o700)
        if steps["uid"] is not None:
            os.chown(steps["scratch"], steps["uid"], steps["uid"])
    report, report_end = os.pipe()
    pid = os.fork()
    if not pid:
        _begin(settings, steps, kind, fds, report_end)
    os.close(report_end)
    return Program(pid, os.pidfd_open(pid), report)


def _give_next_child_a_namespace() -> None:
    """Make a namespace of processes for the next child; a second one is refused until we are back in our own."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    checked(stage.LIBC.setns(own, _NEWPID), "setns")
    os.close(own)
    checked(stage.LIBC.unshare(_NEWPID), "unshare")


def _begin(
    settings: ServerSettings,
    steps: StageSteps,
    kind: ProgramKind,
    fds: Sequence[int],
    report: int,
) -> NoReturn:
    """Confine the new process and run the program. Why it cannot begin is its report to the server."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        report = _renumber(fds, report)
        if steps["in_namespaces"]:
            checked(stage.LIBC.unshare(_NEWNS | _NEWIPC), "unshare")
            _mount_all(Limits(**steps["limits"]), settings["kept"])
        else:
            os.environ["HOME"] = os.environ["TMPDIR"] = steps["scratch"]
            os.chdir(steps["scratch"])
        stage.take_steps(steps)
        os.close(report)
    except BaseException as error:  # noqa: BLE001 (the border of a process)
        line = f"{type(error).__name__}: {error}".replace("\n", " ")
        os.write(report, line.encode())
        os._exit(70)
    _run_program(kind, range(3, report), settings["path"])


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
    mount("none", "/", None, _MS_REC | _MS_PRIVATE, "")
    paths = {path: os.open(path, os.O_PATH) for path in kept}
    for folder, options in limits.mounts.items():
        mount("tmpfs", folder, "tmpfs", flags, options)
    for path, descriptor in paths.items():  # Python's own, where it lies in /tmp
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        os.makedirs(path if is_folder else os.path.dirname(path), exist_ok=True)
        if not is_folder:
            os.mknod(path)
        mount(f"/proc/self/fd/{descriptor}", path, None, _MS_BIND | _MS_REC, "")
        os.close(descriptor)
    mount("tmpfs", "/proc", "tmpfs", flags | _MS_RDONLY, "size=4k,nr_inodes=2")
    os.chdir("/tmp")


def _run_program(kind: ProgramKind, fds: Sequence[int], path: Sequence[str]) -> NoReturn:
    """Run what the first of the descriptors holds, and end the process as that does; modules are found in `path`.

    `fds`: the source, for the tests their results, and the connection.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget_server(path)
    status = 0
    try:
        if kind == "script":
            _run_script(*fds)
        elif kind == "callee":
            _run_callee(*fds)
        else:
            run_unit_tests(*fds)
    except SystemExit as end:
        status = _status_of(end)
    except BaseException:  # noqa: BLE001 (the border of a process)
        traceback.print_exc()
        status = 1
    if kind == "script":
        status = _finish(status)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(status)


def _run_script(source: int, connection: int) -> None:
    os.close(connection)
    text = _read(source)
    exec(compile(text, _FILE_NAME, "exec"), _module("__main__", text).__dict__)


def _run_callee(source: int, connection: int) -> None:
    """Run a program once as a module, say how that went, and answer the questions of the tests until they end."""
    text = _read(source)
    names = _module("solution", text).__dict__
    tests = ProgramConnection(connection)
    state = "ready"
    try:
        code = compile(text, _FILE_NAME, "exec")
    except Exception:  # noqa: BLE001 (of the compiler: also ValueError, RecursionError, OverflowError)
        state = "compile_error"
    else:
        try:
            exec(code, names)
        except BaseException:  # noqa: BLE001 (SystemExit at the end of a module too)
            state = "run_error"
    with suppress(Gone):
        tests.send({"state": state})
        if state == "ready":
            serve_calls(tests, names)


def _read(descriptor: int) -> str:
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode("utf-8", errors="replace")


def _module(name: str, text: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = _FILE_NAME
    sys.modules[name] = module
    lines = text.splitlines(keepends=True)
    linecache.cache[_FILE_NAME] = (
        len(text),
        None,
        lines,
        _FILE_NAME,
    )  # for tracebacks, inspect
    return module


def _forget_server(path: Sequence[str]) -> None:
    """Give fresh standard streams, and only Python's own modules and the allowed packages to import."""
    sys.argv[:] = [_FILE_NAME]
    sys.path[:] = path
    for name in ("PYTHONPATH", "YCORE_RUN", "PWD"):
        os.environ.pop(name, None)
    for name in [name for name in sys.modules if name == "ycore" or name.startswith("ycore.")]:
        del sys.modules[name]
    stdin = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115 (it lasts)
    for name, stream in (("stdin", stdin), ("stdout", _writer(1)), ("stderr", _writer(2))):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _writer(descriptor: int) -> Any:
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _finish(status: int) -> int:
    """Do what Python does when a script has ended: wait for its threads, call what it registered."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 (the border of a process)
        traceback.print_exc()
        return status or 1
    return status


def _status_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1
