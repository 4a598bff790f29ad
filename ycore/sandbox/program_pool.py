"""Run programs that a model wrote, each in a fresh confined process: their outputs, and the results of their tests.

Each of a pool's servers (`program_server`) is trusted, and starts one program after the other by a fork: at the level
`namespaces` from within bubblewrap's, at the others as a plain process. It gets jobs over a socket, with the
descriptors of each program. How a program ended is decided here, outside, by clocks, counters and what the kernel
says. What fails before a program begins, or takes its server along, is started again and the program run once more; if
that fails too, the result is `infra_error`, and nobody's fault.

A program's source and input are sealed files in memory, and its output goes to files in memory of a fixed size. Of a
program that is tested nothing is read but what its tests write.
"""

import asyncio
import fcntl
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Literal, NamedTuple

from ycore.errors import RunError
from ycore.run.reports import kill_tree
from ycore.sandbox import END_S, MIB, SCRATCH, Level, Limits, View
from ycore.sandbox.confine import (
    FIRST_UID,
    NUM_UIDS,
    base_variables,
    python_paths,
    site_packages,
    stage_steps,
)
from ycore.sandbox.namespaces import bwrap_command
from ycore.sandbox.program_server import MAX_MESSAGE, ProgramKind, ServerSettings
from ycore.sandbox.user_code import sources_view
from ycore.types import JsonObject, Record

ProgramStatus = Literal["ok", "error", "timeout", "memory", "output", "killed", "infra_error"]
"""`error`: an exit status that is not 0. `killed`: by a signal that was not ours."""

PROGRAM_LIMITS = Limits(
    memory=512 * MIB, scratch=64 * MIB, files=2000, processes=64, output=MIB
)
_MAX_RESULTS = MIB  # bytes that tests may write
_MAX_UNITS = 100_000
_START_TIMEOUT_S = 70.0  # of a server, and for its reply
_STOP_TIMEOUT_S = END_S + 5.0  # killed earlier, a server would leave what it is about to end
_FIXED_VARIABLES = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
"""Every program has these: with the same hashes, results repeat."""

_FIXED_SIZE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class ScriptResult(NamedTuple):
    """How a script ended. `output` and `errors` are what it printed, `seconds` those of its process."""

    status: ProgramStatus
    output: bytes = b""
    errors: bytes = b""
    seconds: float = 0.0
    problem: str | None = None  # of an `infra_error`


class UnitTestResult(NamedTuple):
    """Results of a program's tests. `units` are the asserts, in order: passed, failed, or None where one did not run.

    `began` is `ready`, `compile_error`, `run_error` or `gone`, as far as the program itself may be believed.
    `ended` says whether the tests came to their end. `broken` says why the tests themselves cannot run.
    """

    status: ProgramStatus
    began: str = "gone"
    units: tuple[bool | None, ...] = ()
    ended: bool = False
    broken: str | None = None
    seconds: float = 0.0
    problem: str | None = None  # of an `infra_error`

    @property
    def share_passed(self) -> float:
        """The share of passed tests. One that did not run counts, unless the tests came to their end without it."""
        counted = [unit for unit in self.units if unit is not None or not self.ended]
        return counted.count(True) / max(1, len(counted))

    @property
    def passes_all(self) -> bool:
        """Whether the tests came to their end, at least one ran, and none failed."""
        return self.ended and True in self.units and False not in self.units


_Programs = Sequence[tuple[ProgramKind, Sequence[int]]]
"""Programs to run together, with the descriptors that become each one's own from 0 on. The first one leads."""


