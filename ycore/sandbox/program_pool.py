"""Run programs that a model wrote, each in a fresh confined process: their outputs, and the results of their tests.

Each of a pool's servers (`program_server`) is trusted, and starts one program after the other by a fork: at the level
`namespaces` from within bubblewrap's, at the others as a plain process. It gets jobs over a socket, with the
descriptors of each program. How a program ended is decided here, outside, by clocks, counters and what the kernel
says. What fails before a program begins, or takes its server along, is started again and the program run once more; if
that fails too, the result is `infra_error`, and nobody's fault.

A program's source and input are sealed memory files, and its output is read here up to a limit. Of a program that is
tested nothing is read but what its tests write.
"""

import asyncio
import fcntl
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any, Literal

import ycore
from ycore.errors import RunError
from ycore.run.reports import kill_tree
from ycore.sandbox import MIB, Level, Limits, View
from ycore.sandbox.confine import FIRST_UID, NUM_UIDS, PipeReader, base_variables, unconfined
from ycore.sandbox.landlock import rules_of
from ycore.sandbox.namespaces import SCRATCH, bwrap_command, find_bwrap, python_folders
from ycore.sandbox.program_run import ProgramKind
from ycore.sandbox.program_server import MAX_MESSAGE, ServerSettings
from ycore.sandbox.syscall_filter import filter_bytes

ProgramStatus = Literal["ok", "error", "timeout", "memory", "output", "killed", "infra_error"]
"""`error`: an exit status that is not 0. `killed`: by a signal that was not ours."""

PROGRAM_LIMITS = Limits(memory=512 * MIB, scratch=64 * MIB, files=2000, processes=64, output=MIB)
_MAX_RESULTS = MIB  # bytes that tests may write
_MAX_UNITS = 100_000
_START_TIMEOUT_S = 60.0
_REPLY_GRACE_S = 10.0
_STOP_TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """How a script ended. `output` and `errors` are what it printed, `seconds` those of its process."""

    status: ProgramStatus
    output: bytes = b""
    errors: bytes = b""
    seconds: float = 0.0
    problem: str | None = None  # of an `infra_error`


@dataclass(frozen=True, slots=True)
class UnitTestResult:
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


@dataclass(frozen=True, slots=True)
class _Job:
    """Programs to run together; the descriptors of each become its own from 0 on. The first one leads."""

    programs: Sequence[tuple[ProgramKind, Sequence[int]]]
    outputs: Sequence["_Output"]


@dataclass(frozen=True, slots=True)
class _JobResult:
    ended: Sequence[Mapping[str, Any]]
    outputs: Sequence["_Output"]
    seconds: float


_MakeJob = Callable[[ExitStack, Callable[[], None]], _Job]
"""Makes a job whose descriptors are closed with the stack; calls the function when there is too much output."""


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
        self.restarts = 0
        self._limits = limits
        self._servers: list[ProgramServer] = []
        self._idle: asyncio.Queue[ProgramServer] = asyncio.Queue()
        for number in range(at_once):
            server = ProgramServer(
                level, number, log, run_id=run_id, limits=limits, packages=packages
            )
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

        def make(files: ExitStack, on_excess: Callable[[], None]) -> _Job:
            limit = _OutputLimit(self._limits.output, on_excess)
            stdout, stdout_end = _output(files, limit)
            stderr, stderr_end = _output(files, limit)
            fds = [_sealed(files, stdin), stdout_end, stderr_end, _sealed(files, _encoded(source))]
            return _Job([("script", fds)], [stdout, stderr])

        result = await self._do(make, deadline_s)
        if isinstance(result, str):
            return ScriptResult("infra_error", problem=result)
        stdout, stderr = result.outputs
        status = _script_status(result.ended[0], is_too_long=stdout.limit.is_over)
        return ScriptResult(status, bytes(stdout.data), bytes(stderr.data), result.seconds)

    async def run_tests(
        self, source: str, tests: Mapping[str, Any], *, deadline_s: float
    ) -> UnitTestResult:
        """Run a row's tests against a program. `tests` is what `unit_tests` reads; it never reaches the program."""

        def make(files: ExitStack, on_excess: Callable[[], None]) -> _Job:
            results, results_end = _output(files, _OutputLimit(_MAX_RESULTS, on_excess))
            nothing = os.open(os.devnull, os.O_RDWR)
            files.callback(os.close, nothing)
            ends = [files.enter_context(end).fileno() for end in socket.socketpair()]
            standard = [nothing] * 3
            test_fds = [*standard, _sealed(files, json.dumps(tests).encode()), ends[0], results_end]
            callee_fds = [*standard, _sealed(files, _encoded(source)), ends[1]]
            return _Job([("tests", test_fds), ("callee", callee_fds)], [results])

        result = await self._do(make, deadline_s)
        if isinstance(result, str):
            return UnitTestResult("infra_error", problem=result)
        return read_results(bytes(result.outputs[0].data), *result.ended, seconds=result.seconds)

    async def close(self) -> None:
        """Kill every server with all in it; the pool cannot be used again."""
        for server in self._servers:
            server.close()

    async def _do(self, make: _MakeJob, deadline_s: float) -> _JobResult | str:
        """Do a job in the next idle server, twice where the server fails; return why where it cannot be done."""
        server = await self._idle.get()
        problem = ""
        try:
            for _ in range(2):
                try:
                    self.restarts += await server.ready()
                    result = await server.do(make, deadline_s)
                except (ServerLost, OSError) as error:
                    problem = str(error)
                else:
                    problems = [ended["problem"] for ended in result.ended if ended["problem"]]
                    if not problems:
                        return result
                    problem = problems[0]
                server.close()
            return problem
        except BaseException:
            server.close()  # given up in the middle of a job: what runs there ends too
            raise
        finally:
            self._idle.put_nowait(server)


