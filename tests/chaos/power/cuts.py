"""Cuts of the power, drawn from a seed: where in a recording, under which model, and what became of each."""

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.power.disk import ORDERS, Order
from tests.chaos.power.proof import Broken, Subject, judge, put, subject_of
from tests.chaos.power.recording import Operation
from tests.chaos.power.scenarios import go_on
from tests.chaos.runs import Setting

_LAST = 12
"""Operations at the end of a command: from about the summary on."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cut:
    """The power fails right after operation `after`; `number` and the seed draw what the disk then holds."""

    number: int
    subject: Subject
    after: int
    order: Order
    seed: int

    def state(self) -> dict[str, bytes | None]:
        """Draw what the disk holds, the same every time."""
        return self.subject.disk.after(
            self.after, self.order, random.Random(f"state/{self.seed}/{self.number}")
        )

    def __str__(self) -> str:
        name = self.subject.recording.name
        done = self.subject.recording.operations[self.after]
        return f"{name}, cut {self.number} ({self.order}) after operation {self.after}, {done.kind} {done.path}"


@dataclass(slots=True)
class Tally:
    """How many cuts came out how, and what is wrong with the others."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(self.outcomes.values()) + len(self.failures)


def draw_cuts(subjects: Sequence[Subject], *, count: int, seed: int) -> list[Cut]:
    """Draw four of ten cuts anywhere, four right after a change of names or a flush, two at the end of a command.

    Most operations are writes, and most of a finished run's life comes after its last operation.
    """
    draw = random.Random(f"cuts/{seed}")
    cuts = []
    for number in range(count):
        subject = subjects[number % len(subjects)]
        operations = subject.recording.operations
        pivots = [
            index
            for index, operation in enumerate(operations)
            if operation.kind not in ("write", "size")
        ]
        ends = [*(phase.first for phase in subject.recording.phases[1:]), len(operations)]
        last = [index for end in ends for index in range(end - _LAST, end)]
        after = draw.choice(draw.choices((range(len(operations)), pivots, last), (4, 4, 2))[0])
        cuts.append(Cut(number, subject, after, draw.choice(ORDERS), seed))
    return cuts


def judge_cuts(cuts: Sequence[Cut], *, say: Say = lambda line: None) -> Tally:
    """Judge each cut in a folder of its own, in memory where the machine has that."""
    tally = Tally()
    with _workplace() as place:
        pool = place / "pool"
        pool.mkdir()
        for cut in cuts:
            root = place / "recorded"
            try:
                put(state := cut.state(), root, pool)
                tally.outcomes[judge(cut.subject, cut.after, state, root)] += 1
            except Broken as problem:
                tally.failures.append(f"{cut}: {problem}")
                say(f"  FAIL {tally.failures[-1]}")
            finally:
                shutil.rmtree(root, ignore_errors=True)
            if tally.total % 1000 == 0:
                say(f"  {tally.total} cuts, {len(tally.failures)} failed")
    return tally


@contextmanager
def _workplace() -> Iterator[Path]:
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ycore-power-", dir=where) as place:
        yield Path(place)


def resume_cuts(cuts: Sequence[Cut], setting: Setting, *, say: Say) -> Tally:
    """Really resume from the state of each, to the end, and compare with the recorded run."""
    tally = Tally()
    for cut in cuts:
        root = setting.place / f"cut-{cut.number}"
        put(cut.state(), root, setting.place)
        status, difference, said = go_on(
            cut.subject.recording.phase(cut.after), setting, root / "run"
        )
        is_over = status == 2 and "finished" in said
        if (status == 0 or is_over) and difference.is_none:
            tally.outcomes["was finished" if is_over else "equal"] += 1
        else:
            tally.failures.append(f"{cut}: exit {status}, difference {difference}; {said}")
        say(
            f"  {'ok  ' if not tally.failures or str(cut) not in tally.failures[-1] else 'FAIL'} {cut}"
        )
    return tally


def _flushes(*parts: str) -> Callable[[Operation], bool]:
    """Match flushes of a path in which every part is found; a part with `=` in front is the whole path."""

    def matches(operation: Operation) -> bool:
        hits = (
            operation.path == part[1:] if part[0] == "=" else part in operation.path
            for part in parts
        )
        return operation.kind == "flush" and all(hits)

    return matches


CONTROLS: Mapping[str, Callable[[Operation], bool]] = {
    "a round's file": _flushes("/journal/."),
    "the journal's folder": _flushes("=run/journal"),
    "a checkpoint's files": lambda operation: (
        operation.kind == "flush" and "/.saving-" in operation.path and operation.offset >= 0
    ),
    "a checkpoint's manifest": _flushes("/.saving-", "manifest"),
    "a checkpoint's own folder": lambda operation: (
        operation.kind == "flush" and "/.saving-" in operation.path and operation.offset < 0
    ),
    "the folder of checkpoints": _flushes("=run/checkpoints"),
    "metrics": _flushes("metrics.jsonl"),
    "the model's files": lambda operation: (
        operation.kind == "flush" and "/model/" in operation.path and operation.offset >= 0
    ),
    "the model's folder": _flushes("=run/model"),
    "the summary": _flushes("summary.json"),
    "run.json": _flushes("run.json"),
    "the run's folder": _flushes("=run"),
}
"""A flush that is taken out of the recording, as if the package did not make it: the cuts must show that."""


def without(subject: Subject, is_dropped: Callable[[Operation], bool]) -> Subject | None:
    """Return the same recording without some flushes; None where it has none of them."""
    recording = subject.recording
    dropped = [
        index for index, operation in enumerate(recording.operations) if is_dropped(operation)
    ]
    if not dropped:
        return None
    # A flush of nothing in its place, so that every operation keeps its number.
    operations = list(recording.operations)
    for index in dropped:
        operations[index] = replace(operations[index], path="run/.nothing")
    return subject_of(replace(recording, operations=operations))[0]


def run_controls(
    subjects: Sequence[Subject], *, count: int, seed: int, say: Say
) -> dict[str, int]:
    """Count the cuts that fail without each of the flushes."""
    failed_cuts = {}
    for name, is_dropped in CONTROLS.items():
        mutants = [
            mutant
            for subject in subjects
            if (mutant := without(subject, is_dropped)) is not None
        ]
        tally = judge_cuts(draw_cuts(mutants, count=count, seed=seed)) if mutants else Tally()
        failed_cuts[name] = len(tally.failures)
        say(
            f"  {'ok  ' if tally.failures else 'FAIL'} without the flush of {name}: {len(tally.failures)} of {count}"
        )
    return failed_cuts


def as_json(tally: Tally) -> dict[str, Any]:
    return {
        "passed": sum(tally.outcomes.values()),
        "total": tally.total,
        "outcomes": dict(tally.outcomes),
        "failures": tally.failures[:100],
    }
