"""Read what a run does at this moment: its slots, its queues, the phase of its step.

The sources are trace.json, the times of `step_began`, touched when a step begins, and of metrics.jsonl, and until the
first step the logs of the engines.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ycore.run.files import (
    MAX_SETTINGS_BYTES,
    LineFollower,
    RunFolder,
    parse_json,
    read_json,
    read_regular,
    read_tail,
)
from ycore.run.text import as_duration
from ycore.run.trace import (
    EVALUATION,
    IN_FLIGHT,
    ROUND,
    SYNC,
    TRAIN,
    Event,
    Levels,
    Span,
    new_events,
)
from ycore.run.work import Work, current

_PHASE_WORDS: Mapping[str, str] = {
    SYNC: "sending weights",
    ROUND: "generating and scoring",
    TRAIN: "training",
    EVALUATION: "evaluating",
}
"""Phases in the order of a step."""

_ROLE_WORDS = {
    "rollout": "generating",
    "judge": "judging",
    "reward_model": "scoring by model",
    "teacher": "teaching",
}

_ENGINE_PHASES = (
    (b"Initializing a V1 LLM engine", "starting"),
    (b"Starting to load model", "loading weights"),
    (b"Loading weights took", "warming up"),
    (b"Dynamo bytecode transform", "compiling"),
    (b"torch.compile took", "warming up"),
    (b"Capturing CUDA graphs", "capturing CUDA graphs"),
    (b"init engine (", "opening its socket"),
    (b"Available routes are", "ready"),
)
"""Parts of vLLM's log, and what the engine does from there on."""
_LOG_TAIL = 1 << 16

Place = tuple[int, int]
"""(rank, slot)"""

_CLOCK_S = 0.05  # a file's time is a few milliseconds behind the clock


@dataclass
class Activity:
    """The state after the events of a trace: the last levels and the phase of each rank."""

    newest: float = 0.0
    waiting: dict[int, Levels] = field(default_factory=dict)
    in_flight: dict[int, Levels] = field(default_factory=dict)
    phases: dict[int, tuple[str, float]] = field(default_factory=dict)

    def add(self, events: list[Event]) -> None:
        """Add events in the order they were written."""
        for event in events:
            if isinstance(event, Levels):
                levels = self.in_flight if event.name == IN_FLIGHT else self.waiting
                levels[event.rank] = event
                self.newest = max(self.newest, event.at)
            elif isinstance(event, Span):
                ended = event.began + event.seconds
                self.newest = max(self.newest, ended)
                if event.name == ROUND:
                    self.phases[event.rank] = (TRAIN, ended)
            else:
                self.phases[event.rank] = (event.name, event.at)


class Scene(NamedTuple):
    """A moment of a run, as it is drawn. `until` is now, or where the run is over, when it last did something."""

    activity: Activity
    until: float
    is_over: bool
    step_began: float | None
    step_ended: float | None
    starting: str = ""  # what the processes of a run that has not begun do
    work: Work | None = None  # of the trainer, beside its steps

    @property
    def has_begun(self) -> bool:
        return self.step_began is not None or bool(self.activity.newest)

    def queues(self) -> dict[str, tuple[int, int]]:
        """Return by role the requests in flight and those that wait, over all ranks that have reported it."""
        in_flight = Counter[str]()
        waiting = Counter[str]()
        for levels in self.activity.in_flight.values():
            for key, count in levels.values.items():
                in_flight[_role_and_slot(key)[0]] += count * self._is_now(levels)
        for levels in self.activity.waiting.values():
            for role, count in levels.values.items():
                waiting[role] += count * self._is_now(levels)
        roles = {*in_flight, *waiting}
        # As a completion meets them, then those of no known role.
        known = [role for role in _ROLE_WORDS if role in roles]
        ordered = [*known, *sorted(roles - _ROLE_WORDS.keys())]
        return {role: (in_flight[role], waiting[role]) for role in ordered}

    def slots(self) -> dict[Place, list[str]]:
        """Return what each slot does now, by role: `judge 12 in flight, the oldest for 8 s`."""
        words: dict[Place, list[str]] = {}
        for rank, levels in self.activity.in_flight.items():
            for key, count in levels.values.items():
                role, slot = _role_and_slot(key)
                of_slot = words.setdefault((rank, slot), [])
                if count and self._is_now(levels):
                    age = self._time_since(levels.at - levels.oldest_s.get(key, 0.0))
                    of_slot.append(f"{_spaced(role)} {count} in flight, the oldest for {age}")
        return words

    def _is_now(self, levels: Levels) -> bool:
        """Tell whether they were reported in this step: the requests of an earlier one are gone, and count as none."""
        if self.is_over or self.step_began is None:
            return False
        return levels.at >= self.step_began - _CLOCK_S

    def now(self) -> str:
        """Return `training for 12 s, 28 s into the step`: the phase of the rank that is least far in this step.

        Nothing goes on once the run is over.
        """
        if self.is_over:
            return ""
        if self.step_began is None:
            return self.starting or "starting"
        if self.work is not None:
            return self.work.line(self.until)
        # A file's time has the grain of the clock's tick: of two that are equal, the next step's beginning is the later.
        if self.step_ended is not None and self.step_ended > self.step_began:
            return f"between steps for {self._time_since(self.step_ended)}"
        elapsed = f"{self._time_since(self.step_began)} into the step"
        order = [*_PHASE_WORDS]
        phases = [
            (order.index(phase), -since, rank)
            for rank, (phase, since) in self.activity.phases.items()
            if since >= self.step_began - _CLOCK_S and phase in order
        ]
        if not phases:
            return elapsed
        place, minus_since, rank = min(phases)
        words = _PHASE_WORDS[order[place]]
        if order[place] == ROUND:
            words = self._round_words() or words
        is_shared = all(other == place for other, *_ in phases)
        who = "" if is_shared else f"rank {rank}: "
        return f"{who}{words} for {self._time_since(-minus_since)}, {elapsed}"

    def _round_words(self) -> str:
        """Return what the roles with requests do; with none, it is the reward functions' turn."""
        queues = self.queues()
        if not queues:
            return ""
        busy = [_ROLE_WORDS.get(role, role) for role, counts in queues.items() if any(counts)]
        return ", ".join(busy) or "scoring"

    def queue_words(self) -> list[str]:
        return [
            f"{_spaced(role)} {in_flight} in flight, {waiting} waiting"
            for role, (in_flight, waiting) in self.queues().items()
        ]

    def _time_since(self, at: float) -> str:
        return as_duration(max(0.0, self.until - at))


