"""Resume a run: the rounds of its journal on disk, and the checkpoint that it starts from.

journal/round-000007-rank-0.json    two lines of JSON: a header with the sha256 of the second, and the round
"""

import contextlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ycore.errors import ConfigError, RunFolderError
from ycore.run.checkpoints import (
    MIN_KEPT,
    check_ranks,
    checkpoint_of,
    checkpoint_problem,
    checkpoints_in,
    newest_for,
    newest_whole,
    read_checkpoint_manifest,
    set_aside_after,
    step_of,
)
from ycore.run.claim import (
    Claim,
    Resume,
    changes,
    check_claim,
    check_contents,
    in_words,
    write_description,
)
from ycore.run.files import RunFolder, read_regular, seal, sync, unseal, write_bytes_atomic
from ycore.run.text import Say

_ROUND_SCHEMA = 1
_MAX_ROUND_BYTES = 2**33
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
    """Return the header and the round of a file of `write_round`; RunFolderError where it is damaged."""
    try:
        return unseal(read_regular(path, max_bytes=_MAX_ROUND_BYTES), schema=_ROUND_SCHEMA)
    except ValueError as problem:
        raise damaged_round(path, str(problem)) from None


def damaged_round(path: Path, problem: str) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged ({problem}); remove it and resume: its round is generated again"
    )


def rounds_in(journal: Path) -> dict[int, set[int]]:
    """Return, by step in order, the ranks whose part of that step's round is there."""
    ranks: dict[int, set[int]] = {}
    for _, step, rank in sorted(_round_files(journal), key=lambda file: file[1]):
        ranks.setdefault(step, set()).add(rank)
    return ranks


def drop_rounds(
    journal: Path,
    *,
    before: int = 0,
    after: int | None = None,
    of: Callable[[int], bool] = lambda rank: True,
) -> None:
    """Remove rounds from the journal, for good before anything else is written.

    Args:
        before: rounds of steps below it go.
        after: rounds of steps above it go; None keeps them.
        of: called with a rank; False keeps that rank's rounds.
    """
    dropped = [
        path
        for path, step, rank in _round_files(journal)
        if (step < before or (after is not None and step > after)) and of(rank)
    ]
    for path in dropped:
        path.unlink(missing_ok=True)
    if dropped:
        sync(journal)


def check_num_kept(limit: int | None) -> None:
    """Raise ConfigError where fewer checkpoints are to be kept than a damaged one needs beside it."""
    if limit is not None and limit < MIN_KEPT:
        raise ConfigError(
            f"save_total_limit must be {MIN_KEPT} or more, so that one checkpoint is whole where another is damaged; "
            f"it is {limit}"
        )


def check_replay(run: Path, journal: Path) -> None:
    """Raise RunFolderError unless the journal of `run` goes back to its first step."""
    rounds = rounds_in(journal)
    if not rounds:
        raise RunFolderError(
            f"--replay needs a run with a journal, and {run} has none; train it with --keep-journal"
        )
    if 0 not in rounds:
        raise RunFolderError(
            f"--replay begins at the first step, and the journal of {run} begins at step {min(rounds)}; older rounds "
            "go with their checkpoints, unless the run is trained with --keep-journal"
        )


def _round_files(journal: Path) -> list[tuple[Path, int, int]]:
    matches = (
        (path, _ROUND_NAME.fullmatch(path.name)) for path in journal.glob("round-*.json")
    )
    return [(path, int(match[1]), int(match[2])) for path, match in matches if match]


def parse_checkpoint(text: str, folder: RunFolder) -> int:
    """Return the step of `--resume-from`: a number, or a checkpoint's folder inside the run; else RunFolderError."""
    if text.isdigit():
        return int(text)
    path = Path(text).expanduser()
    if (
        path.resolve().parent != folder.checkpoints.resolve()
        or not path.name.removeprefix("checkpoint-").isdigit()
    ):
        raise RunFolderError(
            f"--resume-from takes a step or a folder of {folder.checkpoints}; it is {text!r}; {_listed(folder)}"
        )
    return step_of(path)


def check_checkpoint(folder: RunFolder, step: int) -> None:
    """Raise RunFolderError unless the run can go on from the checkpoint of this step; step 0 is the beginning."""
    checkpoint = checkpoint_of(folder.checkpoints, step)
    if step == 0:
        return
    if not checkpoint.is_dir():
        raise RunFolderError(
            f"{folder.root} has no checkpoint of step {step}; {_listed(folder)}"
        )
    if problem := checkpoint_problem(checkpoint):
        raise RunFolderError(f"{checkpoint} is damaged ({problem}); {_listed(folder)}")


