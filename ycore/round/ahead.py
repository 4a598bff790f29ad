"""Rounds ahead of training: while steps train, the engines write the rounds of the next ones.

With `--max-staleness 1`, and with `--deterministic`, weights change between two rounds. From 2 on they change between two
tokens: groups are always in flight, and a round is what is whole when its turn comes.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ycore.errors import YcoreError
from ycore.round.journal import Committed, states_of
from ycore.round.step import Controller
from ycore.run.trace import SYNC, TRAIN
from ycore.types import Group, JsonObject


@dataclass
class RoundsAhead:
    """How many rounds a stream has begun ahead of the step that trains: `number`, at most `most`.

    A round that is written later is written by a newer version, so no more are begun than keep training from waiting.
    """

    most: int
    number: int = 1
    num_calm: int = 0  # steps since the last of which a round was late

    def choose(self, *, waits: bool, is_tight: bool, too_old: bool) -> int:
        """Set the number at the beginning of a step, and return it.

        Groups that are begun together end together, so one calm step says little: fewer are begun after two.

        Args:
            waits: the step's round is not written.
            is_tight: the next step's is not.
            too_old: groups came too late to be trained on, which are the long ones, or few tokens count when corrected.
        """
        self.num_calm = 0 if waits or is_tight else self.num_calm + 1
        if too_old or self.num_calm > 1:
            self.num_calm = 0
            self.number = max(self.number - 1, 1)
        elif waits:
            self.number = min(self.number + 1, self.most)
        return self.number


class ControllerAhead(Controller):
    """Writes rounds up to `max_staleness` steps ahead, in a thread. A run has `num_steps` steps of one round each.

    The round of step s is begun while step s - K trains, or later, so that the version s - K or a later one writes it
    (AReaL's eta, arXiv 2505.24298, equation 3). The first round of a run, and of one that went on after its last step,
    is written by its own step's version. The loss corrects for versions by the log-probabilities that engines recorded.

    Where weights change between rounds, a stop and a checkpoint wait for the rounds that are begun: no later process
    could write them with the same weights. In a stream, a resumed run begins anew what was in flight.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        max_staleness: int,
        min_effective_share: float = 0.0,
        **parts: Any,
    ) -> None:
        super().__init__(**parts)
        self._min_effective_share = min_effective_share
        self._num_steps = num_steps
        self._streams = self.in_flight is not None and self.in_flight.streams
        self._ahead = RoundsAhead(max_staleness)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rounds-ahead")
        self._abandoned = threading.Event()
        self._rounds: dict[int, Future[Committed]] = {}  # begun, by step
        self._states: dict[int, JsonObject] = {}  # after the round of a step
        self._last_begun = self._step = -1
        self._num_dropped = 0.0  # groups of the last round, as too old
        self._waited_s = 0.0
        if self._streams:
            self._event_loop.start_thread()
        else:
            self._event_loop.ends_at = self._abandoned

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Return the round of this step; let this step's version write later ones."""
        began = time.perf_counter()
        if step not in self._rounds:
            self._begin(step, until=step, num_groups=num_groups)
        num_ahead = self._ahead.most
        if self._streams:
            num_ahead = self._enough_ahead(step)
        else:
            self.rest()
        self._begin(step, until=step + num_ahead, num_groups=num_groups)
        committed = self._written(step)
        self._num_dropped = committed.metrics["ycore/sampling/stale"]
        groups = self.hand_over(committed)
        del self._rounds[step]
        self._states.pop(step - 1, None)
        self._step = step
        waited_s = time.perf_counter() - began
        self._waited_s += waited_s
        if self._streams:
            self.record("ycore/time/waited", waited_s)
            self.record("ycore/rounds_ahead", num_ahead)
            self.slots.begin_phase(TRAIN)
        return groups

    def _enough_ahead(self, step: int) -> int:
        """Return how many rounds to have begun, the same number on all ranks."""
        is_off_policy = self.effective_share < self._min_effective_share
        return self._ahead.choose(
            waits=self.any_rank(not self._is_written(step), "waits"),
            is_tight=self.any_rank(not self._is_written(step + 1), "tight"),
            too_old=self.any_rank(self._num_dropped > 0 or is_off_policy, "too old"),
        )

    def _is_written(self, step: int) -> bool:
        return step in self._rounds and self._rounds[step].done()

    def _begin(self, version: int, *, until: int, num_groups: int) -> None:
        """Give engines this version, and begin the rounds up to that of the step `until`."""
        if self._synced != version:
            began = time.perf_counter()
            self.slots.begin_phase(SYNC)
            self.sync(version)
            self.record("ycore/time/sync", time.perf_counter() - began)
        for step in range(max(version, self._last_begun + 1), min(until + 1, self._num_steps)):
            self._rounds[step] = self._thread.submit(self._write, step, num_groups, version)
            self._last_begun = step

    def _write(self, step: int, num_groups: int, version: int) -> Committed:
        """Write a round in the thread, or take it from the journal."""
        if (before := self._rounds.get(step - 1)) is not None:
            before.result()  # none follows one that failed
        committed = self.committed(step, num_groups)
        if committed is None:
            version = step if self._streams else version
            committed = self.make_round(step=step, num_groups=num_groups, version=version)
        self._states[step] = states_of(self)
        return committed

    def _written(self, step: int) -> Committed:
        """Wait for a round; its error is raised with its step."""
        try:
            return self._rounds[step].result()
        except YcoreError as error:
            raise type(error)(f"the round of step {step}: {error}") from error

    def num_rounds_from(self, step: int) -> int:
        return 1 + self._last_begun - step if self._streams else 1

    def load(self, folder: Path, version: int) -> None:
        """Load weights; in a stream between two tokens, once no rank has a request at an engine."""
        if not self._streams:
            super().load(folder, version)
            return

        async def load() -> None:
            assert self.in_flight is not None
            await self.halt()
            await self.peers.meet(stopping=False, name="halted")
            await self.load_engines(folder, version)
            await self.peers.meet(stopping=False, name="loaded")
            self.in_flight.go_on(version)

        self._event_loop.run_alone(load())

    def rest(self) -> None:
        """Wait until all rounds that are begun are written: the same on all ranks."""
        for step in list(self._rounds):
            self._written(step)

    def settle(self) -> None:
        if not self._streams:
            began = time.perf_counter()
            self.rest()
            waited_s = time.perf_counter() - began
            self._waited_s += waited_s
            self.record("ycore/time/waited", waited_s)

    def take_seconds(self) -> float:
        """Seconds that training waited for rounds and syncs since the last call."""
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds

    def state(self) -> JsonObject:
        """The state after the round of the last step, without those ahead, which the journal has."""
        return self._states.get(self._step) or states_of(self)

    def close(self) -> None:
        self._abandoned.set()
        if self._streams:
            self.stop.set()
        self._thread.shutdown(cancel_futures=True)
        super().close()
