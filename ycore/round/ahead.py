"""Rounds one step ahead of training: while a step trains, the engines write the next one's round.

The round of step s + 1 is written by version s, which the step s starts from (one-step off-policy; AReaL's eta = 1,
arXiv 2505.24298, equation 3). The first round of a run, and of one that went on after its last step, is written by its
own step's version. The loss corrects for the version by the log-probabilities that the engine recorded.

A round ahead runs in a thread, and every other use of the controller is between `settle` and the next `next_round`. So
a checkpoint comes after the commit of the round that follows it: the version that wrote this one is gone by then.
"""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ycore.errors import YcoreError
from ycore.round.journal import Committed, states_of
from ycore.round.step import Controller
from ycore.run.trace import SYNC
from ycore.types import Group


@dataclass(frozen=True)
class _Ahead:
    """The round of `step`, and what the controller was before it."""

    step: int
    before: dict[str, Any]
    work: "Future[Committed]"


class ControllerAhead(Controller):
    """A `Controller` for a run of so many steps, each with a round. Engines must stay awake while the trainer trains.

    A stop lets the round under way end, since no later process could write it with the same weights.
    """

    def __init__(self, *, num_steps: int, **parts: Any) -> None:
        super().__init__(**parts)
        self._num_steps = num_steps
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="round-ahead")
        self._abandoned = threading.Event()
        self._ahead: _Ahead | None = None
        self._is_under_way = False
        self._waited_s = 0.0

    def next_round(self, *, step: int, num_groups: int) -> list[Group]:
        """Return the round generated during the previous step, and start generating the next one."""
        began = time.perf_counter()
        self.settle()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.step == step:
            groups = self.hand_over(ahead.work.result())
        else:
            groups = super().next_round(step=step, num_groups=num_groups)
        if step + 1 < self._num_steps and self.committed(step + 1, num_groups) is None:
            self._begin(step + 1, num_groups, version=step)
        self._waited_s += time.perf_counter() - began
        return groups

    def _begin(self, step: int, num_groups: int, *, version: int) -> None:
        before = states_of(self)
        with self.phase(SYNC):
            self.sync_for_round(version)
        self._is_under_way = True
        self._event_loop.ends_at = self._abandoned
        work = self._thread.submit(
            self.make_round, step=step, num_groups=num_groups, version=version
        )
        self._ahead = _Ahead(step, before, work)

    def settle(self) -> None:
        """Wait for the round ahead; its error is raised here, with its step."""
        if self._ahead is None or not self._is_under_way:
            return
        began = time.perf_counter()
        try:
            self._ahead.work.result()
        except YcoreError as error:
            raise type(error)(
                f"the round of step {self._ahead.step}, one ahead: {error}"
            ) from error
        finally:
            self._is_under_way = False
            self._event_loop.ends_at = self.stop
            waited = time.perf_counter() - began
            self._waited_s += waited
        self.record("ycore/time/waited", waited)

    def take_seconds(self) -> float:
        """Seconds that training waited for rounds and syncs since the last call."""
        seconds, self._waited_s = self._waited_s, 0.0
        return seconds

    def state(self) -> dict[str, Any]:
        """At the end of the last step: without the round ahead, which the journal has."""
        return states_of(self) if self._ahead is None else self._ahead.before

    def close(self) -> None:
        self._abandoned.set()
        self._thread.shutdown()
        super().close()
