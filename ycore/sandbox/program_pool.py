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
from ycore.sandbox.confine import FIRST_UID, NUM_UIDS, base_variables, unconfined_steps
from ycore.sandbox.landlock import rules_of
from ycore.sandbox.namespaces import SCRATCH, bwrap_command, find_bwrap, python_folders
from ycore.sandbox.program_run import ProgramKind
from ycore.sandbox.program_server import MAX_MESSAGE, ServerSettings
from ycore.sandbox.syscall_filter import filter_bytes

ProgramStatus = Literal["ok", "error", "timeout", "memory", "output", "killed", "infra_error"]
"""`error`: an exit status that is not 0. `killed`: by a signal that was not ours."""

PROGRAM_LIMITS = Limits(
    memory=512 * MIB, scratch=64 * MIB, files=2000, processes=64, output=MIB
)
_MAX_RESULTS = MIB  # bytes that tests may write
_MAX_UNITS = 100_000
_START_TIMEOUT_S = 60.0
_REPLY_GRACE_S = 10.0
_STOP_TIMEOUT_S = 8.0
_FIXED_SIZE = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


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


_Programs = Sequence[tuple[ProgramKind, Sequence[int]]]
"""Programs to run together, with the descriptors that become each one's own from 0 on. The first one leads."""


@dataclass(frozen=True, slots=True)
class _JobResult:
    ended: Sequence[Mapping[str, Any]]
    seconds: float


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
        with ExitStack() as outputs:
            stdout = _OutputFile(outputs, self._limits.output)
            stderr = _OutputFile(outputs, self._limits.output)

            def make(files: ExitStack) -> _Programs:
                fds = [_sealed(files, stdin), stdout.rewound(), stderr.rewound()]
                return [("script", [*fds, _sealed(files, _encoded(source))])]

            result = await self._do(make, deadline_s)
            if isinstance(result, str):
                return ScriptResult("infra_error", problem=result)
            status = _script_status(result.ended[0])
            if stdout.is_over or stderr.is_over:
                status = "output"
            return ScriptResult(status, stdout.data, stderr.data, result.seconds)

    async def run_tests(
        self, source: str, tests: Mapping[str, Any], *, deadline_s: float
    ) -> UnitTestResult:
        """Run a row's tests against a program. `tests` is what `unit_tests` reads; it never reaches the program."""
        with ExitStack() as outputs:
            results = _OutputFile(outputs, _MAX_RESULTS)

            def make(files: ExitStack) -> _Programs:
                nothing = os.open(os.devnull, os.O_RDWR)
                files.callback(os.close, nothing)
                ends = [files.enter_context(end).fileno() for end in socket.socketpair()]
                tests_source = _sealed(files, json.dumps(tests).encode())
                program = _sealed(files, _encoded(source))
                return [
                    ("tests", [*[nothing] * 3, tests_source, ends[0], results.rewound()]),
                    ("callee", [*[nothing] * 3, program, ends[1]]),
                ]

            result = await self._do(make, deadline_s)
            if isinstance(result, str):
                return UnitTestResult("infra_error", problem=result)
            return read_results(results.data, *result.ended, seconds=result.seconds)

    async def close(self) -> None:
        """Kill every server with all in it; the pool cannot be used again."""
        for server in self._servers:
            server.close()

    async def _do(
        self, make: Callable[[ExitStack], _Programs], deadline_s: float
    ) -> _JobResult | str:
        """Do a job in the next idle server, twice where the server fails; return why where it cannot be done.

        `make` opens the descriptors of the programs, which are closed with its stack once they have them.
        """
        server = await self._idle.get()
        problem = ""
        try:
            for _ in range(2):
                try:
                    self.restarts += await server.ready()
                    with ExitStack() as files:
                        server.begin(make(files), deadline_s)
                    result = await server.end(deadline_s)
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
        self._num_starts = 0
        self._began = 0.0

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
        prefix = (
            f"ycore-{self._run_id}-scratch-"  # the guardian knows scratch folders by this name
        )
        settings = _server_settings(
            self._level, self._limits, self._packages, self._number, prefix
        )
        self._send(settings, ())
        await self._receive(_START_TIMEOUT_S)
        self._num_starts += 1
        return self._num_starts > 1

    def begin(self, programs: _Programs, deadline_s: float) -> None:
        """Begin a job. The programs have descriptors of their own afterwards."""
        self._began = time.perf_counter()
        message = {
            "kinds": [kind for kind, _ in programs],
            "num_fds": [len(fds) for _, fds in programs],
            "deadline_s": deadline_s,
        }
        self._send(message, [descriptor for _, fds in programs for descriptor in fds])

    async def end(self, deadline_s: float) -> _JobResult:
        """Return how the job's programs ended: `status`, `reason`, `problem` of each; ServerLost where unknown."""
        ended = await self._receive(deadline_s + _REPLY_GRACE_S)
        return _JobResult(ended, time.perf_counter() - self._began)

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
    summary: dict[str, Any] = {
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


def _script_status(ended: Mapping[str, Any]) -> ProgramStatus:
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
        self._descriptor = os.memfd_create("output", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        files.callback(os.close, self._descriptor)
        # Twice as long, because the kernel refuses a whole write that crosses the end.
        os.ftruncate(self._descriptor, 2 * max_bytes)
        fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE)

    def rewound(self) -> int:
        """Return the descriptor, which programs write to from the beginning."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return self._descriptor

    @property
    def _num_bytes(self) -> int:
        return os.lseek(self._descriptor, 0, os.SEEK_CUR)

    @property
    def is_over(self) -> bool:
        return self._num_bytes > self._max_bytes

    @property
    def data(self) -> bytes:
        return os.pread(self._descriptor, min(self._num_bytes, self._max_bytes), 0)


def _sealed(files: ExitStack, data: bytes) -> int:
    """Return a descriptor to read the data from, which nobody can change or make longer."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED_SIZE | fcntl.F_SEAL_WRITE)
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
        uid=FIRST_UID + (os.getpid() * 16 + number * 2) % NUM_UIDS
        if os.geteuid() == 0
        else None,
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
        steps, _ = unconfined_steps(View(), limits, settings["uid"])
        settings["uid"] = steps["uid"]
        settings["keep"] = steps["keep"]
        settings["limits"] = steps["limits"]
    return settings


def _site_packages() -> list[str]:
    """Return where this environment's packages are, those of a user or of another environment too."""
    return [entry for entry in sys.path if "-packages" in entry]


def _package() -> Path:
    return Path(ycore.__file__).absolute().parent
