"""Where a run goes on: the rounds of its journal on disk, and the checkpoint that it starts from.

journal/round-000007-rank-0.json    two lines of JSON: a header with the sha256 of the second, and the round
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ycore.errors import RunFolderError
from ycore.run.checkpoints import (
    checkpoint_of,
    checkpoints_in,
    clear_leftovers,
    newest_whole,
    problem_of,
    set_aside_after,
    step_of,
)
from ycore.run.claim import Claim, Resume, changes, check_claim, in_words, write_description
from ycore.run.files import seal, sync, unseal, write_bytes_atomic
from ycore.run.paths import RunFolder
from ycore.run.text import Say

_ROUND_SCHEMA = 1
_ROUND_NAME = re.compile(r"round-(\d+)-rank-(\d+)\.json")


def round_file(journal: Path, step: int, rank: int) -> Path:
    return journal / f"round-{step:06d}-rank-{rank}.json"


def write_round(path: Path, label: Mapping[str, int], content: Mapping[str, Any]) -> None:
    """Write a rank's part of a round: one line of header and one of content, both JSON.

    Args:
        path: see `round_file`.
        label: keys of the header besides the schema and the content's sha256: step, rank, world, seed.
        content: the round, as plain JSON values.
    """
    write_bytes_atomic(path, seal({"schema": _ROUND_SCHEMA, **label}, content))


def read_round(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header and the round of a file that `write_round` wrote; RunFolderError where it is damaged."""
    try:
        return unseal(path.read_bytes(), schema=_ROUND_SCHEMA)
    except ValueError as problem:
        raise damaged_round(path, str(problem)) from None


def damaged_round(path: Path, problem: str) -> RunFolderError:
    return RunFolderError(f"{path} is damaged ({problem}); remove it and resume: its round is generated again")


def rounds_in(journal: Path) -> dict[int, set[int]]:
    """Step -> the ranks whose part of that step's round is there, in order."""
    found: dict[int, set[int]] = {}
    for _, step, rank in sorted(_round_files(journal), key=lambda one: one[1]):
        found.setdefault(step, set()).add(rank)
    return found


def drop_rounds(journal: Path, *, before: int = 0, after: int | None = None, rank: int | None = None) -> None:
    """Remove rounds from the journal, for good before anything else is written.

    Args:
        before: rounds of steps below it go.
        after: rounds of steps above it go; None keeps them.
        rank: only this rank's; None is all ranks'.
    """
    dropped = [
        path
        for path, step, its_rank in _round_files(journal)
        if (step < before or (after is not None and step > after)) and rank in (None, its_rank)
    ]
    for path in dropped:
        path.unlink(missing_ok=True)
    if dropped:
        sync(journal)


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
    matches = ((path, _ROUND_NAME.fullmatch(path.name)) for path in journal.glob("round-*.json"))
    return [(path, int(match[1]), int(match[2])) for path, match in matches if match]


def parse_checkpoint(text: str, folder: RunFolder) -> int:
    """The step that `--resume-from` names: a number, or a checkpoint's folder inside the run; else RunFolderError."""
    if text.isdigit():
        return int(text)
    path = Path(text).expanduser()
    if path.resolve().parent != folder.checkpoints.resolve() or not path.name.removeprefix("checkpoint-").isdigit():
        raise RunFolderError(
            f"--resume-from takes a step or a folder of {folder.checkpoints}; it is {text!r}; {_listed(folder)}"
        )
    return step_of(path)


def check_checkpoint(folder: RunFolder, step: int) -> None:
    """RunFolderError unless the run can go on from the checkpoint of this step; step 0 is the beginning."""
    checkpoint = checkpoint_of(folder.checkpoints, step)
    if step == 0:
        return
    if not checkpoint.is_dir():
        raise RunFolderError(f"{folder.root} has no checkpoint of step {step}; {_listed(folder)}")
    if problem := problem_of(checkpoint):
        raise RunFolderError(f"{checkpoint} is damaged ({problem}); {_listed(folder)}")


def settle(folder: RunFolder, config: BaseModel, how: Resume, *, say: Say) -> None:
    """Before anything is started, leave in the folder only what the run is to go on from, or raise RunFolderError.

    Checkpoints of later steps than `how` names are moved aside. Later rounds stay, and are trained on again as they
    were; where changed settings are accepted they are another run's, and are dropped.

    Args:
        how: the checkpoint to start from, and which changed settings are accepted.
        say: takes a line for whatever is moved or dropped.
    """
    held = Claim(folder)
    try:
        check_claim(folder, config, resume=True, how=how)
        clear_leftovers(folder.checkpoints)
        if how.step is not None:
            check_checkpoint(folder, how.step)
            for path in set_aside_after(folder.checkpoints, how.step):
                say(f"{path.name}: of a later step than {how.step}")
            folder.summary.unlink(missing_ok=True)
        newest = newest_whole(folder.checkpoints, say=say)
        step = 0 if newest is None else step_of(newest)
        say(f"going on from step {step}" if step else "going on from the first step: no checkpoint was saved yet")
        if how.accept_changes:
            if differences := changes(folder, config):
                say(f"accepted: {in_words(differences)}")
            drop_rounds(folder.journal, after=step - 1)
            folder.identity.unlink(missing_ok=True)
            write_description(folder, config, resume=True)
    finally:
        held.release()


def _listed(folder: RunFolder) -> str:
    steps = [str(step_of(path)) for path in checkpoints_in(folder.checkpoints)]
    return f"there are checkpoints of step {', '.join(steps)}" if steps else "no checkpoint was saved yet"