class RunActivity:
    """Read a run's files for its `Scene`, twice a second at most, from any thread: `RunActivity(root).look()`.

    By default a run goes on until its summary is there.
    """

    def __init__(self, root: Path, *, goes_on: Callable[[], bool] | None = None) -> None:
        self._folder = RunFolder(root)
        self._goes_on = goes_on or (lambda: not self._folder.summary.is_file())
        self._trace = LineFollower(self._folder.trace, tail_bytes=2**21)
        self._activity = Activity()
        self._lock = threading.Lock()
        self._scene: Scene | None = None
        self._looked = 0.0

    def look(self) -> Scene:
        """Return the run at this moment, as far as its files show."""
        with self._lock:
            if self._scene is None or time.monotonic() - self._looked >= 0.5:
                self._scene = self._look()
                self._looked = time.monotonic()
            return self._scene

    def _look(self) -> Scene:
        is_over = not self._goes_on()  # before reading: what was written last is then read too
        with suppress(OSError):  # a view is not worth a run
            self._activity.add(new_events(self._trace))
        until = self._activity.newest if is_over else time.time()
        step_began = _touched(self._folder.step_began)
        ended = _touched(self._folder.metrics)
        work = None if is_over else read_work(self._folder.work)
        starting = "" if step_began is not None else starting_words(self._folder, until)
        return Scene(
            self._activity,
            until,
            is_over=is_over,
            step_began=step_began,
            step_ended=ended,
            starting=starting,
            work=work,
        )


def read_work(board: Path) -> Work | None:
    """Return what a process has published; None where it has nothing to say."""
    try:
        work = Work(**parse_json(read_regular(board, max_bytes=MAX_SETTINGS_BYTES)))
        work.line(time.time())  # which needs numbers
        return work
    except (OSError, ValueError, TypeError, OverflowError):
        return None


def starting_words(folder: RunFolder, now: float) -> str:
    """Return `starting for 12 s: 2 engines loading weights, trainer loading the model`, from the processes' logs.

    Before, it is what this process itself is busy with, such as a model's conversion.
    """
    if (of_launcher := current()) is not None:
        return of_launcher.line(now)
    began = _touched(folder.engines)
    if began is None or began < (_touched(folder.config) or 0.0):
        return ""  # the engines of an earlier start
    plan = read_json(folder.engines)
    names = [
        *plan["engines"],
        *(name for scorer in plan.get("scorers", ()) for name in scorer["engines"]),
    ]
    by_phase: dict[str, list[str]] = {}
    for name in names:
        by_phase.setdefault(engine_phase(folder.log(name), since=began), []).append(name)
    words = [
        f"{who[0] if len(who) == 1 else f'{len(who)} engines'} {phase}"
        for phase, who in by_phase.items()
        if phase
    ]
    work = read_work(folder.work)
    if work is not None:
        words.append(f"trainer {work.words}")
    elif folder.log("trainer").is_file():
        words.append("trainer getting ready")
    head = f"starting for {as_duration(now - began)}"
    return f"{head}: {', '.join(words)}" if words else head


def engine_phase(log: Path, *, since: float) -> str:
    """Return what the engine with this log does, such as `loading weights`; nothing while there is no log.

    A log that was not written to `since` is that of an earlier start.
    """
    try:
        if log.stat().st_mtime < since:
            return "starting"
        tail = read_tail(log, _LOG_TAIL)
    except OSError:
        return ""
    places = [(tail.rfind(mark), phase) for mark, phase in _ENGINE_PHASES if mark in tail]
    return max(places, default=(0, "starting"))[1]


def slot_names(places: Sequence[Place]) -> list[str]:
    """Return `slot 3`, or with several ranks `rank 1, 3`."""
    ranks = {rank for rank, _ in places}
    return [
        f"slot {slot}" if len(ranks) < 2 else f"rank {rank}, {slot}" for rank, slot in places
    ]


def _spaced(role: str) -> str:
    return role.replace("_", " ")


def _role_and_slot(key: str) -> tuple[str, int]:
    role, _, slot = key.rpartition(" ")
    return role, int(slot) if slot.isdecimal() else 0


def _touched(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None
