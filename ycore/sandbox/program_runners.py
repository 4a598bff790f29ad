"""Runs programs, one job after the other, through a server of its own (`program_server`). Nothing here runs inside.

The server is trusted, and starts each program by a fork: at the level `namespaces` from within bubblewrap's, at the
others as a plain process. It gets jobs over a socket, with the descriptors of each program.
"""

import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import ycore
from ycore.errors import RunError
from ycore.run.reports import kill_tree
from ycore.sandbox import Level, Limits, View
from ycore.sandbox.confine import FIRST_UID, NUM_UIDS, base_variables, unconfined
from ycore.sandbox.landlock import rules_of
from ycore.sandbox.namespaces import SCRATCH, bwrap_command, find_bwrap, python_folders
from ycore.sandbox.program_run import Kind
from ycore.sandbox.program_server import MAX_MESSAGE, Settings
from ycore.sandbox.syscall_filter import filter_bytes

_START_TIMEOUT_S = 60.0
_ANSWER_GRACE_S, _END_WITHIN_S = 10.0, 8.0


class Lost(Exception):
    """A runner's process ended, or did not answer, in the middle of a job."""


@dataclass(frozen=True, slots=True)
class Job:
    """ProgramPool to run together; the descriptors of each become its own from 0 on. The first one leads."""

    kinds: Sequence[Kind]
    fds: Sequence[Sequence[int]]
    deadline_s: float


class Runner:
    """A server of programs, seen from its parent. It has no process until `ready`, and none after `close`."""

    def __init__(
        self,
        level: Level,
        number: int,
        log: Path,
        *,
        run_id: str,
        limits: Limits,
        packages: Sequence[str],
    ) -> None:
        self._level, self._number, self._log, self._run_id = level, number, log, run_id
        self._limits, self._packages = limits, packages
        self._process: Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._reply: asyncio.Future[Any] | None = None
        self._num_jobs = self._num_starts = 0

    async def ready(self) -> int:
        """Make it so that a job can begin; 1 where a server was started in place of one that had failed, else 0."""
        if self._process is not None and self._process.poll() is None and self._control is not None:
            return 0
        self.close()
        command = server_command(level=self._level, has_packages=bool(self._packages))
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("ab") as log:
            environment = server_environment(self._run_id)
            self._process = Popen(
                command,
                env=environment,
                stdin=theirs.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        asyncio.get_running_loop().add_reader(self._control, self._read)
        prefix = f"ycore-{self._run_id}-scratch-"  # the guardian knows scratch folders by this name
        self._send(
            server_settings(self._level, self._limits, self._packages, self._number, prefix), ()
        )
        await self._answer(_START_TIMEOUT_S)
        self._num_starts += 1
        return int(self._num_starts > 1)

    def send(self, job: Job) -> None:
        """Begin a job. The programs have descriptors of their own afterwards."""
        self._num_jobs += 1
        message = {
            "id": self._num_jobs,
            "kinds": job.kinds,
            "num_fds": [len(fds) for fds in job.fds],
        }
        self._send({**message, "deadline_s": job.deadline_s}, [fd for fds in job.fds for fd in fds])

    async def ended(self, job: Job) -> list[dict[str, Any]]:
        """How each program of the job ended: `status`, `reason`, `problem`. Lost where that cannot be known."""
        ended: list[dict[str, Any]] = (await self._answer(job.deadline_s + _ANSWER_GRACE_S))[
            "ended"
        ]
        return ended

    def kill_job(self) -> None:
        """End what runs now."""
        if self._control is not None:
            with suppress(OSError):
                self._control.send(json.dumps({"kill": self._num_jobs}).encode())

    def close(self) -> None:
        """End everything; `ready` makes it anew."""
        if self._control is not None:
            with suppress(RuntimeError):
                asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        if self._process is not None:
            if (
                self._level is not Level.NAMESPACES
            ):  # which end with their first process; a plain server ends all below
                self._process.terminate()
                with suppress(TimeoutExpired):
                    self._process.wait(_END_WITHIN_S)
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


def server_command(*, level: Level, has_packages: bool) -> list[str]:
    """The command that starts a server of programs: in bubblewrap's namespaces, or plainly at another level."""
    code = (
        f"import sys; sys.path.insert(0, {str(_package().parent)!r}); "
        "from ycore.sandbox.program_server import main; main()"
    )
    server = [sys.executable, "-P", "-s", "-S", "-B", "-c", code]
    if level is not Level.NAMESPACES:
        return server
    bwrap = find_bwrap()
    if bwrap is None:
        raise RunError("no bwrap is installed; install the package bubblewrap")
    return bwrap_command(
        server,
        View(),
        bwrap=bwrap,
        as_root=os.geteuid() == 0,
        python=python_folders(_site() if has_packages else []),
        hosts_programs=True,
    )


def server_environment(run_id: str) -> dict[str, str]:
    """That of the server and of every program: the same hashes in each, so that a program's verdict can be repeated."""
    fixed = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return {**base_variables(run_id, SCRATCH), **fixed}


def server_settings(
    level: Level, limits: Limits, packages: Sequence[str], number: int, prefix: str
) -> Settings:
    """The first message to the server of runner `number`, whose programs' users are no other runner's."""
    standard = [
        entry
        for entry in sys.path
        if entry.startswith(sys.base_prefix) and "-packages" not in entry
    ]
    site = _site() if packages else []
    uid = FIRST_UID + (os.getpid() * 16 + number * 2) % NUM_UIDS if os.geteuid() == 0 else None
    keep, refused, readable = None, b"", list[str]()
    if level is Level.NAMESPACES:
        refused = filter_bytes(level)
    elif level is Level.LANDLOCK:
        rules = rules_of(View(), limits, scratch=SCRATCH, python=python_folders(site), uid=uid)
        refused, readable = bytes.fromhex(rules.program), rules.files
    else:
        steps, _ = unconfined(View(), limits, uid)
        uid, keep, limits = steps["uid"], steps["keep"], Limits(**steps["limits"])
    under_scratch = [
        path for path in python_folders(site) if path.is_relative_to(SCRATCH) and path != _package()
    ]
    return Settings(
        level=level,
        uid=uid,
        keep=keep,
        limits=asdict(limits),
        filter=refused.hex(),
        files=readable,
        prefix=os.path.join(tempfile.gettempdir(), prefix),
        path=[*standard, *site],
        modules=list(packages),
        kept=[str(path) for path in under_scratch],
    )


def _site() -> list[str]:
    """Where this environment's packages are, those of a user or of another environment too."""
    return [entry for entry in sys.path if "-packages" in entry]


def _package() -> Path:
    return Path(ycore.__file__).absolute().parent
