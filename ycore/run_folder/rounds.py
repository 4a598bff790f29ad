"""The journal's files by name: which rounds a run has on disk, and dropping those of steps that are to be taken anew.

Not here: what a round's file holds (`controller.journal` writes and reads it).
"""

import re
from pathlib import Path

from ycore.errors import RunFolderError

_NAME = re.compile(r"round-(\d+)-rank-(\d+)\.json")


def round_file(journal: Path, step: int, rank: int) -> Path:
    return journal / f"round-{step:06d}-rank-{rank}.json"


def rounds_in(journal: Path) -> dict[int, set[int]]:
    """Step -> the ranks whose part of that step's round is there."""
    found: dict[int, set[int]] = {}
    for _, step, rank in _round_files(journal):
        found.setdefault(step, set()).add(rank)
    return dict(sorted(found.items()))


def drop_rounds(journal: Path, *, before: int = 0, after: int | None = None, rank: int | None = None) -> None:
    """Remove the rounds of steps below `before` and above `after`, of one rank or of all."""
    for path, step, its_rank in _round_files(journal):
        if (step < before or (after is not None and step > after)) and rank in (None, its_rank):
            path.unlink(missing_ok=True)


def check_replay(run: Path, journal: Path) -> None:
    """RunFolderError unless the journal of `run` goes back to its first step."""
    rounds = rounds_in(journal)
    if not rounds:
        raise RunFolderError(f"--replay needs a run with a journal, and {run} has none; train it with --keep-journal")
    if 0 not in rounds:
        raise RunFolderError(
            f"--replay begins at the first step, and the journal of {run} begins at step {min(rounds)}; older rounds "
            "go with their checkpoints, unless the run is trained with --keep-journal"
        )


def _round_files(journal: Path) -> list[tuple[Path, int, int]]:
    matches = ((path, _NAME.fullmatch(path.name)) for path in (journal.iterdir() if journal.is_dir() else ()))
    return [(path, int(match[1]), int(match[2])) for path, match in matches if match]
