"""When a run is killed, and in which phase the kill landed.

A moment is drawn from the seed before anything starts. It is a place in the run's progress and not on a clock: a number
of finished steps, and a share of the next one. So a slow machine is killed where a fast one is. Start, steps and end
get equal shares of the moments, because most of a tiny run's time is its start.

The phase is read from the run folder: the weights, rounds, rows and checkpoints that the trainer writes.

    start -> (sync -> round -> commit -> train -> save)* -> end
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ycore.run.files import RunFolder


@dataclass(frozen=True, slots=True)
class Moment:
    """`share` of the next step, after `steps` of them; before the first step and after the last, of start and end."""

    steps: int
    share: float

    def __str__(self) -> str:
        return f"{self.steps}+{self.share:.3f}"

    def delay_s(self, pace: "Pace", *, of: int) -> float:
        """Return the seconds from the row of the last finished step to the kill, in a run of `of` steps."""
        length = (
            pace.start_s if self.steps == 0 else pace.end_s if self.steps == of else pace.step_s
        )
        return self.share * length


@dataclass(frozen=True, slots=True)
class Pace:
    """How long the parts of an undisturbed run took."""

    start_s: float
    step_s: float
    end_s: float
    until_model_s: float = 0.0
    """Seconds from the last step to the model in its folder, which is the trainer's part of the end."""


def draw_moments(count: int, *, steps: int, seed: int, row: str) -> list[Moment]:
    """Draw `count` moments of a row of the scorecard, dealt evenly over start, steps and end, in a random order."""
    deals, shares = (
        random.Random(f"{purpose}/{seed}/{row}") for purpose in ("deals", "shares")
    )
    places: list[int] = []
    while len(places) < count:
        deal = list(range(steps + 1))
        deals.shuffle(deal)
        places += deal
    return [Moment(steps=place, share=shares.random()) for place in places[:count]]


def pace_of(seconds_of_rows: Sequence[float], *, modelled: float, ended: float) -> Pace:
    """Return a whole run's pace by the seconds since its start at which its rows and model appeared and it ended."""
    gaps = sorted(later - earlier for earlier, later in pairwise(seconds_of_rows))
    middle = gaps[len(gaps) // 2] if gaps else 1.0
    last = seconds_of_rows[-1]
    return Pace(
        start_s=seconds_of_rows[0],
        step_s=middle,
        end_s=ended - last,
        until_model_s=modelled - last,
    )


Phase = Literal["start", "sync", "round", "commit", "train", "save", "end"]
PHASES: tuple[Phase, ...] = ("start", "sync", "round", "commit", "train", "save", "end")

_CHECKPOINT = "checkpoint-"
_ROUND = "round-"


@dataclass(frozen=True, slots=True)
class Glimpse:
    """A run folder at one instant."""

    rows: int = 0
    """Steps that have a row in metrics.jsonl."""

    rounds: int = 0
    """Rounds that were committed since the run began: the newest one's step, plus one."""

    committing: bool = False
    writing_weights: bool = False
    has_new_weights: bool = False
    """Whole weights lie there that are newer than the newest round."""

    checkpoint: int = 0
    """The step of the newest checkpoint that is in place."""

    saving: bool = False
    has_model: bool = False


def glimpse(folder: RunFolder) -> Glimpse:
    """Look now; files come and go meanwhile."""
    journal, shared = _times(folder.journal), _times(folder.shared_memory)
    rounds = {
        int(name.split("-")[1]): at for name, at in journal.items() if name.startswith(_ROUND)
    }
    weights = [at for name, at in shared.items() if name.endswith(".safetensors")]
    places = _times(folder.checkpoints)
    whole = [name for name in places if name.startswith(_CHECKPOINT)]
    return Glimpse(
        rows=count_rows(folder.metrics),
        rounds=max(rounds, default=-1) + 1,
        committing=any(name.startswith(f".{_ROUND}") for name in journal),
        writing_weights=any(name.startswith("part-") for name in shared),
        has_new_weights=max(weights, default=0) > max(rounds.values(), default=0),
        checkpoint=max((int(name.removeprefix(_CHECKPOINT)) for name in whole), default=0),
        saving=any(name.startswith(".saving-") for name in places),
        has_model=folder.model.is_dir(),
    )


def phase_of(seen: Glimpse, *, steps: int, checkpoint_every: int) -> Phase:
    """Return the phase of a run of so many steps. Pure."""
    is_due = seen.rows > 0 and (seen.rows % checkpoint_every == 0 or seen.rows >= steps)
    if seen.has_model or (seen.rows >= steps and seen.checkpoint >= steps and not seen.saving):
        return "end"
    if seen.committing:
        return "commit"
    if seen.saving or (is_due and seen.checkpoint < seen.rows):
        return "save"
    if seen.rounds > seen.rows:
        return "train"
    if seen.has_new_weights:
        return "round"
    return "sync" if seen.writing_weights or seen.rows else "start"


def count_rows(metrics: Path) -> int:
    """Count the whole rows of a file that is being written."""
    try:
        return metrics.read_bytes().count(b"\n")
    except OSError:
        return 0


def _times(folder: Path) -> dict[str, int]:
    """Return names and times of change, in nanoseconds; nothing where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_mtime_ns for entry in entries}
    except FileNotFoundError:
        return {}
