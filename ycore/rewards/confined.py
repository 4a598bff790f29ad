"""One confined process that calls reward functions, seen from outside: what it may see, how it is asked, how it ends.

This is the only way in which a person's reward file is ever imported: a run's workers and the check before a run,
also under `--dry-run`, are the same process. It gets requests on standard input and answers on a pipe of its own.
Whatever it prints passes through a third pipe into the log, up to a limit: it never holds the log itself.
"""

import asyncio
import json
import os
import secrets
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ycore.config.schema import RewardConfig, RewardSettings, SandboxSettings
from ycore.errors import RewardError
from ycore.rewards.builtin import REFERENCE, is_reference, reference_of
from ycore.rewards.loading import Inputs, inputs_of, load_reward, require_columns
from ycore.rewards.pipes import Output, Replies
from ycore.rewards.replies import BYTES_A_VALUE, MOST_BYTES, START_BYTES, CallFailed, inputs_in, plain_text, scores_in
from ycore.rewards.seen import view_of
from ycore.run.process_tree import kill_tree
from ycore.sandbox import GIB, Level, Limits, View
from ycore.sandbox.confine import Launch, launch_of
from ycore.sandbox.level import choose
from ycore.sandbox.watch import Bounds, Watch
from ycore.types import Score

START_TIMEOUT_S = 120.0
_CHECK_DEADLINE_S = 8.0
_MAX_STARTS = 3
_REAP_TIMEOUT_S = 5.0
_NONCE_BYTES = 16
_TAIL = 1000  # bytes of output, of which an error shows the last line
_SETTINGS = RewardSettings()
AUTO = SandboxSettings()
"""The strongest level that works here."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Confinement:
    """How a worker is held: the level and limits, what it may see, and the run whose mark it carries."""

    level: Level
    view: View
    limits: Limits
    run_id: str
    own_user: bool = True  # at the level `none`, root becomes another user all the same


def confinement_of(
    specs: Sequence[RewardConfig],
    *,
    settings: RewardSettings,
    sandbox: SandboxSettings,
    run_folder: Path | None,
    run_id: str,
) -> Confinement:
    """How a worker of these rewards is held. ConfigError where the level that was asked for cannot be had here."""
    limits = Limits(memory=int(settings.memory_gib * GIB))
    level = choose(sandbox.level).level
    return Confinement(level, view_of(specs, run_folder=run_folder), limits, run_id, own_user=sandbox.level != "none")


def check_reward(
    spec: RewardConfig,
    columns: Iterable[str],
    *,
    settings: RewardSettings = _SETTINGS,
    sandbox: SandboxSettings = AUTO,
    run_folder: Path | None = None,
    deadline_s: float = _CHECK_DEADLINE_S,
) -> None:
    """Raise RewardError for a reward that cannot be loaded, or that needs a column which the dataset lacks.

    Args:
        spec: a rule, and not a judge or a reward model.
        columns: the dataset's columns that rewards may read.
        deadline_s: the limit of importing the user's code, which happens in a worker.
    """
    if spec.range is not None and spec.range[0] >= spec.range[1]:
        raise RewardError(f"range of reward {spec.reward!r} must be its lowest value, then its highest: {spec.range}")
    if is_reference(spec):
        reference_of(spec)
        require_columns(REFERENCE, ["answer"], columns)
    elif ":" in spec.reward:
        held = confinement_of([spec], settings=settings, sandbox=sandbox, run_folder=run_folder, run_id="check")
        (inputs,) = asyncio.run(_first_answer(spec, held, deadline_s))
        require_columns(spec.reward, inputs.required, columns)
    else:
        require_columns(spec.reward, inputs_of(load_reward(spec)).required, columns)


async def _first_answer(spec: RewardConfig, held: Confinement, deadline_s: float) -> list[Inputs]:
    worker = Worker([spec], held, log=None, name="check", start_timeout_s=deadline_s)
    try:
        return await worker.start()
    except CallFailed as failure:
        reason = str(failure)
    finally:
        await worker.close()
    if reason.startswith("timeout"):
        reason = (
            f"importing reward {spec.reward!r} did not end within {deadline_s:g} s; "
            "do slow work and slow imports inside the function"
        )
    elif reason.startswith("worker died"):
        ended = reason.removeprefix("worker died")
        reason = f"importing reward {spec.reward!r} ended its process{ended}; its last words: {worker.last_words}"
    raise RewardError(reason)


class Worker:
    """One `ycore.rewards.worker`. It has no process until `ready`, and none after `close`."""

    def __init__(
        self,
        specs: Sequence[RewardConfig],
        confinement: Confinement,
        *,
        log: Path | None,
        name: str = "0",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start nothing yet.

        Args:
            log: takes what the process prints; None drops it.
            name: tells the workers of a run apart.
        """
        self.restarts = 0
        self._specs, self._confinement, self._name = specs, confinement, name
        self._bounds = [[] if spec.range is None else [spec.range] for spec in specs]
        self._start_timeout_s = start_timeout_s
        self._log = log
        self._room = confinement.limits.output  # bytes that may still be logged
        self._tail = b""
        self._running: _Running | None = None
        self._killed: _Running | None = None
        self._inputs: list[Inputs] = []
        self._is_closed = False

    async def ready(self) -> list[Inputs]:
        """The parameters of each reward, once a process has loaded them; RewardError after failed starts in a row."""
        if self._running is not None and self._running.is_clean:
            return self._inputs
        self._kill()
        reason = ""
        for attempt in range(_MAX_STARTS):
            try:
                await asyncio.sleep(0.2 * attempt)
                was_ready = bool(self._inputs)
                self._inputs = await self.start()
                self.restarts += was_ready
                return self._inputs
            except CallFailed as failure:
                reason = str(failure)
        raise RewardError(
            f"a reward worker did not start in {_MAX_STARTS} attempts: {reason}; its output is in {self._log}"
        )

    async def ask(self, source: int, request: dict[str, Any], *, count: int, deadline_s: float) -> list[Score]:
        """One call's scores; CallFailed where it raised, or hung or ended the process (which is then gone).

        Args:
            source: the reward's place among the worker's.
            count: how many completions the request has.
        """
        assert self._running is not None, "ask a reward worker only when it is ready"
        message = {**request, "source": source, "count": count}
        bounds = self._bounds[source]
        most = MOST_BYTES + BYTES_A_VALUE * count
        return await self._exchange(
            self._running,
            message,
            lambda line, nonce: scores_in(line, nonce=nonce, count=count, bounds=bounds),
            most=most,
            timeout_s=deadline_s,
        )

    @property
    def last_words(self) -> str:
        """The last line that the process printed, in a form that can be shown."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return plain_text(lines[-1]) if lines else "nothing was printed"

    async def close(self) -> None:
        """Kill the process and all that it started, and wait until it is gone."""
        self._is_closed = True
        self._kill()
        await self._reap()

    async def start(self) -> list[Inputs]:
        """Start a process, and give the parameters of its rewards; CallFailed where they cannot be loaded."""
        await self._reap()
        self._require_open()
        held = self._confinement
        running = self._running = await _Running.start(held, self._name, self._printed)
        self._require_open()  # it may have been closed while the process was being made
        self._printed(f"reward worker {running.process.pid}: {running.launch.words}\n".encode())
        first = {"specs": [spec.model_dump(mode="json") for spec in self._specs]}
        return await self._exchange(
            running,
            first,
            lambda line, nonce: inputs_in(line, nonce=nonce, count=len(self._specs)),
            most=START_BYTES,
            timeout_s=self._start_timeout_s,
            ends=True,
        )

    def _require_open(self) -> None:
        if self._is_closed:
            self._kill()
            raise RuntimeError("this reward worker is closed")

    async def _exchange(
        self,
        running: "_Running",
        message: dict[str, Any],
        read: Callable[[bytes, str], T],
        *,
        most: int,
        timeout_s: float,
        ends: bool = False,
    ) -> T:
        """Send one line, read the line that answers it. A process that did not answer is never asked again.

        Args:
            ends: a failure ends the process too, because it never became ready.
        """
        stdin = running.process.stdin
        assert stdin is not None
        nonce = secrets.token_hex(_NONCE_BYTES)
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                stdin.write(json.dumps({**message, "nonce": nonce}).encode() + b"\n")
                await stdin.drain()
                line = await running.replies.line(most)
            if line is None:
                raise CallFailed(f"no answer of a worker: more than {most} bytes")
            answered = line.startswith(b"{") and nonce.encode() in line
            return read(line, nonce)
        except TimeoutError:
            raise CallFailed(f"timeout after {timeout_s:g} s") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            raise CallFailed(f"worker died ({await running.how_it_ended()})") from None
        except CallFailed:
            answered = answered and not ends
            raise
        finally:
            if not answered:
                self._kill()

    def _printed(self, data: bytes) -> None:
        """Append to the log, as long as there is room."""
        self._tail = (self._tail + data)[-_TAIL:]
        if self._log is None or self._room <= 0:
            return
        self._room -= len(data)
        if self._room <= 0:
            data += (
                f"\nreward worker: what it prints beyond {self._confinement.limits.output} bytes is dropped\n".encode()
            )
        with suppress(OSError):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                log.write(data)

    def _kill(self) -> None:
        if self._running is not None:
            self._running.kill()
            self._running, self._killed = None, self._running

    async def _reap(self) -> None:
        if self._killed is not None:
            await self._killed.reap()
            self._killed = None


class _Running:
    """A started process, its pipes and its watch."""

    def __init__(
        self, launch: Launch, level: Level, process: Process, replies: "Replies", output: "Output", watch: Watch
    ) -> None:
        self.launch, self.process, self.replies = launch, process, replies
        self._output, self._watch, self._level = output, watch, level

    @classmethod
    async def start(cls, held: Confinement, name: str, printed: Callable[[bytes], None]) -> "_Running":
        loop = asyncio.get_running_loop()
        pipes = [os.pipe() for _ in range(2)]  # answers, output
        (answers, to_answers), (output, to_output) = pipes
        launch = None
        try:
            launch = launch_of(
                "ycore.rewards.worker",
                [str(to_answers)],
                level=held.level,
                view=held.view,
                limits=held.limits,
                run_id=held.run_id,
                name=name,
                own_user=held.own_user,
            )
            process = await asyncio.create_subprocess_exec(
                *launch.command,
                stdin=PIPE,
                stdout=to_output,
                stderr=to_output,
                env=launch.environment,
                cwd=launch.working,
                pass_fds=(to_answers,),
                start_new_session=True,
            )
        except BaseException:
            for end in (answers, output):
                os.close(end)
            if launch is not None:
                launch.clear()
            raise
        finally:
            for end in (to_answers, to_output):
                os.close(end)
        limits = held.limits
        watch = Watch(
            process.pid,
            Bounds(limits.memory, limits.processes, limits.scratch, limits.files),
            lambda: _end(process.pid, held.level),
            scratch=None if launch.scratch is None else str(launch.scratch),
        )
        watch.start()
        _, replies = await loop.connect_read_pipe(Replies, _file(answers))
        _, shown = await loop.connect_read_pipe(lambda: Output(printed), _file(output))
        return cls(launch, held.level, process, replies, shown, watch)

    @property
    def is_clean(self) -> bool:
        """Whether it lives, and has said nothing that it was not asked."""
        return self._is_alive and self.replies.is_empty and not self.replies.ended.is_set()

    @property
    def _is_alive(self) -> bool:
        """As the kernel knows it: the event loop learns of an end a moment later."""
        if sys.platform != "linux":
            return self.process.returncode is None
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    async def how_it_ended(self) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), 1.0)
        code = self.process.returncode
        if self._watch.excess is not None:
            return f"it held {self._watch.excess}"
        if code is None:
            return "it closed its output"
        code = 128 - code if code > 128 else code  # bwrap reports a signal as a shell does
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        self._watch.stop()
        _end(self.process.pid, self._level)

    async def reap(self) -> None:
        # Bounded: what a reward detached from its group may hold the pipes that these wait for.
        with suppress(TimeoutError):
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await self.process.wait()
                await self._output.ended.wait()
        if self.process.returncode is None:
            kill_tree(self.process.pid)
        self.replies.close()
        self._output.close()
        self.launch.clear()


def _end(pid: int, level: Level) -> None:
    """End a process with all below it. At `landlock` it is our own stage, which misses nothing that forks meanwhile."""
    if level is not Level.LANDLOCK:
        return kill_tree(pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)


def _file(descriptor: int) -> BinaryIO:
    return os.fdopen(descriptor, "rb", buffering=0)
