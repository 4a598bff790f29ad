"""In which phase a run was when it was killed, as its folder tells it.

    start -> (sync -> round -> commit -> train -> save)* -> end

The trainer's files are the clock: the weights it shares, the rounds it commits, the rows and checkpoints it writes. So
nothing is asked of the product for this.

Not here: killing (`trial`).
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ycore.run.paths import RunFolder

Phase = Literal["start", "sync", "round", "commit", "train", "save", "end"]
PHASES: tuple[Phase, ...] = ("start", "sync", "round", "commit", "train", "save", "end")

_CHECKPOINT = "checkpoint-"
_ROUND = "round-"


@dataclass(frozen=True, slots=True)
class Glimpse:
    """A run folder at one instant."""

    rows: int = 0
    """Steps that metrics.jsonl tells of."""

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
    rounds = {int(name.split("-")[1]): at for name, at in journal.items() if name.startswith(_ROUND)}
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
    """The phase of a run of so many steps. Pure."""
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
    """Whole rows of a file that is being written."""
    try:
        return metrics.read_bytes().count(b"\n")
    except OSError:
        return 0


def _times(folder: Path) -> dict[str, int]:
    """Names and times of change, in nanoseconds; nothing where there is no folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_mtime_ns for entry in entries}
    except FileNotFoundError:
        return {}
