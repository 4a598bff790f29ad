"""What a run does at this moment: its slots' lanes, its queues, the phase of its step.

It is read from trace.json and from the times of `step_began`, touched when a step begins, and of metrics.jsonl.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ycore.run.paths import RunFolder
from ycore.run.text import as_duration
from ycore.run.trace import (
    EVALUATION,
    FULL,
    IN_FLIGHT,
    ROUND,
    SWAP,
    SYNC,
    TRAIN,
    Event,
    Levels,
    Mark,
    Span,
    TraceFollower,
)
from ycore.view.lanes import Lane, Place, in_order

PHASES: Mapping[str, str] = {
    SYNC: "sending weights",
    ROUND: "generating and scoring",
    TRAIN: "training",
}
"""In the order of a step."""
_SAID = {**PHASES, EVALUATION: "evaluating"}

_DOES = {
    "rollout": "generating",
    "judge": "judging",
    "reward_model": "scoring by model",
    "teacher": "teaching",
}
_LONG_S = 10.0
_CLOCK_S = 0.05  # a file's time is a few milliseconds behind the clock


@dataclass(slots=True)
class Activity:
    """What the events of a trace amount to: a lane a slot, and the last levels and the phase of each rank."""

    lanes: dict[Place, Lane] = field(default_factory=dict)
    newest: float = 0.0
    is_full: bool = False
    waiting: dict[int, Levels] = field(default_factory=dict)
    in_flight: dict[int, Levels] = field(default_factory=dict)
    phases: dict[int, tuple[str, float]] = field(default_factory=dict)

    def add(self, events: list[Event]) -> None:
        """Events in the order they were written."""
        turns: dict[tuple[Place, str], list[tuple[float, float]]] = {}
        for event in events:
            match event:
                case Span(name=name) if name == ROUND:
                    self.phases[event.rank] = (TRAIN, event.began + event.seconds)
                case Span(name=name) if name == SWAP:
                    swaps = self.lanes.setdefault((event.rank, event.slot), Lane()).swaps
                    swaps.append((event.began, event.seconds, str(event.details.get("awake", ""))))
                    del swaps[:-1000]
                case Span():
                    turns.setdefault(((event.rank, event.slot), event.name), []).append(
                        (event.began, event.seconds)
                    )
                    self.newest = max(self.newest, event.began + event.seconds)
                case Mark(name=name) if name == FULL:
                    self.is_full = True
                case Mark():
                    self.phases[event.rank] = (event.name, event.at)
                case Levels(name=name) if name == IN_FLIGHT:
                    self.in_flight[event.rank] = event
                    self.newest = max(self.newest, event.at)
                    for key in event.values:
                        self.lanes.setdefault((event.rank, _role_and_slot(key)[1]), Lane())
                case Levels():
                    self.waiting[event.rank] = event
        for (place, role), stretches in turns.items():
            self.lanes.setdefault(place, Lane()).add(role, stretches)


@dataclass(frozen=True, slots=True)
class Scene:
    """A moment of a run, as it is drawn. `until` is now, or where the run is over, when it last did something."""

    activity: Activity
    until: float
    is_over: bool
    step_began: float | None
    step_ended: float | None

    @property
    def has_begun(self) -> bool:
        return self.step_began is not None or bool(self.activity.lanes)

    @property
    def shows_lanes(self) -> bool:
        return bool(self.activity.lanes) and not self.activity.is_full

    def queues(self) -> dict[str, tuple[int, int]]:
        """By role: requests in flight and requests that wait, over all ranks; only roles that any rank has reported."""
        flying, waiting = Counter[str](), Counter[str]()
        for levels in self.activity.in_flight.values():
            for key, count in levels.values.items():
                flying[_role_and_slot(key)[0]] += count * self._is_now(levels)
        for levels in self.activity.waiting.values():
            for role, count in levels.values.items():
                waiting[role] += count * self._is_now(levels)
        return {role: (flying[role], waiting[role]) for role in in_order({*flying, *waiting})}

    def flying(self, place: Place) -> int:
        """Requests in flight on a slot, whatever their role."""
        levels = self.activity.in_flight.get(place[0])
        counts = levels.values.items() if levels and self._is_now(levels) else ()
        return sum(count for key, count in counts if _role_and_slot(key)[1] == place[1])

    def open_since(self, place: Place) -> dict[str, float]:
        """By role: when the oldest request in flight on a slot began."""
        levels = self.activity.in_flight.get(place[0])
        if levels is None or not self._is_now(levels):
            return {}
        oldest = ((*_role_and_slot(key), seconds) for key, seconds in levels.oldest_s.items())
        return {role: levels.at - seconds for role, slot, seconds in oldest if slot == place[1]}

    def _is_now(self, levels: Levels) -> bool:
        """Whether they were reported in this step: the requests of an earlier one are gone, and count as none."""
        return (
            not self.is_over
            and self.step_began is not None
            and levels.at >= self.step_began - _CLOCK_S
        )

    def now(self) -> str:
        """`training for 12 s, 28 s into the step`: the phase of the rank that is least far in this step."""
        if self.step_began is None:
            return "starting"
        if self.step_ended is not None and self.step_ended >= self.step_began:
            return f"between steps for {self._for(self.step_ended)}"
        order, into = [*_SAID], f"{self._for(self.step_began)} into the step"
        known = [
            (order.index(phase), -since, rank)
            for rank, (phase, since) in self.activity.phases.items()
            if since >= self.step_began - _CLOCK_S and phase in order
        ]
        if not known:
            return into
        place, minus_since, rank = min(known)
        does = _SAID[order[place]]
        if order[place] == ROUND:
            if (
                queues := self.queues()
            ):  # with nothing in flight and nothing waiting it is the reward functions' turn
                busy = [_DOES.get(role, role) for role, counts in queues.items() if any(counts)]
                does = ", ".join(busy) or "scoring"
            began = [
                began for slot in self.activity.lanes for began in self.open_since(slot).values()
            ]
            if began and self.until - min(began) >= _LONG_S:
                into = f"one request for {self._for(min(began))}"
        who = "" if all(other == place for other, *_ in known) else f"rank {rank}: "
        return f"{who}{does} for {self._for(-minus_since)}, {into}"

    def queue_words(self) -> list[str]:
        queues = self.queues().items()
        return [
            f"{role.replace('_', ' ')} {fly} in flight, {wait} waiting"
            for role, (fly, wait) in queues
        ]

    def _for(self, since: float) -> str:
        return as_duration(max(0.0, self.until - since))


class RunActivity:
    """Reads a run's files for its `Scene`, twice a second at most, from any thread: `RunActivity(root).look()`.

    By default a run goes on until its summary is there.
    """

    def __init__(self, root: Path, *, goes_on: Callable[[], bool] | None = None) -> None:
        self._folder = RunFolder(root)
        self._goes_on = goes_on or (lambda: not self._folder.summary.is_file())
        self._follower = TraceFollower(self._folder.trace)
        self._activity = Activity()
        self._lock = threading.Lock()
        self._scene: Scene | None = None
        self._looked = 0.0

    def look(self) -> Scene:
        """The run at this moment, as far as its files show."""
        with self._lock:
            if self._scene is None or time.monotonic() - self._looked >= 0.5:
                self._scene, self._looked = self._look(), time.monotonic()
            return self._scene

    def _look(self) -> Scene:
        is_over = not self._goes_on()  # before reading: what was written last is then read too
        try:
            self._activity.add(self._follower.read())
        except OSError:  # a view is not worth a run
            self._activity.is_full = True
        until = self._activity.newest if is_over else time.time()
        began, ended = _touched(self._folder.step_began), _touched(self._folder.metrics)
        return Scene(self._activity, until, is_over, began, ended)


def _role_and_slot(key: str) -> tuple[str, int]:
    role, _, slot = key.rpartition(" ")
    return role, int(slot) if slot.isdecimal() else 0


def _touched(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None
