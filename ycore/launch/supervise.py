"""Watching a run's processes until it ends: what is shown meanwhile, and which end means which error.

Ctrl-C and its like while a run goes on: counted, so that the run can end in order.

Not here: starting them (`launcher`), and clearing them away (`guarding`).
"""

import os
import re
import signal
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from ycore.errors import Interrupted, RunError, TrainerError, UserError
from ycore.launch.engine_watch import EngineWatch
from ycore.launch.guardian import RunWatch
from ycore.launch.processes import ManagedProcess, RankedTrainer, StopWatch, is_stopped
from ycore.launch.stacks import write_stacks
from ycore.run.checkpoints import checkpoints_in, step_of
from ycore.run.metrics import MetricsFollower
from ycore.run.paths import RunFolder
from ycore.run.reports import forget_reports
from ycore.view.activity import RunActivity
from ycore.view.progress import RunProgress

_STREAMS = (0, 1, 2)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequests:
    """Within it, SIGINT, SIGTERM and SIGHUP only add to `count`; after it, they mean what they meant before."""

    def __init__(self) -> None:
        self.count = 0
        self._at_once = False
        self._before: dict[signal.Signals, Any] = {}
        self._terminals = [descriptor for descriptor in _STREAMS if os.isatty(descriptor)]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            heard = [number for number in _SIGNALS if number != signal.SIGHUP or not _outlives_its_terminal()]
            self._before = {number: signal.signal(number, self._count) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Around work that cannot look at `count`, such as a download: a signal raises Interrupted in its midst."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _let_go_of_a_closed_terminal(self._terminals)
        self.count += 1
        if self._at_once:
            self._at_once = False
            raise Interrupted("stopped before the first step; the same command starts again with --resume")


def _outlives_its_terminal() -> bool:
    """Whether this process was started under `nohup`, or by something else that ignores a closed terminal."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def _let_go_of_a_closed_terminal(terminals: list[int]) -> None:
    """What is shown goes nowhere from here on: to write to a terminal that is gone is an error, also in a save."""
    for descriptor in terminals:
        try:
            termios.tcgetattr(descriptor)
        except termios.error:
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


_LOOK_EVERY_S = 0.2
_STOPS_WITHIN_S = 60.0  # a trainer that was asked to stop finishes its step and saves a checkpoint
_BLAME_WITHIN_S = 2.0  # a trainer may notice an engine's end before the engine's process is gone
_DEADLINE_PASSED = re.compile(r"\bwithin \d+ s\b|timed out", re.IGNORECASE)

Trainer = ManagedProcess | RankedTrainer


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a trainer may take, and how often it goes on by itself after it has failed.

    `start_s` is from its start, or from when the engines are ready, to its first step.
    """

    start_s: float = 3600.0
    step_s: float = 3600.0
    stopped_s: float = 60.0
    restarts: int = 0


class Supervisor:
    """One run's processes. `watch` returns when the trainer has finished, and raises for every other end.

    `start` starts the trainer, which goes on from its newest checkpoint by itself; `way_on` ends the line of an error.
    """

    def __init__(
        self,
        start: Callable[[], Trainer],
        engines: EngineWatch,
        *,
        folder: RunFolder,
        follower: MetricsFollower,
        progress: RunProgress,
        stops: StopRequests,
        limits: Limits = Limits(),
        way_on: str = "",
    ) -> None:
        self._start = start
        self._engines = engines
        self._folder = folder
        self._follower = follower
        self._progress = progress
        self._stops = stops
        self._limits = limits
        self._way_on = way_on
        self._stopped = StopWatch(limits.stopped_s)
        self._mark = 0  # when a step last began, as a file's time; 0 before the first
        self._moved = time.monotonic()
        self._step = 0
        self.num_restarts = 0
        self._trainer = self._start_anew()
        engines.on_hang = self._write_stacks

    def watch(self) -> None:
        """Show progress and look after every process until the trainer ends for good."""
        while True:
            try:
                return self._until_it_ends()
            except TrainerError as error:
                if self._stops.count or self.num_restarts >= self._limits.restarts:
                    raise TrainerError(f"{error}{self._way_on}") from None
                self._restart(error)
            except RunError as error:
                raise type(error)(f"{error}{self._way_on}") from None

    def _until_it_ends(self) -> None:
        while self._trainer.exit_code is None:
            self._show()
            self._engines.look()
            self._check_trainer()
            if self._stops.count:
                self._stop()
            time.sleep(_LOOK_EVERY_S)
        self._show()
        self._conclude()

    def _show(self) -> None:
        for row in self._follower.read():
            self._progress.step(row)
            self._step = int(row.get("step", self._step))
            self._moved = time.monotonic()
        mark = _touched(self._folder.step_began)
        if mark > self._mark:
            self._mark, self._moved = mark, time.monotonic()

    def _check_trainer(self) -> None:
        """TrainerError for one that is there and does not get on."""
        members = self._trainer.members()
        stopped = self._stopped.look(list(members.values()))
        if stopped is not None:
            name = next((name for name, pid in members.items() if is_stopped(pid)), self._trainer.name)
            self._give_up(f"{name} has been stopped (SIGSTOP) for {stopped:.0f} s")
        if not self._engines.are_ready:
            self._moved = time.monotonic()
        silent = time.monotonic() - self._moved
        if not self._mark and silent > self._limits.start_s:
            self._give_up(f"{self._trainer.name} has been starting for {silent:.0f} s (engine.start_timeout_s)")
        if self._mark and silent > self._limits.step_s:
            self._give_up(f"{self._trainer.name} has not finished a step for {silent:.0f} s (step_timeout_s)")

    def _give_up(self, why: str) -> None:
        at = self._doing()  # before processes are let go on to tell their stacks
        stacks = self._write_stacks(why)
        raise TrainerError(f"{why}, in step {self._step + 1} (it was {at}; the stack of every process is in {stacks})")

    def _write_stacks(self, why: str) -> Path:
        path = self._folder.logs / f"stacks-step-{self._step + 1}.txt"
        why = f"{why}, in step {self._step + 1}; it was {self._doing()}"
        return write_stacks(RunWatch(self._folder.run_id).look(), path, why=why)

    def _doing(self) -> str:
        return RunActivity(self._folder.root).look().in_words()

    def _restart(self, error: TrainerError) -> None:
        """Clear away what the trainer left, reward workers and other ranks included, and start it again."""
        self.num_restarts += 1
        counted = f"{self.num_restarts} of {self._limits.restarts}"
        self._progress.say(f"{error}; going on from the newest checkpoint ({counted})")
        engines = [process.pid for process in self._engines.processes()]
        RunWatch(self._folder.run_id, keep=engines).kill(grace_s=0)
        forget_reports(self._folder)
        self._stopped = StopWatch(self._limits.stopped_s)
        self._trainer = self._start_anew()

    def _start_anew(self) -> Trainer:
        self._folder.step_began.unlink(missing_ok=True)
        self._mark = 0
        self._moved = time.monotonic()
        checkpoints = checkpoints_in(self._folder.checkpoints)
        self._step = step_of(checkpoints[-1]) if checkpoints else 0  # whence it goes on
        return self._start()

    def _stop(self) -> None:
        """Ask the trainer, and the trainer alone, to save and end; a second request, or 60 s, ends it."""
        self._progress.say("stopping: the trainer saves a checkpoint; once more to stop at once")
        self._trainer.send(signal.SIGINT)
        deadline = time.monotonic() + _STOPS_WITHIN_S
        while self._trainer.exit_code is None and self._stops.count < 2 and time.monotonic() < deadline:
            self._show()
            time.sleep(_LOOK_EVERY_S)
        self._show()
        if self._trainer.exit_code != 0:
            self._trainer.send(signal.SIGKILL)
            raise Interrupted(f"stopped after step {self._step}; the same command goes on with --resume")

    def _conclude(self) -> None:
        """What the trainer's end means: nothing when it finished, else the error whose cause it is."""
        code = self._trainer.exit_code
        if code == 0:
            return
        said = self._trainer.user_error()
        if code == UserError.exit_code and said is not None:
            raise UserError(said)
        if code == Interrupted.exit_code or self._stops.count:
            raise Interrupted(f"stopped after step {self._step}; the same command goes on with --resume")
        self._blame_an_engine()
        error = f"{_ended(self._trainer)}, in step {self._step + 1}"
        if _DEADLINE_PASSED.search(error):
            error += f" (the stack of every process is in {self._write_stacks(error)})"
        raise TrainerError(error)

    def _blame_an_engine(self) -> None:
        deadline = time.monotonic() + _BLAME_WITHIN_S
        while self._engines.processes() and time.monotonic() < deadline:
            self._engines.check()
            time.sleep(_LOOK_EVERY_S)


def _touched(file: Path) -> int:
    """When, in nanoseconds; 0 where there is no such file."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _ended(process: Trainer) -> str:
    line = process.last_line()
    return (
        f"{process.name} ended with {process.how_it_ended()}" + (f": {line}" if line else "") + f" (see {process.log})"
    )