class ServerLost(Exception):
    """A server's process ended, or did not answer, in the middle of a job."""


class ProgramServer:
    """A server of programs, as its parent has it. It has no process until `ready`, and none after `close`."""

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
        self._level = level
        self._number = number
        self._log = log
        self._run_id = run_id
        self._limits = limits
        self._packages = packages
        self._process: Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._num_jobs = 0
        self._num_starts = 0

    async def ready(self) -> bool:
        """Make it so that a job can begin; return whether a server was started in place of one that had failed."""
        if self._process is not None and self._process.poll() is None:
            return False
        self.close()
        self._control, child_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with child_control, self._log.open("ab") as log:
            self._process = Popen(
                server_command(level=self._level, has_packages=bool(self._packages)),
                env=_server_environment(self._run_id),
                stdin=child_control.fileno(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        prefix = f"ycore-{self._run_id}-scratch-"  # the guardian knows scratch folders by this name
        settings = _server_settings(self._level, self._limits, self._packages, self._number, prefix)
        self._send(settings, ())
        await self._receive(_START_TIMEOUT_S)
        self._num_starts += 1
        return self._num_starts > 1

    async def do(self, make: _MakeJob, deadline_s: float) -> _JobResult:
        """Make a job and do it; ServerLost where its end cannot be known."""
        outputs: Sequence[_Output] = ()
        began = time.perf_counter()
        try:
            with ExitStack() as files:
                job = make(files, self._kill_job)
                outputs = job.outputs
                self._num_jobs += 1
                message = {
                    "id": self._num_jobs,
                    "kinds": [kind for kind, _ in job.programs],
                    "num_fds": [len(fds) for _, fds in job.programs],
                    "deadline_s": deadline_s,
                }
                self._send(message, [descriptor for _, fds in job.programs for descriptor in fds])
            reply = await self._receive(deadline_s + _REPLY_GRACE_S)
            for output in outputs:
                output.drain()
            return _JobResult(reply["ended"], outputs, time.perf_counter() - began)
        finally:
            for output in outputs:
                output.close()

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

    def _kill_job(self) -> None:
        if self._control is not None:
            with suppress(OSError):
                self._control.send(json.dumps({"kill": self._num_jobs}).encode())

    def _send(self, message: Any, fds: Sequence[int]) -> None:
        assert self._control is not None, "send to a server only when it is ready"
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], list(fds))
        except OSError as error:
            raise ServerLost(str(error)) from None

    async def _receive(self, timeout_s: float) -> Any:
        assert self._control is not None
        try:
            async with asyncio.timeout(timeout_s):
                data = await asyncio.get_running_loop().sock_recv(self._control, MAX_MESSAGE)
        except TimeoutError:
            raise ServerLost(
                f"no answer of the server of programs within {timeout_s:g} s"
            ) from None
        except OSError:
            data = b""
        if not data:
            raise ServerLost(f"the server of programs ended; its output is in {self._log}")
        return json.loads(data)