class ProgramPool:
    """Runs programs, `at_once` of them side by side. Belongs to one event loop.

    Example: `pool = ProgramPool(Level.NAMESPACES, at_once=2, log=log, run_id=run_id)`, then
    `await pool.run("print(1)", deadline_s=2)`, and `await pool.close()` at the end.
    """

    def __init__(
        self,
        level: Level,
        *,
        at_once: int,
        log: Path,
        run_id: str,
        limits: Limits = PROGRAM_LIMITS,
        packages: Sequence[str] = (),
    ) -> None:
        """Start nothing yet. With any `packages`, imported once for all, programs see all of this environment."""
        self._limits = limits
        self._servers: list[ProgramServer] = []
        self._idle: asyncio.Queue[ProgramServer] = asyncio.Queue()
        environment = {**base_variables(run_id, SCRATCH), **_FIXED_VARIABLES}
        for number in range(at_once):
            command = server_command(level, limits, packages, number=number, run_id=run_id)
            server = ProgramServer(level, command, environment, log)
            self._servers.append(server)
            self._idle.put_nowait(server)

    async def start(self) -> None:
        """Run an honest program in every server; RunError where one does not run."""
        honest = [self.run("print(6 * 7)", deadline_s=20.0) for _ in self._servers]
        for result in await asyncio.gather(*honest):
            if result.status != "ok" or result.output != b"42\n":
                printed = (result.errors or result.output).decode(errors="replace").strip()
                raise RunError(
                    f"an honest program does not run in the sandbox: {result.status}, "
                    f"{result.problem or printed[-300:]}"
                )

    async def run(self, source: str, *, stdin: bytes = b"", deadline_s: float) -> ScriptResult:
        """Run a program as a script with this standard input."""
        with ExitStack() as files:
            stdout = _OutputFile(files, self._limits.output)
            stderr = _OutputFile(files, self._limits.output)
            program = _sealed(files, _encoded(source))
            fds = [_sealed(files, stdin), stdout.descriptor, stderr.descriptor, program]
            try:
                (ended,), seconds = await self._do([("script", fds)], deadline_s)
            except ServerLost as lost:
                return ScriptResult("infra_error", problem=str(lost))
            status = _script_status(ended)
            if stdout.is_over or stderr.is_over:
                status = "output"
            return ScriptResult(status, stdout.data, stderr.data, seconds)

    async def run_tests(
        self, source: str, tests: Record, *, deadline_s: float
    ) -> UnitTestResult:
        """Run a row's tests against a program. `tests` is what `unit_tests` reads; it never reaches the program."""
        with ExitStack() as files:
            results = _OutputFile(files, _MAX_RESULTS)
            nothing = os.open(os.devnull, os.O_RDWR)
            files.callback(os.close, nothing)
            tests_source = _sealed(files, json.dumps(tests).encode())
            program = _sealed(files, _encoded(source))
            programs: _Programs = [
                ("tests", [nothing, nothing, nothing, tests_source, results.descriptor]),
                ("callee", [nothing, nothing, nothing, program]),
            ]
            try:
                ended, seconds = await self._do(programs, deadline_s)
            except ServerLost as lost:
                return UnitTestResult("infra_error", problem=str(lost))
            return unit_test_result(results.data, *ended, seconds=seconds)

    async def close(self) -> None:
        """Kill every server with all in it; the pool cannot be used again."""
        for server in self._servers:
            server.close()

    async def _do(
        self, programs: _Programs, deadline_s: float
    ) -> tuple[Sequence[Record], float]:
        """Do a job in the next idle server, twice where the server fails; ServerLost where it cannot be done.

        Returns how each program ended, and the seconds.
        """
        server = await self._idle.get()
        problem = ""
        try:
            for _ in range(2):
                try:
                    server.ready()
                    began = time.perf_counter()
                    ended = await server.do(programs, deadline_s)
                except (ServerLost, OSError) as error:
                    problem = str(error)
                else:
                    problem = next(filter(None, (program["problem"] for program in ended)), "")
                    if not problem:
                        return ended, time.perf_counter() - began
                server.close()
            raise ServerLost(problem)
        except BaseException:
            server.close()  # given up in the middle of a job: what runs there ends too
            raise
        finally:
            self._idle.put_nowait(server)


class ServerLost(Exception):
    """A server's process ended, or did not answer, in the middle of a job; or it could make no process."""


class ProgramServer:
    """A server of programs, as its parent has it. It has no process until `ready`, and none after `close`."""

    def __init__(
        self, level: Level, command: list[str], environment: Mapping[str, str], log: Path
    ) -> None:
        self._level = level
        self._command = command
        self._environment = environment
        self._log = log
        self._process: Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ready(self) -> None:
        """Start the server of programs where none is running."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        self._control, child_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with child_control, self._log.open("ab") as log:
            self._process = Popen(
                self._command,
                env=self._environment,
                stdin=child_control.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def do(self, programs: _Programs, deadline_s: float) -> Sequence[Record]:
        """Return how a job's programs ended: `status`, `reason`, `problem` of each; ServerLost where unknown."""
        assert self._control is not None, "send to a server only when it is ready"
        job = {
            "programs": [[kind, len(fds)] for kind, fds in programs],
            "deadline_s": deadline_s,
        }
        all_fds = [descriptor for _, fds in programs for descriptor in fds]
        for descriptor in all_fds:  # an earlier server may have moved in them
            os.lseek(descriptor, 0, os.SEEK_SET)
        socket.send_fds(self._control, [json.dumps(job).encode()], all_fds)
        timeout_s = deadline_s + _START_TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                reply = await asyncio.get_running_loop().sock_recv(self._control, MAX_MESSAGE)
        except TimeoutError:
            raise ServerLost(
                f"no answer of the server of programs within {timeout_s:g} s"
            ) from None
        except OSError:
            reply = b""
        if not reply:
            raise ServerLost(f"the server of programs ended; its output is in {self._log}")
        return json.loads(reply)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End everything; `ready` makes it anew."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            if self._level is not Level.NAMESPACES:  # there, all end with their first process
                self._process.terminate()
                with suppress(TimeoutExpired):
                    self._process.wait(_STOP_TIMEOUT_S)
            kill_tree(self._process.pid)
            self._process.wait()
            self._process = None


