"""Watching a run's processes until it ends: what is shown meanwhile, and which end means which error.

Not here: starting them (`launcher`), and clearing them away (`guarding`).
"""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ycore.errors import EngineError, Interrupted, TrainerError, UserError
from ycore.launch.health import is_healthy
from ycore.launch.processes import ManagedProcess, is_alive
from ycore.launch.ranks import RankedTrainer
from ycore.launch.stopping import StopRequests
from ycore.telemetry.follow import MetricsFollower
from ycore.telemetry.progress import RunProgress

_LOOK_EVERY_S = 0.2
_ASK_EVERY_S = 1.0
_STOPS_WITHIN_S = 60.0  # a trainer that was asked to stop finishes its step and saves a checkpoint
_BLAME_WITHIN_S = 2.0  # a trainer may notice an engine's end before the engine's process is gone


class Supervisor:
    """One run's processes. `watch` returns when the trainer has finished, and raises for every other end."""

    def __init__(
        self,
        trainer: ManagedProcess | RankedTrainer,
        engines: Sequence[tuple[ManagedProcess, Path]],
        *,
        follower: MetricsFollower,
        progress: RunProgress,
        stops: StopRequests,
        start_timeout_s: float,
    ) -> None:
        self._trainer = trainer
        self._engines = [process for process, _ in engines]
        self._waiting = list(engines)
        self._parts: dict[str, dict[str, psutil.Process]] = {}
        self._follower = follower
        self._progress = progress
        self._stops = stops
        self._start_timeout_s = start_timeout_s
        self._began = self._asked = time.monotonic()
        self._step = 0

    def watch(self) -> None:
        """Show progress and look after every process until the trainer ends."""
        while self._trainer.exit_code is None:
            self._show()
            self._check_engines()
            self._check_ready()
            if self._stops.count:
                self._stop()
            time.sleep(_LOOK_EVERY_S)
        self._show()
        self._conclude()

    def _show(self) -> None:
        for row in self._follower.read():
            self._progress.step(row)
            self._step = int(row.get("step", self._step))

    def _check_engines(self) -> None:
        """An engine that is gone ends the run. Restarting it, within a budget, belongs in the place of the raise.

        vLLM's server outlives its engine core and lets requests wait for ever, so a ready engine is gone as soon as
        any of its processes is.
        """
        for engine in self._engines:
            if engine.exit_code is not None:
                raise EngineError(_ended(engine))
            for name, part in self._parts.get(engine.name, {}).items():
                if not is_alive(part):
                    raise EngineError(
                        f"{engine.name} lost its process {name}, killed or out of memory (see {engine.log})"
                    )

    def _check_ready(self) -> None:
        """Ask the engines that have not answered yet, until all have or the time is over."""
        now = time.monotonic()
        if not self._waiting or now - self._asked < _ASK_EVERY_S:
            return
        self._asked = now
        ready = [engine for engine, socket in self._waiting if is_healthy(socket)]
        self._waiting = [(engine, socket) for engine, socket in self._waiting if engine not in ready]
        self._parts |= {engine.name: engine.children() for engine in ready}
        waited = time.monotonic() - self._began
        if not self._waiting:
            self._progress.say(f"{_engines(len(self._engines))} ready after {waited:.0f} s")
        elif waited > self._start_timeout_s:
            engine = self._waiting[0][0]
            raise EngineError(
                f"{engine.name} was not ready after {self._start_timeout_s:.0f} s: {engine.last_line()} "
                f"(see {engine.log}, or raise engine.start_timeout_s)"
            )

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
        raise TrainerError(_ended(self._trainer))

    def _blame_an_engine(self) -> None:
        deadline = time.monotonic() + _BLAME_WITHIN_S
        while self._engines and time.monotonic() < deadline:
            self._check_engines()
            time.sleep(_LOOK_EVERY_S)


def _ended(process: ManagedProcess | RankedTrainer) -> str:
    line = process.last_line()
    return (
        f"{process.name} ended with {process.how_it_ended()}" + (f": {line}" if line else "") + f" (see {process.log})"
    )


def _engines(count: int) -> str:
    return "engine" if count == 1 else f"{count} engines"