def check_began_with(folder: RunFolder, contents: dict[str, str] | None) -> None:
    """RunFolderError where a run would go on with other contents than it began with, or nobody knows with which.

    `contents`: None where they are not known before the model is fetched.
    """
    if folder.identity.is_file():
        if contents is not None:
            check_contents(folder, contents)
    elif checkpoints_in(folder.checkpoints) or rounds_in(folder.journal):
        raise RunFolderError(
            f"{folder.identity} is missing, so nobody knows whether dataset, model and rewards are those that the run "
            "began with; put it back, or go on all the same with --resume --accept-changes"
        )


def outlook(folder: RunFolder, options: Resume) -> list[str]:
    """Say from which checkpoint `settle` would go on, and which damaged ones it would pass over; nothing is changed."""
    lines: list[str] = []
    step = options.step
    if step is None:
        newest = newest_whole(folder.checkpoints, say=lines.append, moves=False)
        step = 0 if newest is None else step_of(newest)
    return [*lines, _beginning(step)]


def _beginning(step: int) -> str:
    if step:
        return f"going on from step {step}"
    return "going on from the first step: no checkpoint was saved yet"


def settle(
    folder: RunFolder, config: BaseModel, options: Resume, *, world: int, say: Say
) -> None:
    """Before anything is started, leave in the folder only what the run is to go on from, or raise RunFolderError.

    Checkpoints of later steps than `options` names are moved aside. Later rounds stay, and are trained on again as they
    were; where changed settings are accepted they are another run's, and are dropped.

    Args:
        options: the checkpoint to start from, and which changed settings are accepted.
        world: the number of ranks that go on, which may be another than before (`check_ranks`).
        say: takes a line for whatever is moved or dropped.
    """
    folder_claim = Claim(folder)
    try:
        check_claim(folder, config, resume=True, resume_options=options)
        newest = _newest_checkpoint(folder, options.step, world=world, say=say)
        step = 0 if newest is None else step_of(newest)
        folder.summary.unlink(missing_ok=True)  # a finished run that goes on is not finished
        say(_beginning(step))
        world_before = _world_before(folder, newest)
        if world_before not in (None, world):
            say(
                f"{world} rank{'s' if world > 1 else ''} instead of {world_before}: the prompts come in the same "
                f"order, each once, and from here on the losses are those of {world}"
            )
        if options.accept_changes:
            if differences := changes(folder, config):
                say(f"accepted: {in_words(differences)}")
            drop_rounds(folder.journal, after=step - 1)
            folder.identity.unlink(missing_ok=True)
            write_description(folder, config, resume=True)
    finally:
        folder_claim.release()


def _newest_checkpoint(
    folder: RunFolder, step: int | None, *, world: int, say: Say
) -> Path | None:
    """Move checkpoints after `step` aside, and return the newest that verifies and that `world` ranks can load."""
    if step is not None:
        check_checkpoint(folder, step)
        for path in set_aside_after(folder.checkpoints, step):
            say(f"{path.name}: of a later step than {step}")
    return newest_for(folder.checkpoints, world=world, say=say)


def check_world(folder: RunFolder, options: Resume, *, world: int) -> None:
    """Check the ranks of the checkpoint that the run would go on from, by its manifest alone (`check_ranks`)."""
    for checkpoint in reversed(checkpoints_in(folder.checkpoints)):
        if options.step not in (None, step_of(checkpoint)):
            continue
        try:
            read_checkpoint_manifest(checkpoint)
        except RunFolderError:
            continue  # it is passed over when the run goes on
        check_ranks(checkpoint, world=world)
        return


def _world_before(folder: RunFolder, newest: Path | None) -> int | None:
    """Return the number of ranks that left the checkpoint, or else the first round; None where neither is there."""
    if newest is not None:
        return read_checkpoint_manifest(newest).world
    with contextlib.suppress(RunFolderError, FileNotFoundError):
        _, content = read_round(round_file(folder.journal, 0, 0))
        return int(content["world"])
    return None


def _listed(folder: RunFolder) -> str:
    steps = [str(step_of(path)) for path in checkpoints_in(folder.checkpoints)]
    if not steps:
        return "no checkpoint was saved yet"
    return f"there are checkpoints of step {', '.join(steps)}"
