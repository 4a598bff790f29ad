"""The two ways to run programs, one job after the other, as their parent knows them. Nothing here runs inside.

`ServerRunner` (level `namespaces`) keeps one trusted fork server in bubblewrap's namespaces and sends it jobs over a
socket, with the descriptors of each program. `ProcessRunner` (`landlock`, `none`) starts a confined Python for each
program of a job; on a pipe the process says that it begins.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol

import ycore
from ycore.errors import RunError
from ycore.run.process_tree import kill_tree
from ycore.sandbox import Level, Limits, View
from ycore.sandbox.confine import FIRST_UID, NUM_UIDS, Launch, launch_of, own_variables
from ycore.sandbox.landlock import EXIT_EXCESS
from ycore.sandbox.namespaces import SCRATCH, bwrap_command, find_bwrap, python_folders
from ycore.sandbox.program_run import Kind
from ycore.sandbox.program_server import MAX_MESSAGE, Settings
from ycore.sandbox.syscall_filter import filter_bytes

_START_TIMEOUT_S = 60.0
_ANSWER_GRACE_S, _END_GRACE_S = 10.0, 5.0


class Lost(Exception):
    """A runner's process ended, or did not answer, in the middle of a job."""


@dataclass(frozen=True, slots=True)
class Job:
    """Programs to run together; the descriptors of each become its own from 0 on. The first one leads."""

    kinds: Sequence[Kind]
    fds: Sequence[Sequence[int]]
    deadline_s: float


class Runner(Protocol):
    """Runs programs, one job after the other."""

    async def ready(self) -> int:
        """Make it so that a job can begin; 1 where something was started in place of what had failed, else 0."""

    def send(self, job: Job) -> None:
        """Begin a job. The programs have descriptors of their own afterwards."""

    async def ended(self, job: Job) -> list[dict[str, Any]]:
        """How each program of the job ended: `status`, `reason`, `problem`. Lost where that cannot be known."""

    def kill_job(self) -> None:
        """End what runs now."""

    def close(self) -> None:
        """End everything; `ready` makes it anew."""


