"""One place where programs run, one job after the other: a server in namespaces, or a process of its own for each."""

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
from ycore.sandbox.namespaces import SCRATCH, bwrap_command, find_bwrap, python_folders
from ycore.sandbox.program_run import Kind
from ycore.sandbox.program_server import MAX_MESSAGE, Settings
from ycore.sandbox.syscall_filter import filter_bytes

_START_TIMEOUT_S, _GRACE_S = 60.0, 10.0
_FIRST_UID, _NUM_UIDS = 61184, 4336  # the range that systemd sets apart for users that exist only while they run


class Lost(Exception):
    """A place ended, or did not answer, in the middle of a job."""


@dataclass(frozen=True, slots=True)
class Job:
    """Programs to run together; the descriptors of each become its own from 0 on. The first one leads."""

    kinds: Sequence[Kind]
    fds: Sequence[Sequence[int]]
    deadline_s: float


class Place(Protocol):
    """Where programs run, one job after the other."""

    async def ready(self) -> int:
        """Make it so that a job can begin; 1 where something was started in place of what had failed, else 0."""

    def send(self, job: Job) -> None:
        """Begin a job. The programs have descriptors of their own afterwards."""

    async def ended(self, job: Job) -> list[dict[str, Any]]:
        """How each program of the job ended: `status`, `reason`, `peak`, `problem`. Lost where that cannot be known."""

    def kill_job(self) -> None:
        """End what runs now."""

    def close(self) -> None:
        """End everything; `ready` makes it anew."""


class ServerPlace(Place):
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
        ended: list[dict[str, Any]] = (await self._answer(job.deadline_s + _GRACE_S))["ended"]
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
        assert self._control is not None, "send to a place only when it is ready"
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
    path = os.pathsep.join([os.path.dirname(sys.executable), "/usr/local/bin", "/usr/bin", "/bin"])
    here = {"HOME": str(SCRATCH), "TMPDIR": str(SCRATCH), "PATH": path, "LANG": "C.UTF-8"}
    return {**here, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "YCORE_RUN": run_id}


def server_settings(limits: Limits, packages: Sequence[str], *, number: int) -> Settings:
    """What the server of place `number` is told. Its programs' users are no other place's, as far as numbers reach."""
    standard = [entry for entry in sys.path if entry.startswith(sys.base_prefix) and "-packages" not in entry]
    site = _site() if packages else []
    uid = _FIRST_UID + (os.getpid() * 16 + number * 2) % _NUM_UIDS
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
