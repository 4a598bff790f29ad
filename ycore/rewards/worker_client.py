"""`Worker` asks one confined process (`ycore.rewards.worker`) for scores; `check_reward` asks it before a run.

This is the only way in which a person's reward file is ever imported: a run's workers and the check before a run,
also under `--dry-run`, are the same process. The parent is trusted and holds nonces, deadlines, restarts and the log.
What the process prints reaches the log through a pipe, up to a limit: it never holds the log itself.
"""

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from ycore.config.schema import RewardConfig, RewardSettings, SandboxSettings
from ycore.errors import RewardError
from ycore.rewards.builtin import REFERENCE, is_reference, reference_of
from ycore.rewards.confinement import confinement_of
from ycore.rewards.loading import Inputs, inputs_of, load_reward, require_columns
from ycore.rewards.replies import (
    BYTES_A_VALUE,
    MOST_BYTES,
    START_BYTES,
    CallFailed,
    inputs_in,
    plain_text,
    scores_in,
)
from ycore.rewards.worker_process import WorkerProcess
from ycore.sandbox import Confinement
from ycore.types import Score

START_TIMEOUT_S = 120.0
_CHECK_DEADLINE_S = (
    60.0  # a file that imports trl, as TRL's examples do, takes long where a machine is busy
)
_MAX_STARTS = 3
_NONCE_BYTES = 16
_TAIL = 1000  # bytes of output, of which an error shows the last line
_SETTINGS = RewardSettings()
AUTO = SandboxSettings()
"""The strongest level that works here."""

R = TypeVar("R")
T = TypeVar("T")


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
        deadline_s: the limit of importing the user's code, which happens in a worker.
    """
    if spec.range is not None and spec.range[0] >= spec.range[1]:
        raise RewardError(
            f"range of reward {spec.reward!r} must be its lowest value, then its highest: {spec.range}"
        )
    if is_reference(spec):
        reference_of(spec)
        require_columns(REFERENCE, ["answer"], columns)
    elif ":" in spec.reward:
        held = confinement_of(
            [spec], settings=settings, sandbox=sandbox, run_folder=run_folder, run_id="check"
        )
        (inputs,) = asyncio.run(_first_answer(spec, held, deadline_s))
        require_columns(spec.reward, inputs.required, columns)
    else:
        require_columns(spec.reward, inputs_of(load_reward(spec)).required, columns)


async def _first_answer(spec: RewardConfig, held: Confinement, deadline_s: float) -> list[Inputs]:
    for _ in range(_MAX_STARTS):
        worker = Worker([spec], held, log=None, name="check", start_timeout_s=deadline_s)
        try:
            return await worker.start()
        except CallFailed as failure:
            reason = str(failure)
        finally:
            await worker.close()
        if not worker.last_words.startswith("bwrap: Can't create file"):
            break  # there, a file that was to be hidden was gone before it could be, such as one that is being written
    if reason.startswith("timeout"):
        reason = (
            f"importing reward {spec.reward!r} did not end within {deadline_s:g} s; "
            "do slow work and slow imports inside the function"
        )
    elif reason.startswith("worker died"):
        ended = reason.removeprefix("worker died")
        reason = f"importing reward {spec.reward!r} ended its process{ended}; its last words: {worker.last_words}"
    raise RewardError(reason)


class Answerer(Generic[R]):
    """A confined process that answers one request after the other. It has none until `ready`, and none after `close`.

    Subclasses say which module it runs and what they ask it.
    """

    module: str
    arguments: Sequence[str] = ()
    kind: str
    """In words."""

    def __init__(
        self,
        first: Mapping[str, Any],
        read_first: Callable[[bytes, str], R],
        confinement: Confinement,
        *,
        log: Path | None,
        name: str = "0",
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Start nothing yet.

        Args:
            first: what each new process is told first, and `read_first` reads what it answers.
            log: takes what the process prints; None drops it.
            name: tells the processes of a run apart.
        """
        self.restarts = 0
        self._first, self._read_first, self._confinement, self._name = (
            first,
            read_first,
            confinement,
            name,
        )
        self._start_timeout_s = start_timeout_s
        self._log = log
        self._room = confinement.limits.output  # bytes that may still be logged
        self._tail = b""
        self._running: WorkerProcess | None = None
        self._killed: WorkerProcess | None = None
        self._answered: R | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether the process that was asked last is still there, with all that it knew."""
        return self._running is not None and self._running.is_clean

    async def ready(self) -> R:
        """What a process answered first, once there is one; RewardError after failed starts in a row."""
        if self._answered is not None and self.is_running:
            return self._answered
        self._kill()
        reason = ""
        for attempt in range(_MAX_STARTS):
            try:
                await asyncio.sleep(0.2 * attempt)
                was_ready = self._answered is not None
                self._answered = await self.start()
                self.restarts += was_ready
                return self._answered
            except CallFailed as failure:
                reason = str(failure)
        raise RewardError(
            f"a {self.kind} did not start in {_MAX_STARTS} attempts: {reason}; its output is in {self._log}"
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

    async def start(self) -> R:
        """Start a process, and give what it answers first; CallFailed where it cannot."""
        await self._reap()
        self._require_open()
        held = self._confinement
        self._running = await WorkerProcess.start(
            self.module, self.arguments, held, self._name, self._printed
        )
        self._require_open()  # it may have been closed while the process was being made
        self._printed(
            f"{self.kind} {self._running.process.pid}: {self._running.launch.words}\n".encode()
        )
        timeout_s = self._start_timeout_s
        return await self.exchange(
            self._first, self._read_first, most=START_BYTES, timeout_s=timeout_s, ends=True
        )

    def _require_open(self) -> None:
        if self._is_closed:
            self._kill()
            raise RuntimeError(f"this {self.kind} is closed")

    async def exchange(
        self,
        message: Mapping[str, Any],
        read: Callable[[bytes, str], T],
        *,
        most: int,
        timeout_s: float,
        ends: bool = False,
    ) -> T:
        """Send one line, read the line that answers it. A process that did not answer is never asked again.

        With `ends`, a failure ends the process too, because it never became ready.
        """
        running = self._running
        assert running is not None and running.process.stdin is not None, (
            f"ask a {self.kind} only when it is ready"
        )
        stdin = running.process.stdin
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
            most = self._confinement.limits.output
            data += f"\n{self.kind}: what it prints beyond {most} bytes is dropped\n".encode()
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


class Worker(Answerer[list[Inputs]]):
    """One `ycore.rewards.worker`. What it answers first are the parameters of each of its rewards."""

    module, kind = "ycore.rewards.worker", "reward worker"

    def __init__(self, specs: Sequence[RewardConfig], confinement: Confinement, **how: Any) -> None:
        """`how` is `Answerer`'s."""
        first = {"specs": [spec.model_dump(mode="json") for spec in specs]}
        super().__init__(
            first,
            lambda line, nonce: inputs_in(line, nonce=nonce, count=len(specs)),
            confinement,
            **how,
        )
        self._bounds = [[] if spec.range is None else [spec.range] for spec in specs]

    async def ask(
        self, source: int, request: dict[str, Any], *, count: int, deadline_s: float
    ) -> list[Score]:
        """One call's scores; CallFailed where it raised, or hung or ended the process (which is then gone)."""
        bounds = self._bounds[source]
        return await self.exchange(
            {**request, "source": source, "count": count},
            lambda line, nonce: scores_in(line, nonce=nonce, count=count, bounds=bounds),
            most=MOST_BYTES + BYTES_A_VALUE * count,
            timeout_s=deadline_s,
        )