class ServerRunner(Runner):
    """A server of programs (`program_server`), seen from its parent. It has no process until `ready`."""

    def __init__(self, number: int, log: Path, *, run_id: str, limits: Limits, packages: Sequence[str]) -> None:
        self._number, self._log, self._run_id = number, log, run_id
        self._limits, self._packages = limits, packages
        self._process: Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._reply: asyncio.Future[Any] | None = None
        self._num_jobs = self._num_starts = 0

    async def ready(self) -> int:
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return 0
        self.close()
        command = server_command(has_packages=bool(self._packages))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as log:
            environment = server_environment(self._run_id)
            self._process = Popen(
                command, env=environment, stdin=theirs.fileno(), stdout=log, stderr=log, start_new_session=True
            )
        asyncio.get_running_loop().add_reader(self._control, self._read)
        self._send(server_settings(self._limits, self._packages, number=self._number), ())
        await self._answer(_START_TIMEOUT_S)
        self._num_starts += 1
        return int(self._num_starts > 1)

    def send(self, job: Job) -> None:
        self._num_jobs += 1
        message = {"id": self._num_jobs, "kinds": job.kinds, "num_fds": [len(fds) for fds in job.fds]}
        self._send({**message, "deadline_s": job.deadline_s}, [fd for fds in job.fds for fd in fds])

    async def ended(self, job: Job) -> list[dict[str, Any]]:
        ended: list[dict[str, Any]] = (await self._answer(job.deadline_s + _ANSWER_GRACE_S))["ended"]
        return ended

    def kill_job(self) -> None:
        if self._control is not None:
            with suppress(OSError):
                self._control.send(json.dumps({"kill": self._num_jobs}).encode())

    def close(self) -> None:
        if self._control is not None:
            with suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            kill_tree(self._process.pid)
            self._process.wait()
            self._process = None
        self._lose("closed")

    def _send(self, message: Any, fds: Sequence[int]) -> None:
        assert self._control is not None, "send to a runner only when it is ready"
        self._reply = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))
        except OSError as error:
            raise Lost(str(error)) from None

    async def _answer(self, timeout_s: float) -> Any:
        assert self._reply is not None
        try:
            return await asyncio.wait_for(self._reply, timeout_s)
        except TimeoutError:
            raise Lost(f"no answer of the server of programs within {timeout_s:g} s") from None

    def _read(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
            self._lose(f"the server of programs ended; its output is in {self._log}")
        elif self._reply is not None and not self._reply.done():
            self._reply.set_result(json.loads(data))

    def _lose(self, why: str) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(Lost(why))
            self._reply.exception()  # looked at, should nobody wait for it


class ProcessRunner(Runner):
    """Starts each program through `confine`, at `landlock` and `none`. Python's start is part of its time."""

    def __init__(self, level: Level, number: int, log: Path, *, run_id: str, limits: Limits) -> None:
        self._level, self._number, self._log, self._run_id, self._limits = level, number, log, run_id, limits
        self._running: list[_Started] = []

    async def ready(self) -> int:
        return 0

    def send(self, job: Job) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            for index, (kind, fds) in enumerate(zip(job.kinds, job.fds, strict=True)):
                self._running.append(self._start(kind, fds, index))
        except OSError as error:
            self.close()
            raise Lost(str(error)) from None

    async def ended(self, job: Job) -> list[dict[str, Any]]:
        running = self._running
        try:
            async with asyncio.timeout(job.deadline_s):
                await running[0].wait()
        except TimeoutError:
            for one in running:
                one.kill("deadline")
        for one in running:
            one.kill("leader ended")
            await one.wait()
        self._running = []
        return [one.report() for one in running]

    def kill_job(self) -> None:
        for one in self._running:
            one.kill("parent")

    def close(self) -> None:
        self.kill_job()
        self._running = []

    def _start(self, kind: str, fds: Sequence[int], index: int) -> "_Started":
        report, written = os.pipe()
        try:
            launch = launch_of(
                "ycore.sandbox.program_run",
                [kind, str(written), *map(str, fds[3:])],
                level=self._level,
                view=View(),
                limits=self._limits,
                run_id=self._run_id,
                name=f"program-{self._number}-{index}",
            )
            launch.environment["PYTHONHASHSEED"] = "0"
            process = launch.start(stdin=fds[0], stdout=fds[1], stderr=fds[2], pass_fds=(written, *fds[3:]))
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(written)
        return _Started(process, launch, report)


class _Started:
    """One program's process, and the process that confines it."""

    def __init__(self, process: "Popen[bytes]", launch: Launch, report: int) -> None:
        self._process, self._launch, self._report = process, launch, report
        self._reason: str | None = None
        self._began = False
        self._ended_fd = os.pidfd_open(process.pid)

    async def wait(self) -> None:
        """Until the process and all that it started are gone."""
        if self._ended_fd < 0:
            return
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ended_fd, ended.set)
        try:
            while not ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _END_GRACE_S)
                if self._reason is not None and not ended.is_set():
                    kill_tree(self._process.pid)
        finally:
            loop.remove_reader(self._ended_fd)
        os.close(self._ended_fd)
        self._ended_fd = -1
        kill_tree(self._process.pid)
        self._process.wait()
        with os.fdopen(self._report, "rb") as file:
            os.set_blocking(self._report, False)
            self._began = bool(file.read())
        self._launch.clear()

    def kill(self, reason: str) -> None:
        if self._ended_fd >= 0 and self._reason is None:
            self._reason = reason
            self._launch.end(self._process.pid)

    def report(self) -> dict[str, Any]:
        status = self._process.returncode
        reason = "memory" if status == EXIT_EXCESS else self._reason
        problem = None if self._began or reason else f"the process could not be confined: exit status {status}"
        return {"status": status, "reason": reason, "problem": problem}


def server_command(*, has_packages: bool = False) -> list[str]:
    """The command that starts a server of programs in bubblewrap's namespaces."""
    bwrap = find_bwrap()
    if bwrap is None:
        raise RunError("no bwrap is installed; install the package bubblewrap")
    code = (
        f"import sys; sys.path.insert(0, {str(_package().parent)!r}); "
        "from ycore.sandbox.program_server import main; main()"
    )
    return bwrap_command(
        [sys.executable, "-P", "-s", "-S", "-B", "-c", code],
        View(),
        bwrap=bwrap,
        as_root=os.geteuid() == 0,
        python=python_folders(_site() if has_packages else []),
        hosts_programs=True,
    )


def server_environment(run_id: str) -> dict[str, str]:
    """That of the server and of every program: the same hashes in each, so that a program's verdict can be repeated."""
    fixed = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return {**own_variables(run_id, SCRATCH), **fixed}


def server_settings(limits: Limits, packages: Sequence[str], *, number: int) -> Settings:
    """The first message to the server of runner `number`, whose programs' users are no other runner's."""
    standard = [entry for entry in sys.path if entry.startswith(sys.base_prefix) and "-packages" not in entry]
    site = _site() if packages else []
    uid = FIRST_UID + (os.getpid() * 16 + number * 2) % NUM_UIDS
    under_scratch = [path for path in python_folders(site) if path.is_relative_to(SCRATCH) and path != _package()]
    return Settings(
        uid=uid if os.geteuid() == 0 else None,
        memory=limits.memory,
        scratch=limits.scratch,
        files=limits.files,
        processes=limits.processes,
        filter=filter_bytes(Level.NAMESPACES).hex(),
        path=[*standard, *site],
        modules=list(packages),
        kept=[str(path) for path in under_scratch],
    )


def _site() -> list[str]:
    """Where this environment's packages are, those of a user or of another environment too."""
    return [entry for entry in sys.path if "-packages" in entry]


def _package() -> Path:
    return Path(ycore.__file__).absolute().parent
