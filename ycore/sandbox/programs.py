"""ProgramPool that a model wrote, each run in a fresh confined process: their outputs, and the verdicts of their tests.

How a program ended is decided here, outside, by clocks, counters and what the kernel says. What fails before a program
begins, or takes its runner along, is started again and the program run once more; if that fails too, the outcome is
`infra_error`, and nobody's fault.

Pipes: a program's source and input are sealed memory files, and its output is read here up to a limit. Of an examined
program nothing is read but what its examiner writes.
"""

import asyncio
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ycore.errors import RunError
from ycore.sandbox import MIB, Level, Limits
from ycore.sandbox.confine import PipeReader
from ycore.sandbox.program_runners import Job, Lost, Runner

Status = Literal["ok", "error", "timeout", "memory", "output", "killed", "infra_error"]
"""`error`: an exit status that is not 0. `killed`: by a signal that was not ours."""

PROGRAM_LIMITS = Limits(memory=512 * MIB, scratch=64 * MIB, files=2000, processes=64, output=MIB)
_MAX_VERDICT = MIB
_MAX_UNITS = 100_000


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """How a script ended. `output` and `errors` are what it printed, `seconds` those of its process."""

    status: Status
    output: bytes = b""
    errors: bytes = b""
    seconds: float = 0.0
    problem: str | None = None  # of an `infra_error`


@dataclass(frozen=True, slots=True)
class UnitTestResult:
    """What a program's tests found. `units` are the asserts, in order: passed, failed, or None where one did not run.

    `began` is `ready`, `compile_error`, `run_error` or `gone`, as far as the program itself may be believed.
    `ended` says whether the tests came to their end. `broken` says why the tests themselves cannot run.
    """

    status: Status
    began: str = "gone"
    units: tuple[bool | None, ...] = ()
    ended: bool = False
    broken: str | None = None
    seconds: float = 0.0
    problem: str | None = None  # of an `infra_error`


@dataclass(frozen=True, slots=True)
class _Done:
    ended: Sequence[Mapping[str, Any]]
    readers: Sequence["_Reader"]
    seconds: float


_Make = Callable[[ExitStack, Callable[[], None]], tuple[Job, list["_Reader"]]]


class ProgramPool:
    """Runs programs, `at_once` of them side by side. Belongs to one event loop.

    Example: `programs = ProgramPool(Level.NAMESPACES, at_once=2, log=log, run_id=run_id)`, then
    `await programs.run("print(1)", deadline_s=2)`, and `await programs.close()` at the end.
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
        self._runners = [
            Runner(level, number, log, run_id=run_id, limits=limits, packages=packages)
            for number in range(at_once)
        ]
        self._idle: asyncio.Queue[Runner] = asyncio.Queue()
        for runner in self._runners:
            self._idle.put_nowait(runner)

    async def start(self) -> None:
        """See an honest program run in every runner; RunError where one does not."""
        honest = [self.run("print(6 * 7)", deadline_s=20.0) for _ in self._runners]
        for outcome in await asyncio.gather(*honest):
            if outcome.status != "ok" or outcome.output != b"42\n":
                why = (
                    outcome.problem
                    or (outcome.errors or outcome.output).decode(errors="replace").strip()[-300:]
                )
                raise RunError(
                    f"an honest program does not run in the sandbox: {outcome.status}, {why}"
                )

    async def run(self, source: str, *, stdin: bytes = b"", deadline_s: float) -> ScriptResult:
        """Run a program as a script with this standard input."""

        def make(files: ExitStack, too_much: Callable[[], None]) -> tuple[Job, list[_Reader]]:
            (output, written), (errors, complaints) = _pipe(files), _pipe(files)
            count = _Count(self._limits.output, too_much)
            fds = [_sealed(files, stdin), written, complaints, _sealed(files, _bytes(source))]
            return Job(["script"], [fds], deadline_s), [
                _Reader(output, count),
                _Reader(errors, count),
            ]

        done = await self._do(make)
        if isinstance(done, str):
            return ScriptResult("infra_error", problem=done)
        output, errors = done.readers
        status = _status(done.ended[0], is_too_much=output.count.is_over)
        return ScriptResult(status, bytes(output.data), bytes(errors.data), done.seconds)

    async def examine(
        self, source: str, exam: Mapping[str, Any], *, deadline_s: float
    ) -> UnitTestResult:
        """Run a row's tests against a program. `exam` is what `examiner` reads; it never reaches the program."""

        def make(files: ExitStack, too_much: Callable[[], None]) -> tuple[Job, list[_Reader]]:
            verdict, written = _pipe(files)
            nothing = [os.open(os.devnull, os.O_RDWR)] * 3
            files.callback(os.close, nothing[0])
            one, other = (files.enter_context(end).fileno() for end in socket.socketpair())
            examiner = [*nothing, _sealed(files, json.dumps(exam).encode()), one, written]
            program = [*nothing, _sealed(files, _bytes(source)), other]
            job = Job(["examiner", "callee"], [examiner, program], deadline_s)
            return job, [_Reader(verdict, _Count(_MAX_VERDICT, too_much))]

        done = await self._do(make)
        if isinstance(done, str):
            return UnitTestResult("infra_error", problem=done)
        return read_verdict(bytes(done.readers[0].data), *done.ended, seconds=done.seconds)

    async def close(self) -> None:
        """Kill every runner with all in it; the pool cannot be used again."""
        for runner in self._runners:
            runner.close()

    async def _do(self, make: _Make) -> _Done | str:
        """Do a job in the next idle runner, twice where the runner fails; else why that cannot be done."""
        runner = await self._idle.get()
        problem = ""
        try:
            for _ in range(2):
                try:
                    self.restarts += await runner.ready()
                    done = await self._attempt(runner, make)
                except (Lost, OSError) as error:
                    problem = str(error)
                else:
                    problem = next((one["problem"] for one in done.ended if one["problem"]), "")
                    if not problem:
                        return done
                runner.close()
            return problem
        except BaseException:
            runner.close()  # given up in the middle of a job: what runs there ends too
            raise
        finally:
            self._idle.put_nowait(runner)

    async def _attempt(self, runner: Runner, make: _Make) -> _Done:
        readers: list[_Reader] = []
        began = time.perf_counter()
        try:
            with ExitStack() as files:
                job, readers = make(files, runner.kill_job)
                runner.send(job)
            ended = await runner.ended(job)
            for reader in readers:
                reader.drain()
            return _Done(ended, readers, time.perf_counter() - began)
        finally:
            for reader in readers:
                reader.close()