def read_results(
    data: bytes, tests: Mapping[str, Any], callee: Mapping[str, Any], *, seconds: float
) -> UnitTestResult:
    """Read the lines of the tests' process. Tests that were cut short have not ended, and so have not passed.

    `tests` and `callee` say how the two processes ended.
    """
    if not data:
        return UnitTestResult(
            "infra_error", problem="the tests of a program did not begin", seconds=seconds
        )
    summary: dict[str, Any] = {"state": "gone", "broken": None, "ended": False, "timed_out": False}
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


def _script_status(ended: Mapping[str, Any], *, is_too_long: bool) -> ProgramStatus:
    if is_too_long:
        return "output"
    if ended["reason"] == "deadline":
        return "timeout"
    if ended["reason"] == "memory":
        return "memory"
    status = int(ended["status"])
    if status == 0:
        return "ok"
    return "error" if status > 0 else "killed"


class _OutputLimit:
    """Bytes that may still come from one or more pipes of a program."""

    def __init__(self, num_bytes: int, on_excess: Callable[[], None]) -> None:
        self.is_over = False
        self._num_left = num_bytes
        self._on_excess = on_excess

    def take(self, data: bytes) -> bytes:
        """Return as much of the data as may still come; call `on_excess` once."""
        kept = data[: self._num_left]
        self._num_left -= len(kept)
        if len(kept) < len(data) and not self.is_over:
            self.is_over = True
            self._on_excess()
        return kept


class _Output(PipeReader):
    def __init__(self, descriptor: int, limit: _OutputLimit) -> None:
        self.data = bytearray()
        self.limit = limit
        super().__init__(descriptor, lambda data: self.data.extend(limit.take(data)))


def _output(files: ExitStack, limit: _OutputLimit) -> tuple[_Output, int]:
    """Make a pipe whose end to write is closed with `files`; return its reader and that end."""
    read_end, write_end = os.pipe()
    files.callback(os.close, write_end)
    return _Output(read_end, limit), write_end


def _sealed(files: ExitStack, data: bytes) -> int:
    """Return a descriptor to read the data from, which nobody can change or make longer."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _encoded(source: str) -> bytes:
    return source.encode("utf-8", errors="replace")


def server_command(*, level: Level, has_packages: bool) -> list[str]:
    """Return the command that starts a server: in bubblewrap's namespaces, or plainly at another level."""
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
        python=python_folders(_site_packages() if has_packages else []),
        hosts_programs=True,
    )


def _server_environment(run_id: str) -> dict[str, str]:
    """Return the environment of the server and of every program: with the same hashes, so that results repeat."""
    fixed = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return {**base_variables(run_id, SCRATCH), **fixed}


def _server_settings(
    level: Level, limits: Limits, packages: Sequence[str], number: int, prefix: str
) -> ServerSettings:
    """Return the first message to server `number`, whose programs' users are no other server's."""
    standard = [
        entry
        for entry in sys.path
        if entry.startswith(sys.base_prefix) and "-packages" not in entry
    ]
    site = _site_packages() if packages else []
    python = python_folders(site)
    settings = ServerSettings(
        level=level,
        uid=FIRST_UID + (os.getpid() * 16 + number * 2) % NUM_UIDS if os.geteuid() == 0 else None,
        keep=None,
        limits=asdict(limits),
        filter="",
        files=[],
        prefix=os.path.join(tempfile.gettempdir(), prefix),
        path=[*standard, *site],
        modules=list(packages),
        kept=[str(p) for p in python if p.is_relative_to(SCRATCH) and p != _package()],
    )
    if level is Level.NAMESPACES:
        settings["filter"] = filter_bytes(level).hex()
    elif level is Level.LANDLOCK:
        rules = rules_of(View(), limits, scratch=SCRATCH, python=python, uid=settings["uid"])
        settings["filter"] = rules.program
        settings["files"] = rules.files
    else:
        steps, _ = unconfined(View(), limits, settings["uid"])
        settings["uid"] = steps["uid"]
        settings["keep"] = steps["keep"]
        settings["limits"] = steps["limits"]
    return settings


def _site_packages() -> list[str]:
    """Return where this environment's packages are, those of a user or of another environment too."""
    return [entry for entry in sys.path if "-packages" in entry]


def _package() -> Path:
    return Path(ycore.__file__).absolute().parent
