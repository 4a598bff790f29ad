"""Watch a run's processes until it ends: show progress, restart what died, and turn every end into its error."""

import math
import re
import shlex
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from ycore.config.schema import BaseConfig, RunConfig, ScoredConfig
from ycore.errors import Interrupted, MachineLost, RunError, TrainerError, UserError
from ycore.launch.engine_watch import EngineWatch
from ycore.launch.guardian import RunWatch
from ycore.launch.layout import Site
from ycore.launch.machine_checks import find_move
from ycore.launch.machines import Machines
from ycore.launch.processes import (
    ManagedProcess,
    RankedTrainer,
    start_trainer,
    write_stacks,
)
from ycore.run.interrupt import StopRequests
from ycore.run.metrics import MetricsFollower
from ycore.run.reports import forget_reports
from ycore.run.resuming import last_step
from ycore.view.activity import RunActivity
from ycore.view.progress import RunProgress

_POLL_S = 0.2
_BLAME_WITHIN_S = (
    2.0  # a trainer may notice an engine's end before the engine's process is gone
)
_CAUSE_WITHIN_S = 7.0  # what a network's end takes to be known
_END_WITHIN_S = 20.0  # after Ctrl-C when there is nothing to save
_CLOSES_WITHIN_S = 10.0  # after another machine has ended, and with it the save
_DEADLINE_MISSED = re.compile(r"\bwithin \d+ s\b|timed out", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RunKind:
    """The process that does a run's work. `result_file` has the results of one that trains nothing."""

    name: str
    module: str
    result_file: str | None = None

    @property
    def trains(self) -> bool:
        return self.result_file is None


class TrainerLimits(NamedTuple):
    """Time limits of a trainer in seconds, and how often a failed one is started again."""

    step_s: float = 3600.0
    restarts: int = 0
    start_s: float = (
        3600.0  # from its start, or from when the engines are ready, to its first step
    )


def limits_of(config: BaseConfig) -> TrainerLimits:
    """Return the limits of a run's trainer."""
    if isinstance(config, RunConfig):
        start_s = config.engine.start_timeout_s
        return TrainerLimits(config.step_timeout_s, config.restarts, start_s)
    if isinstance(config, ScoredConfig):
        return TrainerLimits(config.step_timeout_s, config.restarts)
    # Before its first step it reads every row, and may ask a reference about each.
    return TrainerLimits(start_s=math.inf)


class Rebalanced(BaseException):
    """The run has saved and ended, to go on with the argument for its config."""


@dataclass(eq=False, kw_only=True)
class Supervisor:
    """Starts a run's trainer, and watches it and the engines until the trainer ends for good.

    A trainer resumes from its newest checkpoint by itself.
    """

    kind: RunKind
    config: BaseConfig
    site: Site
    machines: Machines
    engines: EngineWatch
    progress: RunProgress
    stops: StopRequests

    def __post_init__(self) -> None:
        self.folder = self.site.folder
        self.limits = limits_of(self.config)
        self._follower = MetricsFollower(self.folder.metrics, say=self.progress.say)
        self._hint = ""
        if self.kind.trains:
            self._hint = f"; `ycore resume {shlex.quote(self.config.output)}` continues"
        self._num_restarts = 0
        self._trainer = self._start_trainer()
        self.engines.on_hang = self._write_stacks

    def watch(self) -> None:
        """Return when the trainer has finished; raise for every other end."""
        while True:
            try:
                self._watch_trainer()
                # A first Ctrl-C comes too late now.
                self.machines.gather("trained", look=partial(self._look, max_stops=1))
                return
            except RunError as error:
                has_spent = self._num_stops or self._num_restarts >= self.limits.restarts
                if not isinstance(error, TrainerError) or has_spent:
                    # Ranks take SIGTERM for a request to save, and other machines wait for them.
                    self._trainer.send(signal.SIGKILL)
                    if self.machines.count > 1:  # to clear up takes seconds
                        self.progress.say(f"{error}; its processes end here")
                    # A run that was asked to stop waits for no machine.
                    is_over = isinstance(error, MachineLost) and self._num_stops
                    kind = RunError if is_over else type(error)
                    raise kind(f"{error}{self._hint}") from None
                self._restart(error)

    def _start_trainer(self) -> ManagedProcess | RankedTrainer:
        self.folder.step_began.unlink(missing_ok=True)
        self.folder.work.unlink(missing_ok=True)
        self._step_began_ns = 0  # 0 before the first step of this trainer
        self._progressed = self._began = time.monotonic()
        self._start_s: float | None = None  # until this trainer's first step had ended
        self._move: RunConfig | None = None  # with a better division of devices
        self._step = last_step(self.folder.checkpoints)
        # The ranks meet where an earlier start's did, which must be gone everywhere.
        self.machines.gather(
            f"start {self._num_restarts}", look=partial(self._look, max_stops=0)
        )
        return start_trainer(
            self.config,
            self.site,
            name=self.kind.name,
            module=self.kind.module,
            say=self.progress.say,
        )

    def _look(self, max_stops: int) -> None:
        """Raise what ends the wait for other machines: an end of theirs, or more requests to stop."""
        self._check_others()
        if self._num_stops > max_stops or self.machines.has_ended:
            raise Interrupted(f"stopped after step {self._step}{self._hint}")

    @property
    def _num_stops(self) -> int:
        return max(self.stops.count, self.machines.num_stops)

    def _restart(self, error: TrainerError) -> None:
        """Kill what the trainer left, reward workers and other ranks included, and start it again."""
        self._num_restarts += 1
        self.progress.say(
            f"{error}; resuming from the newest checkpoint ({self._num_restarts} of {self.limits.restarts})"
        )
        while not self.engines.are_ready:  # one that is forked meanwhile would be killed
            self.engines.look()
            self._look(0)
            time.sleep(_POLL_S)
        engines = [process.pid for process in self.engines.processes()]
        RunWatch(self.folder.run_id, keep=engines).kill(grace_s=0)
        forget_reports(self.folder)
        self._trainer = self._start_trainer()

    def _watch_trainer(self) -> None:
        while self._trainer.exit_code is None:
            self._show_progress()
            self.engines.look()
            self._check_limits()
            self._check_others()
            if self._num_stops or self._rebalances:
                self._stop()
            time.sleep(_POLL_S)
        self._show_progress()
        self._raise_for_exit()

    def _check_others(self) -> None:
        """Raise TrainerError where the trainer of another machine has failed, RunError where its command has."""
        if failure := self.machines.failure(self._num_restarts):
            raise TrainerError(failure)
        self.machines.check()

    def _show_progress(self) -> None:
        for row in self._follower.read():
            self.progress.step(row)
            self._step = int(row.get("step", self._step))
            self._progressed = time.monotonic()
            self._start_s = self._start_s or self._progressed - self._began
            self._move = self._move or find_move(
                self.config,
                self.site,
                self.progress.say,
                step=self._step,
                cost_s=self._start_s,
            )
        mark = self.folder.step_began
        began_ns = mark.stat().st_mtime_ns if mark.exists() else 0
        if began_ns > self._step_began_ns:
            self._step_began_ns = began_ns
            self._progressed = time.monotonic()

    @property
    def _rebalances(self) -> bool:
        return self._move is not None and self._move.engine.rebalance

    def _check_limits(self) -> None:
        """Raise TrainerError for a trainer that makes no progress."""
        if not self.engines.are_ready:
            self._progressed = time.monotonic()
        silent_s = time.monotonic() - self._progressed
        if not self._step_began_ns and silent_s > self.limits.start_s:
            self._give_up(
                f"{self._trainer.ended.name} has been starting for {silent_s:.0f} s (engine.start_timeout_s)"
            )
        if self._step_began_ns and silent_s > self.limits.step_s:
            self._give_up(
                f"{self._trainer.ended.name} has not finished a step for {silent_s:.0f} s (step_timeout_s)"
            )

    def _stop(self) -> None:
        """Ask the trainer to save and end, and wait until it has. A second request kills it.

        A save has the time of a step, whether it was asked for by Ctrl-C or comes between two steps.
        """
        what_happens = "there is nothing to save"
        if self._will_save:
            what_happens = "the trainer finishes its step and saves a checkpoint"
        self.machines.tell("stop 1")
        if self._num_stops:
            self.progress.say(f"stopping: {what_happens}; press Ctrl-C again to stop at once")
        self._trainer.send(signal.SIGINT)
        began = time.monotonic()
        closes_by = began + _CLOSES_WITHIN_S
        signalled_ns = time.time_ns()
        while self._trainer.exit_code is None:
            self._show_progress()
            # The signal was lost where a step begins after it: Python may lose one in the midst of an import.
            if self._step_began_ns > signalled_ns:
                self._trainer.send(signal.SIGINT)
                signalled_ns = time.time_ns()
            self._check_others()
            now = time.monotonic()
            if not self.machines.has_ended:
                closes_by = now + _CLOSES_WITHIN_S
            is_late = now - began > _END_WITHIN_S or self.machines.has_ended
            if self._num_stops > 1 or now > closes_by or (is_late and not self._will_save):
                self.machines.tell("stop 2")
                self._trainer.send(signal.SIGKILL)
                raise Interrupted(f"stopped at once in step {self._step + 1}{self._hint}")
            silent_s = time.monotonic() - self._progressed
            if self._will_save and silent_s > self.limits.step_s:
                self._give_up(
                    f"{self._trainer.ended.name} did not save and end within {silent_s:.0f} s (step_timeout_s)"
                )
            time.sleep(_POLL_S)

    @property
    def _will_save(self) -> bool:
        return self.kind.trains and self._step_began_ns > 0

    def _raise_for_exit(self) -> None:
        """Return for a trainer that finished; raise the error that explains any other end."""
        code = self._trainer.exit_code
        if code == 0:
            return
        if code == Interrupted.exit_code and self._rebalances and not self._num_stops:
            raise Rebalanced(self._move)
        message = self._trainer.user_error()
        if code == UserError.exit_code and message is not None:
            raise UserError(message)
        # Asked to stop before its first step, it may have no handler yet and end in any way, such as a broken import.
        may_have_no_handler = code == -signal.SIGINT or self._step_began_ns == 0
        if code == Interrupted.exit_code or (self._num_stops and may_have_no_handler):
            raise Interrupted(f"stopped after step {self._step}{self._hint}")
        deadline = time.monotonic() + _BLAME_WITHIN_S
        while self.engines.processes() and time.monotonic() < deadline:
            self.engines.check()
            time.sleep(_POLL_S)
        ended = self._trainer.ended
        place = f"in step {self._step + 1}"
        if self.stops.count:
            place = f"while stopping after step {self._step}"
        error = f"{ended.name} ended with {ended.ending} (see {ended.log}), {place}"
        if _DEADLINE_MISSED.search(error):
            error += f" (the stack of every process is in {self._write_stacks(error)})"
        self._fail(error, is_cause=self._trainer.is_cause)

    def _fail(self, error: str, *, is_cause: bool) -> NoReturn:
        """Tell the other machines; raise the error, or that of the machine which explains it."""
        self.machines.tell(f"failed {self._num_restarts}", [error, is_cause])
        deadline = time.monotonic() + _CAUSE_WITHIN_S
        while not is_cause and self.machines.count > 1 and time.monotonic() < deadline:
            self._check_others()
            time.sleep(_POLL_S)
        raise TrainerError(error)

    def _give_up(self, why: str) -> NoReturn:
        # Read first: stopped processes are continued to write their stacks.
        activity = self._activity()
        stacks = self._write_stacks(why)
        self._fail(
            f"{why}, in step {self._step + 1} (it was {activity}; the stack of every process is in {stacks})",
            is_cause=True,
        )

    def _write_stacks(self, why: str) -> Path:
        return write_stacks(
            RunWatch(self.folder.run_id).look(),
            self.folder.logs / f"stacks-step-{self._step + 1}.txt",
            why=f"{why}, in step {self._step + 1}; it was {self._activity()}",
        )

    def _activity(self) -> str:
        activity = RunActivity(self.folder.root).look()
        return "; ".join([activity.now(), *activity.queue_words()])