def read_verdict(
    data: bytes, examiner: Mapping[str, Any], callee: Mapping[str, Any], *, seconds: float
) -> UnitTestResult:
    """The examiner's lines as a verdict. One that was cut short has not ended, and so has not passed."""
    began, broken, ended, hung = "gone", None, False, examiner["reason"] == "deadline"
    units: list[bool | None] = []
    for line in data.split(b"\n")[:-1]:
        found = json.loads(line)
        if "state" in found:
            began = found["state"]
        elif "units" in found:
            units = [None] * min(found["units"], _MAX_UNITS)
        elif "unit" in found:
            units[found["unit"]] = found["passed"]
        broken = found.get("broken", broken)
        ended, hung = found.get("ended", ended), found.get("timed_out", hung)
    if not data:
        return UnitTestResult(
            "infra_error", problem="the tests of a program did not begin", seconds=seconds
        )
    status: Status = "memory" if "memory" in (examiner["reason"], callee["reason"]) else "ok"
    status = "timeout" if hung else status
    return UnitTestResult(status, began, tuple(units), ended, broken, seconds)


def _status(ended: Mapping[str, Any], *, is_too_much: bool) -> Status:
    if is_too_much:
        return "output"
    if ended["reason"] == "deadline":
        return "timeout"
    if ended["reason"] == "memory":
        return "memory"
    status = int(ended["status"])
    return "ok" if status == 0 else "error" if status > 0 else "killed"


class _Count:
    """Bytes read so far from one or more pipes of a program, up to a limit."""

    def __init__(self, limit: int, too_much: Callable[[], None]) -> None:
        self.left, self.is_over = limit, False
        self._too_much = too_much

    def take(self, data: bytes) -> bytes:
        """As much of it as may still come; tells once that there is more."""
        kept = data[: self.left]
        self.left -= len(kept)
        if len(kept) < len(data) and not self.is_over:
            self.is_over = True
            self._too_much()
        return kept


class _Reader(PipeReader):
    def __init__(self, descriptor: int, count: _Count) -> None:
        self.data, self.count = bytearray(), count
        super().__init__(descriptor, lambda read: self.data.extend(count.take(read)))


def _pipe(files: ExitStack) -> tuple[int, int]:
    """A pipe whose end to write is closed with `files`; the other is its reader's."""
    read, written = os.pipe()
    files.callback(os.close, written)
    return read, written


def _sealed(files: ExitStack, data: bytes) -> int:
    """A descriptor to read the data from, which nobody can change or make longer."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    files.callback(os.close, descriptor)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(
        descriptor,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    return descriptor


def _bytes(source: str) -> bytes:
    return source.encode("utf-8", errors="replace")