def unit_test_result(
    data: bytes, tests: Record, callee: Record, *, seconds: float
) -> UnitTestResult:
    """Read the lines of the tests' process. Tests that were cut short have not ended, and so have not passed.

    `tests` and `callee` say how the two processes ended.
    """
    if not data:
        return UnitTestResult(
            "infra_error", problem="the tests of a program did not begin", seconds=seconds
        )
    summary: JsonObject = {
        "state": "gone",
        "broken": None,
        "ended": False,
        "timed_out": False,
    }
    units: list[bool | None] = []
    for line in data.split(b"\n")[:-1]:
        message = json.loads(line)
        if "units" in message:
            units = [None] * min(message["units"], _MAX_UNITS)
        elif "unit" in message:
            units[message["unit"]] = message["passed"]
        else:
            summary |= message
    status: ProgramStatus = "ok"
    if summary["timed_out"] or tests["reason"] == "deadline":
        status = "timeout"
    elif "memory" in (tests["reason"], callee["reason"]):
        status = "memory"
    return UnitTestResult(
        status, summary["state"], tuple(units), summary["ended"], summary["broken"], seconds
    )


def _script_status(ended: Record) -> ProgramStatus:
    if ended["reason"] == "deadline":
        return "timeout"
    if ended["reason"] == "memory":
        return "memory"
    status = int(ended["status"])
    if status == 0:
        return "ok"
    return "error" if status > 0 else "killed"


class _OutputFile:
    """A file in memory that a program writes to, bounded by the kernel. Read it once the program has ended."""

    def __init__(self, files: ExitStack, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.descriptor = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        files.callback(os.close, self.descriptor)
        # Twice as long, because the kernel refuses a whole write that crosses the end.
        os.ftruncate(self.descriptor, 2 * max_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)

    @property
    def _num_bytes(self) -> int:
        return os.lseek(self.descriptor, 0, os.SEEK_CUR)

    @property
    def is_over(self) -> bool:
        return self._num_bytes > self._max_bytes

    @property
    def data(self) -> bytes:
        return os.pread(self.descriptor, min(self._num_bytes, self._max_bytes), 0)


def _sealed(files: ExitStack, data: bytes) -> int:
    """Return a descriptor to read the data from, which nobody can change or make longer."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_WRITE)
    return descriptor


def _encoded(source: str) -> bytes:
    return source.encode("utf-8", errors="replace")


def server_command(
    level: Level, limits: Limits, packages: Sequence[str], *, number: int, run_id: str
) -> list[str]:
    """Return the command that starts server `number`: in bubblewrap's namespaces, or plainly at another level."""
    uid = None
    if os.geteuid() == 0:
        uid = FIRST_UID + (os.getpid() * 16 + number * 2) % NUM_UIDS
    standard = [
        entry
        for entry in sys.path
        if entry.startswith(sys.base_prefix) and "-packages" not in entry
    ]
    site = site_packages() if packages else []
    view = sources_view() if packages else View()
    view = view._replace(read=(*python_paths(packages=bool(packages)), *view.read))
    package = Path(__file__).absolute().parents[1]
    shown = [path for path in view.read if path.is_relative_to(SCRATCH) and path != package]
    prefix = f"ycore-{run_id}-scratch-"  # the guardian knows scratch folders by this name
    settings = ServerSettings(
        steps=stage_steps(level, view, limits, uid),
        prefix=os.path.join(tempfile.gettempdir(), prefix),
        path=standard,
        site=site,
        modules=list(packages),
        kept=[str(path) for path in shown if not any(other in path.parents for other in shown)],
    )
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); "
        "from ycore.sandbox.program_server import serve_programs; serve_programs()"
    )
    server = [sys.executable, "-P", "-s", "-S", "-B", "-c", code, json.dumps(settings)]
    if level is not Level.NAMESPACES:
        return server
    return bwrap_command(server, view, hosts_programs=True)
